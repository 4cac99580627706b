"""ProbationPolicy: newcomers wait in a short queue, what is used again or comes again stays.

A first-in-first-out queue of a tenth of the pool holds what is new. What was used there by the time
it reaches the end moves on to the main queue, the rest goes and is remembered by name for two
turnovers of the pool; what comes again while it is remembered goes to the main queue at once. The
main queue is in order of the last use. This resists scans, and is worse than LRU where reuse is
recent; docs/policies.md has figures. (T. Johnson and D. Shasha, "2Q", VLDB 1994; J. Yang et al.,
"FIFO queues are all you need for cache eviction", SOSP 2023.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import islice
from typing import ClassVar

from kvkeep.hashing import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick

#: Share of the pool that newcomers have.
_PROBATION_SHARE = 0.1
#: Names that are remembered, in turnovers of the pool.
_GHOST_TURNOVERS = 2


class ProbationPolicy(CachePolicy[V]):
    """Probation, then a main queue in order of the last use."""

    name: ClassVar[str] = "probation"

    def __init__(self) -> None:
        """Know nothing yet."""
        self._new: OrderedDict[ChunkKey, bool] = OrderedDict()  # used since; in order of arrival
        self._main: OrderedDict[ChunkKey, None] = OrderedDict()  # least recent first
        self._gone: OrderedDict[ChunkKey, None] = OrderedDict()

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """A dict; the order is kept apart from it."""
        return {}

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Within each of the two queues make the first chunk the last one to go."""
        for key in reversed(keys):
            if key in self._new:
                self._new.move_to_end(key)
            elif key in self._main:
                self._main.move_to_end(key)

    def update_on_put(self, key: ChunkKey) -> None:
        """Put it on probation, or into the main queue if it is remembered."""
        if key in self._gone:
            del self._gone[key]
            self._main[key] = None
        else:
            self._new[key] = False

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """Note the use of a newcomer; make another chunk the most recent one."""
        if key in self._new:
            self._new[key] = True
        else:
            self._main.move_to_end(key)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Promote the newcomers before ``key`` that were used, and remember ``key`` by name."""
        if key in self._main:
            del self._main[key]
            return
        self._promote(key)
        del self._new[key]
        self._gone[key] = None
        while len(self._gone) > _GHOST_TURNOVERS * max(len(self._new) + len(self._main), 1):
            self._gone.popitem(last=False)

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """Unused newcomers while there are too many of them, then the main queue."""
        items = ((key, mapping[key]) for key in self._in_order())
        return pick(items, num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Note the use of newcomers early; make the others the most recent ones."""
        for key in keys:
            self.update_on_hit(key, mapping)

    def _in_order(self) -> Iterator[ChunkKey]:
        """All chunks as they would go, were they let go one after the other."""
        total = len(self._new) + len(self._main)
        excess = len(self._new) - int(_PROBATION_SHARE * total)
        promoted: list[ChunkKey] = []
        newcomers = iter(self._new.items())
        for key, uses in islice(newcomers, max(excess, 0)):
            if uses:
                promoted.append(key)
            else:
                yield key
        yield from self._main
        yield from promoted
        yield from (key for key, _ in newcomers)

    def _promote(self, until: ChunkKey) -> None:
        """Newcomers that are older than ``until`` were used: they move to the main queue."""
        while True:
            key, uses = next(iter(self._new.items()))
            if key == until or not uses:
                return
            del self._new[key]
            self._main[key] = None
