"""HealthMonitor and HealthTimer: bypass tiers whose health check fails, until they recover.

The monitor asks, with a deadline, and is callable from any thread. A tier that does not answer in
time counts as unhealthy and is not asked again before it has answered, so a check that hangs holds
up neither an engine nor the checks of other tiers, and costs one thread. The timer is a thread that
has the monitor ask every few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from kvkeep.backends.base import BackendHealth
from kvkeep.storage.manager import StorageManager

_log = logging.getLogger(__name__)

#: How long :meth:`HealthTimer.close` waits for a check that is under way, beyond its deadline.
_CLOSE_MARGIN_S = 5.0


class HealthMonitor:
    """Sets and clears the bypass of every tier by its health."""

    def __init__(self, manager: StorageManager, *, timeout_s: float = 2.0) -> None:
        """Watch the tiers of ``manager``.

        Args:
            manager: whose tiers.
            timeout_s: a tier that has not answered by then is unhealthy.
        """
        self.timeout_s = timeout_s
        self._manager = manager
        self._lock = threading.Lock()
        self._asked: dict[str, Future[BackendHealth]] = {}  # guarded by _lock

    def check_once(self) -> dict[str, BackendHealth]:
        """Ask every tier, bypass those that are unhealthy or raise, take the others back in.

        The tier whose memory all use answers from its own counters and is asked directly, the
        others in threads of their own.

        Returns:
            The answers by tier.
        """
        deadline = time.monotonic() + self.timeout_s
        own = self._manager.allocator_backend.name
        others = [name for name in self._manager.storage_backends if name != own]
        asked = {name: self._ask(name) for name in others}
        answers = {}
        if own in self._manager.storage_backends:
            answers[own] = self._manager.backend_health(own)
        answers |= {name: self._answer(name, future, deadline) for name, future in asked.items()}
        with self._lock:
            for name in self._manager.storage_backends:
                self._apply(name, answers[name])
        return {name: answers[name] for name in self._manager.storage_backends}

    def _ask(self, name: str) -> Future[BackendHealth]:
        """The answer to come, of a check that is under way or of a new one."""
        with self._lock:
            future = self._asked.get(name)
            if future is not None and not future.done():
                return future
            future = self._asked[name] = Future()

        def answer(future: Future[BackendHealth]) -> None:
            future.set_result(self._manager.backend_health(name))

        thread = threading.Thread(
            target=answer, args=(future,), name=f"kvkeep-health-{name}", daemon=True
        )
        thread.start()
        return future

    def _answer(self, name: str, future: Future[BackendHealth], deadline: float) -> BackendHealth:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self._manager.metrics.failure(name, "health", "timeout")
            return BackendHealth(False, f"its health check did not end in {self.timeout_s:g} s")

    def _apply(self, name: str, health: BackendHealth) -> None:
        """Bypass a tier, or take it back in, if that is a change."""
        if health.healthy == (name not in self._manager.bypassed):
            return
        self._manager.set_bypassed(name, not health.healthy)
        if health.healthy:
            _log.info("%s has recovered and takes part again", name)
        else:
            _log.warning("%s is unhealthy and left out: %s", name, health.detail)


class HealthTimer:
    """A thread that checks at once and then every ``interval_s`` seconds, until it is closed."""

    def __init__(
        self,
        check: Callable[[], object],
        *,
        interval_s: float,
        timeout_s: float,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Start at once.

        Args:
            check: what to do; must end within ``timeout_s``.
            interval_s: seconds between the end of one check and the next.
            timeout_s: how long one check may take.
            on_error: told when a check raised; the next one comes all the same.
        """
        self._check = check
        self._interval_s = interval_s
        self._close_s = timeout_s + _CLOSE_MARGIN_S
        self._on_error = on_error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._closing.set()
        self._thread.join(self._close_s)

    def _run(self) -> None:
        while True:
            try:
                self._check()
            except Exception as error:  # noqa: BLE001  top of a thread
                _log.warning("a health check failed: %s", error)
                self._on_error(error)
            if self._closing.wait(self._interval_s):
                return
