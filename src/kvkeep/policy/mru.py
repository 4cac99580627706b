"""MRU: the chunk that was used last goes first.

For scans that go round and round through more chunks than fit: LRU then never hits, MRU keeps the
part that it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import ClassVar, cast

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick


class MRUPolicy(CachePolicy[V]):
    """Order of the last use, backwards; arrival counts as a use."""

    name: ClassVar[str] = "mru"

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict, most recent last."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the last chunk the most recent one, since that one goes first."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
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
        """The most recent chunks."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        return pick(reversed(ordered.items()), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make them the least recent ones, until the ends of their pins note their use."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key, last=False)
