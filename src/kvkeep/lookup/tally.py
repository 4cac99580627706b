"""Tally: what lookups came to, as the scheduler knows it, on its way to the workers' metrics.

A worker knows what it found, not whether its answer came in time nor what the other ranks had. So
the client counts, and the workers hear of it. Used with the client's lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvkeep.lookup.messages import Counted


class Tally:
    """Sums since they were last sent."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._asked = 0
        self._found: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def answered(self, asked: int, found: Sequence[tuple[str, int]]) -> None:
        """A lookup for ``asked`` tokens was answered: (tier, tokens) of what was found."""
        self._asked += asked
        for tier, num_tokens in found:
            self._found[tier] += num_tokens

    def failed(self, asked: int, cause: str) -> None:
        """A lookup for ``asked`` tokens was given up."""
        self._failed[cause] += asked

    def take(self, seq: int) -> Counted | None:
        """The sums as a message, after which they are zero; None if there are none."""
        if not self._asked and not self._failed:
            return None
        message = Counted(seq, self._asked, tuple(self._found.items()), tuple(self._failed.items()))
        self._asked = 0
        self._found.clear()
        self._failed.clear()
        return message
