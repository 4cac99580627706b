"""FIFO: the chunk that came in first goes first, however often it was used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import ClassVar, cast

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick


class FIFOPolicy(CachePolicy[V]):
    """Order of arrival. A chunk arrives at the latest with the last one that follows it.

    The mapping is an OrderedDict, not a plain dict: a plain dict keeps the place of a deleted entry
    until it is rebuilt, so that finding its first entry again and again costs time proportional to
    everything deleted before.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        """Nothing has arrived yet."""
        self._count = 0
        self._arrived: dict[ChunkKey, int] = {}

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict in order of arrival."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Let chunks arrive anew before which one that follows them came later."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        latest = 0
        for key in reversed(keys):
            arrived = self._arrived.get(key, latest)
            if arrived < latest:
                ordered.move_to_end(key)
                self.update_on_put(key)
                arrived = self._count
            latest = arrived

    def update_on_put(self, key: ChunkKey) -> None:
        """Count the arrival; the order itself is the mapping's."""
        self._count += 1
        self._arrived[key] = self._count

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """A hit changes nothing."""

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Forget when it came."""
        del self._arrived[key]

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The oldest chunks."""
        return pick(mapping.items(), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Let them arrive anew: what is in use when its turn comes gets another turn."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key)
            self.update_on_put(key)
