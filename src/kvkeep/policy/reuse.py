"""ReusePolicy: the chunk whose next use is least worth waiting for goes first, suffixes foremost.

The default. It learns, while it runs, how long chunks of different kinds wait for their next use
(:mod:`kvkeep.policy.reuse_model`, :mod:`kvkeep.policy.reuse_classes`), and remembers for some
turnovers of the pool the names of chunks that went, so that it learns also from those it should
have kept. Nothing is tuned to a workload: with reuse that is recent it acts like LRU, with few
chunks that are popular for long like a probation queue, with loops it keeps a fixed part.

A chunk with a successor in the pool is no candidate, since the successor would be worthless without
it. Chains are known from :meth:`note_chain`; without it every chunk stands alone.

Every update is O(1) but for a constant share of what each epoch costs; a candidate is O(log n).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import pairwise
from typing import ClassVar

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V
from kvkeep.policy.reuse_classes import (
    GROUP_ODDS,
    GROUPS,
    UNKNOWN,
    class_of_new,
    class_of_used,
)
from kvkeep.policy.reuse_model import (
    BUCKET_OF_AGE,
    EPOCHS_PER_TURNOVER,
    HORIZON_TURNOVERS,
    NUM_AGES,
    ReuseModel,
)
from kvkeep.policy.reuse_state import (
    HAS_NEXT,
    PARTS,
    class_of,
    epoch_of,
    history_after_use,
    least_state,
    new_state,
    queue_number,
    queue_of,
    used_state,
    uses_of,
)

#: Chains noted and not put yet, in chunks; the oldest are forgotten.
_MAX_NOTED = 1 << 16
#: Names of chunks that went are remembered up to this many, or one turnover of a larger pool.
_MAX_GONE = 1 << 20
#: A smaller pool is treated as one of this many chunks.
_MIN_CHUNKS = 64

_PARTS_PER_TURNOVER = PARTS * EPOCHS_PER_TURNOVER

#: Order of eviction: index, and the queue, which is the less the older it is.
Rank = tuple[float, int]


class ReusePolicy(CachePolicy[V]):
    """Order of the learned worth of waiting for the next use."""

    name: ClassVar[str] = "reuse"

    def __init__(self) -> None:
        """Know nothing yet."""
        self._model = ReuseModel(GROUPS, GROUP_ODDS)
        self._index = self._model.indices(_MIN_CHUNKS)
        self._learned_chunks = _MIN_CHUNKS  # in the pool when the current epoch began
        self._epoch = 0
        self._epoch_part = 0.0  # of the current epoch that has passed
        # what is known of each chunk, see reuse_state: of those stored, and of those remembered
        self._stored: dict[ChunkKey, int] = {}
        self._gone: OrderedDict[ChunkKey, int] = OrderedDict()
        self._before: dict[ChunkKey, ChunkKey] = {}  # predecessors of those stored, if known
        self._noted: OrderedDict[ChunkKey, tuple[ChunkKey | None, int]] = OrderedDict()
        self._num_after: dict[ChunkKey, int] = {}  # stored successors of a chunk, if any
        # chunks without a stored successor, by queue; none is empty
        self._ends: dict[int, OrderedDict[ChunkKey, None]] = {}
        self._ranked: list[Rank] | None = []  # of all queues in _ends, sorted; None: to be made
        self._aside: set[ChunkKey] = set()  # ends that are pinned, and in no queue therefore

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """A dict; the order is kept apart from it."""
        return {}

    def note_chain(self, keys: Sequence[ChunkKey]) -> None:
        """Remember which chunk each missing one follows, and what kind of prompt brings it."""
        if not keys:
            return
        first = self._stored.get(keys[0])
        missing = keys if first is None else keys[1:]
        if not missing:
            return
        before = None if first is None else keys[0]
        uses_before = 0 if first is None else uses_of(first)
        inner = class_of_new(uses_before, len(missing), is_end=False)
        end = class_of_new(uses_before, len(missing), is_end=True)
        noted = self._noted
        for key in missing:
            known = noted.get(key)
            if known is None or known[0] is None:
                noted[key] = (before, end if key is missing[-1] else inner)
            before = key
        while len(noted) > _MAX_NOTED:
            noted.popitem(last=False)

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Learn what follows what, where :meth:`note_chain` has not said it."""
        for before, key in pairwise(keys):
            if key in self._stored and key not in self._before:
                self._before[key] = before
                self._add_successor(before)

    def update_on_put(self, key: ChunkKey) -> None:
        """File the chunk in its queue; one that is remembered was used again."""
        before, chunk_class = self._noted.pop(key, (None, UNKNOWN))
        gone = self._gone.pop(key, None)
        if gone is None:
            state = new_state(queue_number(self._epoch, chunk_class))
            self._model.start_waiting(chunk_class)
        else:
            state = self._after_use(gone)
            self._note_use(gone, state, 1)
        if key in self._num_after:
            state |= HAS_NEXT
        else:
            self._add_end(key, queue_of(state))
        self._stored[key] = state
        if before is not None:
            self._before[key] = before
            self._add_successor(before)
        self._epoch_part += EPOCHS_PER_TURNOVER / max(len(self._stored), _MIN_CHUNKS)
        while self._epoch_part >= 1:
            self._epoch_part -= 1
            self._begin_epoch()

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """Move the chunk to the queue of those used now. Uses within one epoch count as one."""
        self.update_on_hits((key,), mapping)

    def update_on_hits(
        self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]
    ) -> None:
        """The same for several chunks.

        Among a million chunks much time goes by waiting for memory, so what is known of all of them
        is looked up at once, where the processor waits for several. Chunks of one prompt have
        mostly been used together, so what is known after the use is mostly computed once.
        """
        stored = self._stored
        now = least_state(self._epoch)
        after_of: dict[int, int] = {}
        used: list[int] = []
        for key, state in zip(keys, list(map(stored.__getitem__, keys)), strict=True):
            if state >= now or stored[key] != state:  # used before in this epoch, or just now
                if not state & HAS_NEXT:
                    self._use_again(key, queue_of(stored[key]))
                continue
            used.append(state)
            after = after_of.get(state)
            if after is None:
                after = after_of[state] = self._after_use(state) | state & HAS_NEXT
            stored[key] = after
            if not state & HAS_NEXT:
                self._drop_end(key, queue_of(state))
                self._add_end(key, queue_of(after))
        for state, count in Counter(used).items():
            self._note_use(state, after_of[state], count)

    def _use_again(self, key: ChunkKey, queue: int) -> None:
        """Note one more use, in the same epoch, of a chunk without a successor."""
        if key in self._aside:
            self._aside.remove(key)
            self._add_end(key, queue)
        else:
            self._ends[queue].move_to_end(key)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Remember the chunk by name; its predecessor may be the next candidate."""
        state = self._stored.pop(key)
        if not state & HAS_NEXT:
            self._drop_end(key, queue_of(state))
        self._gone[key] = state
        turnover = max(len(self._stored), _MIN_CHUNKS)
        while len(self._gone) > min(HORIZON_TURNOVERS * turnover, max(_MAX_GONE, turnover)):
            self._forget_oldest()
        before = self._before.pop(key, None)
        if before is not None:
            self._drop_successor(before)

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The ends of chains that are worth least, each followed by its predecessors in their turn.

        Chunks whose successors cannot go come last.
        """
        chosen: list[ChunkKey] = []
        went: dict[ChunkKey, int] = {}  # successors chosen, by chunk
        opened: list[tuple[Rank, int, ChunkKey]] = []  # chunks that lost all successors, a heap
        ends = self._ends_in_order()
        end = next(ends, None)
        while len(chosen) < num_candidates and (opened or end is not None):
            if opened and (end is None or opened[0][0] <= end[0]):
                key = heapq.heappop(opened)[2]
            elif end is not None:
                key = end[1]
                end = next(ends, None)
            if not can_evict(mapping[key]):
                if passed is not None:
                    passed.append(key)
                continue
            chosen.append(key)
            before = self._before.get(key)
            state = None if before is None else self._stored.get(before)
            if before is None or state is None:
                continue
            went[before] = went.get(before, 0) + 1
            if went[before] == self._num_after[before]:
                heapq.heappush(opened, (self._rank(queue_of(state)), -len(chosen), before))
        if len(chosen) < num_candidates:
            chosen += self._held_back(mapping, set(chosen), can_evict)[
                : num_candidates - len(chosen)
            ]
        return chosen

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Take those that are ends out of their queues, until their use or the next epoch."""
        for key in keys:
            state = self._stored[key]
            if not state & HAS_NEXT and key not in self._aside:
                self._drop_end(key, queue_of(state))
                self._aside.add(key)

    def _ends_in_order(self) -> Iterator[tuple[Rank, ChunkKey]]:
        if self._ranked is None:
            self._index = self._model.indices(self._learned_chunks)
            self._ranked = sorted(self._rank(queue) for queue in self._ends)
        for rank in self._ranked:
            for key in self._ends[rank[1]]:
                yield rank, key

    def _held_back(
        self,
        mapping: MutableMapping[ChunkKey, V],
        chosen: set[ChunkKey],
        can_evict: Callable[[V], bool],
    ) -> list[ChunkKey]:
        """Chunks that could go but for a successor that cannot, worst first."""
        held = [key for key, value in mapping.items() if key not in chosen and can_evict(value)]
        return sorted(held, key=lambda key: self._rank(queue_of(self._stored[key])))

    def _rank(self, queue: int) -> Rank:
        age = self._epoch - epoch_of(queue)
        index = self._index[class_of(queue)][BUCKET_OF_AGE[age]] if age < NUM_AGES else -1.0
        return index, queue

    def _after_use(self, state: int) -> int:
        """What is known of a chunk once it is used now; without a successor."""
        uses, interval = history_after_use(state, self._age(state))
        chunk_class = class_of_used(uses, interval / _PARTS_PER_TURNOVER)
        return used_state(queue_number(self._epoch, chunk_class), uses, interval)

    def _note_use(self, state: int, after: int, count: int) -> None:
        """Learn that so many chunks of one state were used, and of what state they are after it."""
        was, is_now = class_of(queue_of(state)), class_of(queue_of(after))
        self._model.wait_again(was, self._age(state), is_now, count)

    def _age(self, state: int) -> int:
        """Epochs since the last use."""
        return self._epoch - epoch_of(queue_of(state))

    def _forget_oldest(self) -> None:
        state = self._gone.popitem(last=False)[1]
        self._model.forget(class_of(queue_of(state)), self._age(state))

    def _add_successor(self, key: ChunkKey) -> None:
        number = self._num_after.get(key, 0) + 1
        self._num_after[key] = number
        state = self._stored.get(key)
        if state is not None and not state & HAS_NEXT:
            self._drop_end(key, queue_of(state))
            self._stored[key] = state | HAS_NEXT

    def _drop_successor(self, key: ChunkKey) -> None:
        self._num_after[key] -= 1
        if self._num_after[key] == 0:
            del self._num_after[key]
            state = self._stored.get(key)
            if state is not None:
                self._stored[key] = state & ~HAS_NEXT
                self._add_end(key, queue_of(state), is_next=True)

    def _add_end(self, key: ChunkKey, number: int, *, is_next: bool = False) -> None:
        """Put the chunk into its queue, at the end, or at the start if it is to go next."""
        queue = self._ends.get(number)
        if queue is None:
            queue = self._ends[number] = OrderedDict()
            if self._ranked is not None:
                insort(self._ranked, self._rank(number))
        queue[key] = None
        if is_next:
            queue.move_to_end(key, last=False)

    def _drop_end(self, key: ChunkKey, number: int) -> None:
        if key in self._aside:
            self._aside.remove(key)
            return
        queue = self._ends[number]
        del queue[key]
        if not queue:
            del self._ends[number]
            if self._ranked is not None:
                del self._ranked[bisect_left(self._ranked, self._rank(number))]

    def _begin_epoch(self) -> None:
        """Learn from the epoch that ends. The queues are ranked anew when somebody asks."""
        self._model.end_epoch()
        self._epoch += 1
        self._ranked = None
        self._learned_chunks = max(len(self._stored), _MIN_CHUNKS)
        aside, self._aside = self._aside, set()
        for key in aside:
            self._add_end(key, queue_of(self._stored[key]))
