"""Classes of chunks that may be expected to be used again at different rates.

Pure arithmetic, used by :class:`~kvkeep.policy.reuse.ReusePolicy`. A chunk that was used once is
told by the prompt that brought it: how much was new in it, how popular the chunk is that it hangs
on, and whether it is the prompt's end. A chunk that was used again is told by its uses and by the
typical interval between them. The classes say nothing about which of them is worth more: that is
learned.

    new:   uses of the chunk before (none | few | many) x new chunks in the prompt x end or not
    used:  uses (2 | 3, 4 | more) x interval between uses, in turnovers of the pool
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

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
