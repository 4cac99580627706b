"""What :class:`~kvkeep.policy.reuse.ReusePolicy` knows of one chunk, packed into a number.

A policy of a large pool knows a million chunks and the names of as many that went. The garbage
collector looks at every object, at each of its full collections, but not at numbers, nor at dicts
of names to numbers; so the engine never stands still for them. Pure functions.

    bits 0..2     uses, at most 7: nobody asks for more
    bits 3..26    typical interval between uses, in parts of an epoch; 0 before the second use
    bit  27       a successor of the chunk is stored, so the chunk stands in no queue
    bits 28..     the queue: class in the lowest 6 bits, epoch of the last use above them
"""

from __future__ import annotations

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
