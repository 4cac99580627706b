"""AllocatorReport: what was chosen for a pool, and why. Immutable values, for any thread.

A choice that the machine could not grant is no error: the pool works without it, and the report
says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was decided about a pool.

    Attributes:
        topic: what about: ``"size"``, ``"huge pages"``, ...
        chosen: what it is now, a few words.
        why: the reason, one clause.
    """

    topic: str
    chosen: str
    why: str


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """A pool as it was built.

    Attributes:
        allocator: name of the allocator's class.
        size_bytes: bytes of its arena.
        choices: in the order in which they were made.
    """

    allocator: str
    size_bytes: int
    choices: tuple[Choice, ...]

    def choice(self, topic: str) -> Choice:
        """The choice about ``topic``.

        Raises:
            KeyError: nothing was decided about it.
        """
        for choice in self.choices:
            if choice.topic == topic:
                return choice
        raise KeyError(topic)

    def lines(self) -> list[str]:
        """For people: one line per choice."""
        head = f"{self.allocator} over {self.size_bytes} bytes"
        return [head, *(f"{c.topic}: {c.chosen} ({c.why})" for c in self.choices)]
