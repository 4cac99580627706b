"""RemoteCondition: whether the store can be used now. Callable from any thread.

Stores can be out alone: the store refuses them, or has no room.
"""

from __future__ import annotations

import time

from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.condition import TierCondition
from kvkeep.backends.io.pool import IOPool
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.errors import BackendError


class RemoteCondition(TierCondition):
    """Asks the store whether it answers.

    Attributes:
        refusals: open while a store that works takes nothing.
    """

    def __init__(
        self, calls: StoreCalls, pool: IOPool, *, probe_timeout_s: float, stall_timeout_s: float
    ) -> None:
        """Take it that the store works.

        Args:
            calls: to the store.
            pool: where probes run.
            probe_timeout_s: what a probe may take.
            stall_timeout_s: a call that runs for longer does not keep its deadline.
        """
        super().__init__(pool, breakers=(Breaker(), Breaker()), stall_timeout_s=stall_timeout_s)
        self._calls = calls
        self.refusals = Breaker()
        self._probe_timeout_s = probe_timeout_s

    def why_no_stores(self) -> str | None:
        """As without refusals; and ``store_refuses``, but for one try per pause."""
        problem = super().why_no_stores()
        if problem is None and not self.refusals.allows():
            problem = "store_refuses"
        return problem

    def _try_first(self) -> None:
        """A store that does not answer at the start is left alone at once."""
        if not self._answers():
            self.loads.trip()

    def _try_again(self) -> None:
        self._answers()

    def _answers(self) -> bool:
        """Ask whether the store answers; the breaker is told by the call."""
        try:
            self._calls.ping(time.monotonic() + self._probe_timeout_s, self.loads)
        except BackendError:
            return False  # it was counted
        return True
