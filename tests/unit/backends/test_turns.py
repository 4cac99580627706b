"""ConcurrencyLimit at a library that spins: so many at once, and nobody waits for good."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.backends.remote.calls import ConcurrencyLimit

WAIT_S = 20.0


class Inside:
    """How many are inside, and how many were at most."""

    def __init__(self) -> None:
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_at_once(most):
    turns, inside = ConcurrencyLimit(most, patience_s=WAIT_S), Inside()

    def call(number):
        with turns.turn(time.monotonic() + 2 * WAIT_S), inside:
            time.sleep(0)
        return number

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(call, range(400))) == list(range(400))
    assert inside.most <= most


@pytest.mark.parametrize(("patience_s", "left_s"), [(0.01, WAIT_S), (10 * WAIT_S, 0.01), (1, -1)])
def test_a_call_that_hangs_holds_nobody_up(patience_s, left_s):
    """Fault 34: others go on without a turn, and take none away by that."""
    turns, inside = ConcurrencyLimit(1, patience_s=patience_s), Inside()
    deadline = time.monotonic() + left_s
    with turns.turn(deadline), inside, turns.turn(deadline), inside, turns.turn(deadline), inside:
        pass
    assert inside.most == 3
    far = time.monotonic() + WAIT_S
    with pytest.raises(RuntimeError, match="fails"), turns.turn(far):
        raise RuntimeError("fails")
    taken = ConcurrencyLimit(1, patience_s=0.01)
    for one in (turns, taken):
        with one.turn(far):
            assert not one._free.acquire(blocking=False)
        assert one._free.acquire(blocking=False)
