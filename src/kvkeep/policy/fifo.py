"""FIFO: the chunk that came in first goes first, however often it was used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from itertools import islice
from typing import ClassVar

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V


class FIFOPolicy(CachePolicy[V]):
    """Order of arrival.

    The mapping is an OrderedDict, not a plain dict: a plain dict keeps the place of a deleted entry
    until it is rebuilt, so that finding its first entry again and again costs time proportional to
    everything deleted before.
    """

    name: ClassVar[str] = "fifo"

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict in order of arrival."""
        return OrderedDict()

    def update_on_put(self, key: ChunkKey) -> None:
        """Nothing to note: the mapping keeps the order."""

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """A hit changes nothing."""

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Nothing to forget."""

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
    ) -> list[ChunkKey]:
        """The oldest chunks."""
        free = (key for key, value in mapping.items() if can_evict(value))
        return list(islice(free, num_candidates))
