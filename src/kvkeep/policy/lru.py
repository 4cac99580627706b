"""LRU: the chunk that was not used for the longest time goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import ClassVar, cast

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick


class LRUPolicy(CachePolicy[V]):
    """Order of the last use; arrival counts as a use."""

    name: ClassVar[str] = "lru"

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict, least recent first."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the first chunk the most recent one, then the second, and so on."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in reversed(keys):
            if key in ordered:
                ordered.move_to_end(key)

    def update_on_put(self, key: ChunkKey) -> None:
        """Nothing to note: a new entry of the mapping is its most recent one."""

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the chunk the most recent one."""
        cast("OrderedDict[ChunkKey, V]", mapping).move_to_end(key)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Nothing to forget."""

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The least recent chunks."""
        return pick(mapping.items(), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make them the most recent ones, which the ends of their pins will do for good."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key)
