"""ReuseModel: what was learned about when chunks of each class are used again.

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
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
