"""Health checks with a deadline, and the thread that has them made."""

from __future__ import annotations

import threading
import time

from kvkeep.backends.reference import DictBackend
from kvkeep.storage.health import HealthMonitor, HealthTimer
from kvkeep.testing.chunks import make_keys, wait_until
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.storage import open_storage, store

L1, L2, L3 = "LocalCPUBackend", "L2", "L3"
HANGS = Fault("health", FaultKind.DELAY, 0, 1, delay_s=60.0)


def tiers(pool):
    return [
        FaultyBackend(DictBackend(pool, name=L2), [HANGS]),
        FaultyBackend(DictBackend(pool, name=L3), [Fault("health", FaultKind.DROP, 1, 1)]),
    ]


def checking_threads():
    return [each for each in threading.enumerate() if each.name == f"kvkeep-health-{L2}"]


def test_a_check_that_hangs_holds_up_nobody_and_costs_one_thread():
    """Fault 33: the tier is left out, the others are asked on, and it is taken back afterwards."""
    with open_storage(tiers) as manager:
        monitor = HealthMonitor(manager, timeout_s=0.5)
        answers = monitor.check_once()
        assert manager.bypassed == {L2}
        assert answers[L2].detail == "its health check did not end in 0.5 s"
        assert list(answers) == [L1, L2, L3]
        monitor.check_once()
        assert manager.bypassed == {L2, L3}
        monitor.check_once()
        assert manager.bypassed == {L2}
        assert len(checking_threads()) == 1
        assert manager.storage_backends[L2].calls["health"] == 1
        snapshot = manager.metrics.snapshot()
        assert snapshot['kvkeep_failures_total{tier="L2",operation="health",cause="timeout"}'] == 3
        assert [snapshot[f'kvkeep_backend_bypassed{{tier="{n}"}}'] for n in (L1, L2, L3)] == [
            0,
            1,
            0,
        ]
        assert set(store(manager, make_keys(1))) == {L1, L3}
        manager.storage_backends[L2]._closing.set()  # ends the call that hangs
        wait_until(lambda: not checking_threads())
        monitor.check_once()
        assert manager.bypassed == frozenset()
        assert manager.metrics.snapshot()[f'kvkeep_backend_bypassed{{tier="{L2}"}}'] == 0


def test_two_callers_share_a_check_that_is_under_way():
    with open_storage(tiers) as manager:
        monitor = HealthMonitor(manager, timeout_s=0.2)
        others = [threading.Thread(target=monitor.check_once) for _ in range(4)]
        for other in others:
            other.start()
        for other in others:
            other.join(20)
        assert manager.storage_backends[L2].calls["health"] == 1
        assert manager.bypassed >= {L2}


def test_the_timer_checks_at_once_and_again_until_it_is_closed():
    checked = threading.Semaphore(0)
    timer = HealthTimer(checked.release, interval_s=0.01, timeout_s=1.0, on_error=print)
    assert all(checked.acquire(timeout=20) for _ in range(3))
    timer.close()
    timer.close()
    assert not timer._thread.is_alive()


def test_a_check_that_raises_is_told_and_does_not_end_the_timer():
    """Fault 28: one exception never ends the thread."""
    told = []
    checked = threading.Semaphore(0)

    def check():
        checked.release()
        if len(told) < 2:
            raise ZeroDivisionError

    timer = HealthTimer(check, interval_s=0.01, timeout_s=1.0, on_error=told.append)
    assert all(checked.acquire(timeout=20) for _ in range(4))
    timer.close()
    assert [type(error) for error in told] == [ZeroDivisionError] * 2


def test_closing_does_not_wait_for_the_interval():
    timer = HealthTimer(lambda: None, interval_s=3600.0, timeout_s=1.0, on_error=print)
    started = time.monotonic()
    timer.close()
    assert not timer._thread.is_alive()
    assert time.monotonic() - started < 60
