"""ReusePolicy: the chunk whose next use is least worth waiting for goes first, suffixes foremost.

The default. It learns, while it runs, how long chunks of different kinds wait for their next use
(:mod:`kvkeep.policy.reuse`, :mod:`kvkeep.policy.reuse`), and remembers for some
turnovers of the pool the names of chunks that went, so that it learns also from those it should
have kept. Nothing is tuned to a workload: with reuse that is recent it acts like LRU, with few
chunks that are popular for long like a probation queue, with loops it keeps a fixed part.

A chunk with a successor in the pool is no candidate, since the successor would be worthless without
it. Chains are known from :meth:`note_chain`; without it every chunk stands alone.

Every update is O(1) but for a constant share of what each epoch costs; a candidate is O(log n).

Classes of chunks that may be expected to be used again at different rates.

Pure arithmetic, used by :class:`~kvkeep.policy.reuse.ReusePolicy`. A chunk that was used once is
told by the prompt that brought it: how much was new in it, how popular the chunk is that it hangs
on, and whether it is the prompt's end. A chunk that was used again is told by its uses and by the
typical interval between them. The classes say nothing about which of them is worth more: that is
learned.

    new:   uses of the chunk before (none | few | many) x new chunks in the prompt x end or not
    used:  uses (2 | 3, 4 | more) x interval between uses, in turnovers of the pool

ReuseModel: what was learned about when chunks of each class are used again.

Owned by one :class:`~kvkeep.policy.reuse.ReusePolicy` and called under its backend's lock. Time is
counted in epochs, of which a turnover of the pool (as many puts as it has chunks) has
:data:`EPOCHS_PER_TURNOVER`.

For each class and age since the last use the model counts uses and exposure (chunks x epochs at
that age, whether they are still stored or only remembered). Their quotient is the hazard: the rate
at which a chunk of that class and age is used again. It is an estimate for censored lifetimes, so
what is still waiting for its next use counts as well as what was used.

The worth of keeping a chunk is its Gittins index, the best rate of return of any plan "keep it for
so long, then give up":

    index(class, age) = max over T of   P(used again within T) / E(epochs kept within T)

With a falling hazard this is the hazard itself and the order is like that of LRU. Where most chunks
come back late, or few of a class ever do, it is not: then it holds on to those that waited long
already, or to those of better classes, and lets new ones go. (J. C. Gittins, "Bandit processes and
dynamic allocation indices", 1979; the use of age and class is that of Beckmann, Chen and Cidon,
"LHD: Improving cache hit rate by maximizing hit density", NSDI 2018.)

What :class:`~kvkeep.policy.reuse.ReusePolicy` knows of one chunk, packed into a number.

A policy of a large pool knows a million chunks and the names of as many that went. The garbage
collector looks at every object, at each of its full collections, but not at numbers, nor at dicts
of names to numbers; so the engine never stands still for them. Pure functions.

    bits 0..2     uses, at most 7: nobody asks for more
    bits 3..26    typical interval between uses, in parts of an epoch; 0 before the second use
    bit  27       a successor of the chunk is stored, so the chunk stands in no queue
    bits 28..     the queue: class in the lowest 6 bits, epoch of the last use above them
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvkeep.hashing import ChunkKey
from kvkeep.policy.base import CachePolicy, V

#: Upper bounds of the uses of the chunk before: no such chunk, up to 4, more.
_BEFORE = (0, 4)
#: Lower bounds of the number of new chunks.
_LENGTHS = (4, 16, 32, 64)
#: Upper bounds of the uses of a chunk that was used again.
_USES = (2, 4)
_MOST_USES = _USES[-1] + 1
#: Lower bounds of the interval between two uses, in turnovers.
_INTERVALS = (0.05, 0.2, 0.8)

_NUM_NEW = (len(_BEFORE) + 1) * (len(_LENGTHS) + 1)
_NUM_INTERVALS = len(_INTERVALS) + 1

NUM_CLASSES = 2 * _NUM_NEW + (len(_USES) + 1) * _NUM_INTERVALS

#: First class of the chunks with so many uses; the last one stands for more, too.
_FIRST_OF_USES = tuple(
    2 * _NUM_NEW + bisect_left(_USES, uses) * _NUM_INTERVALS for uses in range(_MOST_USES + 1)
)

#: Group of each class: classes of one group are alike, and learn from each other.
GROUPS: tuple[int, ...] = (
    *(number // (len(_LENGTHS) + 1) for number in range(_NUM_NEW)),
    *(len(_BEFORE) + 1 for _ in range(_NUM_NEW)),
    *(len(_BEFORE) + 2 + number // _NUM_INTERVALS for number in range(NUM_CLASSES - 2 * _NUM_NEW)),
)

#: How much more often than a new one a chunk of each group comes back, before anything is known.
GROUP_ODDS: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 3.0)

#: Class of a chunk about whose prompt nothing was said.
UNKNOWN = 0


def class_of_new(uses_before: int, num_new: int, *, is_end: bool) -> int:
    """Class of a chunk that comes for the first time.

    Args:
        uses_before: uses of the last present chunk of the prompt, 0 if there is none.
        num_new: missing chunks of the prompt.
        is_end: it is the last chunk of the prompt.
    """
    number = bisect_left(_BEFORE, uses_before) * (len(_LENGTHS) + 1)
    number += bisect_right(_LENGTHS, num_new)
    return number + _NUM_NEW if is_end else number


def class_of_used(uses: int, interval: float) -> int:
    """Class of a chunk that was used again.

    Args:
        uses: how often, at least 2.
        interval: between two uses, in turnovers of the pool.
    """
    return _FIRST_OF_USES[min(uses, _MOST_USES)] + bisect_right(_INTERVALS, interval)


EPOCHS_PER_TURNOVER = 16
#: Turnovers after which a chunk that was not used counts as given up.
HORIZON_TURNOVERS = 8
NUM_AGES = EPOCHS_PER_TURNOVER * HORIZON_TURNOVERS
#: Turnovers after which what was learned weighs half as much, about.
_MEMORY_TURNOVERS = 64
#: Weight of what is believed before anything is known, as a share of a turnover of chunks.
_PRIOR_WEIGHT = 0.2
#: Hazard of a new chunk at age t epochs before anything is known: this divided by (t + 4).
_PRIOR_HAZARD = 0.3

_EDGES = tuple(
    edge for edge in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if edge < NUM_AGES
)
NUM_BUCKETS = len(_EDGES)
#: Bucket of each age in epochs.
BUCKET_OF_AGE: tuple[int, ...] = tuple(bisect_right(_EDGES, age) - 1 for age in range(NUM_AGES))

_AGES = np.arange(NUM_AGES)

Matrix = NDArray[np.float64]


class ReuseModel:
    """Hazards and indices of all classes."""

    def __init__(self, groups: Sequence[int], group_odds: Sequence[float]) -> None:
        """Know nothing yet.

        Args:
            groups: group of each class.
            group_odds: of each group, how much more often its chunks come back than new ones.
        """
        num_classes = len(groups)
        self._groups = np.asarray(groups)
        self._odds = np.asarray(group_odds, dtype=np.float64)
        self._uses = np.zeros((num_classes, NUM_BUCKETS))
        self._exposure = np.zeros((num_classes, NUM_BUCKETS))
        # Counts are kept in flat arrays, which a single update is quick in, and seen as matrices.
        # Uses in the current epoch, by class and bucket of the age.
        self._new_uses = array("q", bytes(8 * num_classes * NUM_BUCKETS))
        self._new_uses_seen = _seen(self._new_uses, NUM_BUCKETS)
        # Chunks that wait for their next use, by epoch (modulo NUM_AGES) of the last one and class.
        self._waiting = array("q", bytes(8 * NUM_AGES * num_classes))
        self._waiting_seen = _seen(self._waiting, num_classes)
        self._num_classes = num_classes
        self._epoch = 0
        edges = np.array((*_EDGES, NUM_AGES), dtype=np.float64)
        self._widths: Matrix = np.diff(edges)
        middles = (edges[:-1] + edges[1:]) / 2
        self._shape: Matrix = _PRIOR_HAZARD / (middles + EPOCHS_PER_TURNOVER / 4)

    def start_waiting(self, chunk_class: int) -> None:
        """A chunk was used, or came, in this epoch."""
        self._waiting[self._epoch % NUM_AGES * self._num_classes + chunk_class] += 1

    def forget(self, chunk_class: int, age: int) -> None:
        """A chunk does not wait any more: it was forgotten.

        Args:
            chunk_class: the class with which it started to wait.
            age: epochs since then.
        """
        if age < NUM_AGES:
            self._waiting[(self._epoch - age) % NUM_AGES * self._num_classes + chunk_class] -= 1

    def wait_again(self, chunk_class: int, age: int, next_class: int, count: int) -> None:
        """Chunks of a class were used at this age, and wait anew as ones of ``next_class``."""
        waiting, width = self._waiting, self._num_classes
        if age < NUM_AGES:
            waiting[(self._epoch - age) % NUM_AGES * width + chunk_class] -= count
            self._new_uses[chunk_class * NUM_BUCKETS + BUCKET_OF_AGE[age]] += count
        waiting[self._epoch % NUM_AGES * width + next_class] += count

    def end_epoch(self) -> None:
        """Everything that waits becomes an epoch older. The first epoch of a wait never counts."""
        self._uses += self._new_uses_seen
        self._exposure[:, 1:] += self.waiting_by_bucket()[1:].T
        keep = 1 - 1 / (_MEMORY_TURNOVERS * EPOCHS_PER_TURNOVER)
        self._uses *= keep
        self._exposure *= keep
        self._new_uses_seen[:] = 0
        self._epoch += 1
        self._waiting_seen[self._epoch % NUM_AGES] = 0

    def waiting_by_bucket(self) -> NDArray[np.int64]:
        """Chunks that wait for their next use, by bucket of their age and class."""
        by_age = self._waiting_seen[(self._epoch - _AGES) % NUM_AGES]
        counts: NDArray[np.int64] = np.add.reduceat(by_age, _EDGES, axis=0)
        return counts

    def hazards(self, num_chunks: int) -> Matrix:
        """The estimated hazards, by class and bucket of age.

        Each class leans on its group, each group on all chunks, and these on a falling hazard, as
        far as there is little evidence: first in its level, then bucket by bucket.

        Args:
            num_chunks: chunks in the pool, the measure for how much evidence is much.
        """
        weight = _PRIOR_WEIGHT * num_chunks
        num_groups = len(self._odds)
        group_uses = np.zeros((num_groups, NUM_BUCKETS))
        group_exposure = np.zeros((num_groups, NUM_BUCKETS))
        np.add.at(group_uses, self._groups, self._uses)
        np.add.at(group_exposure, self._groups, self._exposure)
        overall = (self._uses.sum(0) + self._shape * 2.5 * weight) / (
            self._exposure.sum(0) + 2.5 * weight
        )
        like_overall = np.broadcast_to(overall, group_uses.shape)
        by_group = _lean(group_uses, group_exposure, like_overall, self._odds, weight)
        like_group = by_group[self._groups]
        return _lean(self._uses, self._exposure, like_group, np.ones(len(self._groups)), weight)

    def indices(self, num_chunks: int) -> list[list[float]]:
        """The Gittins index by class and bucket of age; see :meth:`hazards`."""
        # [bucket, class] from here on, so that what is done bucket by bucket is contiguous
        hazards = np.ascontiguousarray(np.maximum(self.hazards(num_chunks), 1e-12).T)
        passed = hazards * self._widths[:, None]
        survival = np.exp(-passed)
        used = -np.expm1(-passed)
        step = np.stack((used, used / hazards), axis=1)  # chance of a use, epochs kept; per bucket
        # the same of each plan "from this bucket to the end of that one", from the last start on
        plans = np.zeros_like(step)
        index = np.empty_like(hazards)
        for start in reversed(range(NUM_BUCKETS)):
            plans[start + 1 :] *= survival[start]
            plans[start:] += step[start]
            np.max(plans[start:, 0] / plans[start:, 1], axis=0, out=index[start])
        table: list[list[float]] = index.T.tolist()
        return table


def _seen(counts: array[int], width: int) -> NDArray[np.int64]:
    """The same memory as a matrix with rows of ``width``."""
    return np.frombuffer(counts, np.int64).reshape(-1, width)


def _lean(uses: Matrix, exposure: Matrix, like: Matrix, odds: Matrix, weight: float) -> Matrix:
    """Hazards that are ``like``, times a level for each row, where there is little evidence."""
    level_weight = weight * like.sum(axis=1)
    expected = (exposure * like).sum(axis=1)
    level = (uses.sum(axis=1) + odds * level_weight) / (expected + level_weight)
    believed = like * level[:, None]
    result: Matrix = (uses + believed * weight) / (exposure + weight)
    return result


_USES_BITS, _INTERVAL_BITS, _CLASS_BITS = 3, 24, 6
_MAX_USES = (1 << _USES_BITS) - 1
_MAX_INTERVAL = (1 << _INTERVAL_BITS) - 1
_MAX_CLASS = (1 << _CLASS_BITS) - 1
_QUEUE_SHIFT = _USES_BITS + _INTERVAL_BITS + 1
#: Set where a successor of the chunk is stored.
HAS_NEXT = 1 << _USES_BITS + _INTERVAL_BITS
#: Parts of an epoch in which intervals are counted.
PARTS = 1 << 12


def queue_number(epoch: int, chunk_class: int) -> int:
    """The queue of the chunks of a class that were last used in an epoch; older ones are less."""
    return epoch << _CLASS_BITS | chunk_class


def epoch_of(queue: int) -> int:
    """Epoch of the last use of a queue's chunks."""
    return queue >> _CLASS_BITS


def class_of(queue: int) -> int:
    """Class of a queue's chunks."""
    return queue & _MAX_CLASS


def least_state(epoch: int) -> int:
    """States of chunks that were last used in this epoch, or later, are not less; others are."""
    return epoch << _CLASS_BITS + _QUEUE_SHIFT


def new_state(queue: int) -> int:
    """A chunk that was used once."""
    return queue << _QUEUE_SHIFT | 1


def queue_of(state: int) -> int:
    """The queue in which the chunk stands, if it stands in one."""
    return state >> _QUEUE_SHIFT


def uses_of(state: int) -> int:
    """How often it was used; 7 stands for more, too."""
    return state & _MAX_USES


def history_after_use(state: int, age: int) -> tuple[int, int]:
    """Uses and typical interval, smoothed, once the chunk is used again.

    Args:
        state: before.
        age: epochs since its last use.

    Returns:
        Uses, at most 7, and the interval in :data:`PARTS` of an epoch.
    """
    uses = state & _MAX_USES
    age *= PARTS
    interval = age if uses == 1 else (state >> _USES_BITS & _MAX_INTERVAL) + age >> 1
    return uses + (uses < _MAX_USES), interval if interval < _MAX_INTERVAL else _MAX_INTERVAL


def used_state(queue: int, uses: int, interval: int) -> int:
    """A chunk with this history in a queue, without a successor."""
    return queue << _QUEUE_SHIFT | interval << _USES_BITS | uses


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
