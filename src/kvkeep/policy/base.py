"""CachePolicy: in which order chunks are evicted.

A policy owns the mapping that a backend keeps its entries in, and is told about every put, hit and
eviction. The backend calls it with its lock held; a policy has no lock and starts no thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import ClassVar, Generic, TypeVar

from kvkeep.hashing import ChunkKey

V = TypeVar("V")


class CachePolicy(ABC, Generic[V]):
    """Order of eviction. Every call except get_evict_candidates is O(1) or O(log n)."""

    #: Name in the settings, in lower case.
    name: ClassVar[str]

    @abstractmethod
    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """A new, empty mapping for the backend's entries (its ``hot_cache``)."""

    def note_chain(self, keys: Sequence[ChunkKey]) -> None:
        """``keys`` stand one after the other in one prompt, and all but the first are missing.

        A chunk is worthless without the one before it. The backend says this when a lookup ends at
        a missing chunk, before that chunk and those after it are put; a policy that has no use for
        it ignores it. It may be said several times, and the chunks need not follow.

        Args:
            keys: the last chunk that is present, if there is one, and the missing ones after it.
        """

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """``keys`` follow each other in one prompt: of those here, the later ones shall go first.

        The backend says this when a prompt was stored or loaded, perhaps as the next of several
        parts. It is no use of the chunks. A policy with an order that cannot be wrong ignores it.

        Args:
            keys: the chunks of a prompt in order; some may be missing.
            mapping: the mapping from :meth:`init_mutable_mapping`.
        """

    @abstractmethod
    def update_on_put(self, key: ChunkKey) -> None:
        """``key`` was just inserted into the mapping."""

    @abstractmethod
    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """``key``, which is in the mapping, was used."""

    def update_on_hits(
        self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]
    ) -> None:
        """``keys``, which are in the mapping, were used one after the other.

        The same as :meth:`update_on_hit` for each; a policy may be quicker with all of them.
        """
        for key in keys:
            self.update_on_hit(key, mapping)

    @abstractmethod
    def update_on_force_evict(self, key: ChunkKey) -> None:
        """``key`` was just removed from the mapping, by eviction or on purpose."""

    @abstractmethod
    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """Up to ``num_candidates`` keys to evict next, best first. Without side effects.

        Args:
            mapping: the mapping from :meth:`init_mutable_mapping`.
            num_candidates: how many are wanted; fewer are returned if fewer can be evicted.
            can_evict: False for entries that are pinned or referenced.
            passed: gets the keys that stood before or between the candidates and cannot go.
        """

    @abstractmethod
    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """``keys`` are pinned, and a search for candidates met them in this order.

        They shall not stand in the way of the next searches, which would otherwise pass all of them
        again and again. Their use is noted when the pin ends (:meth:`update_on_hit`), so this
        counts none for good.
        """


def pick(
    items: Iterable[tuple[ChunkKey, V]],
    num_candidates: int,
    can_evict: Callable[[V], bool],
    passed: list[ChunkKey] | None,
) -> list[ChunkKey]:
    """The first ``num_candidates`` keys that can go; see :meth:`CachePolicy.get_evict_candidates`.

    Args:
        items: chunks in order of eviction.
        num_candidates: how many are wanted.
        can_evict: whether a chunk can go.
        passed: gets the keys before the last candidate that cannot.
    """
    chosen: list[ChunkKey] = []
    if num_candidates < 1:
        return chosen
    for key, value in items:
        if can_evict(value):
            chosen.append(key)
            if len(chosen) == num_candidates:
                break
        elif passed is not None:
            passed.append(key)
    return chosen
