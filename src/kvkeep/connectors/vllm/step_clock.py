"""StepClock: how long the engine computes prompts, step by step. Engine's thread only."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvkeep.connectors.vllm.metadata import StepMeta


class StepClock:
    """Measures from the end of a step's loads to the end of its forward pass."""

    def __init__(self, note: Callable[[int, float], None], *, runs_ahead: bool) -> None:
        """No step has begun.

        Args:
            note: called with the tokens of prompts that a step computed, and its seconds.
            runs_ahead: the device computes behind the thread, so only what is copied out of it
                waits for the forward pass; steps without saves are then not measured.
        """
        self._note = note
        self._runs_ahead = runs_ahead
        self._started: float | None = None

    def loads_ended(self) -> None:
        """The forward pass begins."""
        self._started = time.perf_counter()

    def pass_ended(self, meta: StepMeta) -> None:
        """The engine's thread is through with the forward pass."""
        if not self._runs_ahead:
            self._take(meta)

    def saves_ended(self, meta: StepMeta) -> None:
        """What the step has completed was copied out."""
        if self._runs_ahead and meta.saves:
            self._take(meta)

    def _take(self, meta: StepMeta) -> None:
        if self._started is not None and meta.prefill_tokens:
            self._note(meta.prefill_tokens, time.perf_counter() - self._started)
        self._started = None
