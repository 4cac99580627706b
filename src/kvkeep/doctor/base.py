"""Findings and probes: what the doctor knows about one thing, and what finds it out.

Immutable values, for any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvkeep.config import Settings
from kvkeep.doctor.model_config import ModelShape
from kvkeep.memory.placement import WorkerPlace

#: (probes that are done, probes in all, what is being looked at).
Report = Callable[[int, int, str], None]


class Level(IntEnum):
    """How a thing is, the worst last."""

    FINE = 0
    """As it should be, or a fact."""
    NOTE = 1
    """Works; a change may be worth it."""
    WARNING = 2
    """Works worse than the settings want, or might stop working."""
    ERROR = 3
    """Does not work with these settings."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change.

    Attributes:
        text: one sentence.
        line: the setting or command to write, ready to be copied; empty if there is none.
    """

    text: str
    line: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    Attributes:
        topic: what about, two or three words.
        text: what it is, one line or two.
        level: whether that is good.
        advice: what to change; None if nothing.
        values: the numbers in ``text``, for scripts; names end in their unit.
    """

    topic: str
    text: str
    level: Level = Level.FINE
    advice: Advice | None = None
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Patient:
    """What is examined, besides the machine.

    Attributes:
        settings: all settings.
        env: environment variables.
        model: what one rank keeps of the model; None if no model was given.
        num_ranks: workers of the engine on this machine (tensor parallelism).
    """

    settings: Settings
    env: Mapping[str, str]
    model: ModelShape | None
    num_ranks: int = 1

    @property
    def place(self) -> WorkerPlace:
        """The worker that is examined: the first of its ranks."""
        return WorkerPlace(
            num_ranks=self.num_ranks,
            num_local=self.num_ranks,
            has_same_kv=self.model is not None and not self.model.has_values,
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """A few findings that are made together.

    Attributes:
        section: heading that its findings stand under.
        topic: what it looks at, for the progress bar and where it fails.
        run: finds out; called in a thread of its own. Stops early where it is slow.
        deadline_s: who has not answered by then is not waited for.
    """

    section: str
    topic: str
    run: Callable[[Patient], Sequence[Finding]]
    deadline_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Section:
    """Findings under one heading."""

    name: str
    findings: tuple[Finding, ...]
