"""EventManager, the I/O thread, and the threads of calls that may block."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from kvkeep.storage.leases import EventManager, EventStatus, EventType
from kvkeep.storage.prefetch import PrefetchBudget
from kvkeep.storage.runtime import CallThreads, IORuntime
from kvkeep.testing.chunks import wait_until

LOADING = EventType.LOADING
ONGOING, DONE, NOT_FOUND = EventStatus


def test_an_event_is_entered_updated_and_popped():
    """Spec 10.1."""
    events, future = EventManager(), Future()
    assert events.get_event_status(LOADING, "r") is NOT_FOUND
    assert events.add_event(LOADING, "r", future) is None
    assert events.get_event_status(LOADING, "r") is ONGOING
    assert events.get_event(LOADING, "r") is future
    assert events.update_event_status(LOADING, "r", DONE, future=future)
    assert events.get_event_status(LOADING, "r") is DONE
    assert (events.ids(LOADING), len(events)) == (["r"], 1)
    assert events.pop_event(LOADING, "r") is future
    assert events.pop_event(LOADING, "r") is None
    assert events.get_event(LOADING, "r") is None
    assert not events.update_event_status(LOADING, "r", DONE, future=future)
    assert len(events) == 0


def test_a_late_end_never_touches_its_successor():
    """Fault 21: a second event of one id; whoever means the first one changes nothing."""
    events, first, second = EventManager(), Future(), Future()
    events.add_event(LOADING, "r", first)
    assert events.add_event(LOADING, "r", second) is first
    assert not events.update_event_status(LOADING, "r", DONE, future=first)
    assert events.pop_event(LOADING, "r", future=first) is None
    assert events.get_event_status(LOADING, "r") is ONGOING
    assert events.pop_event(LOADING, "r", future=second) is second


def test_the_room_is_given_in_turn_and_whole():
    """Fault 26: whoever waits holds nothing, and nobody overtakes."""

    async def play() -> list[str]:
        room, order = PrefetchBudget(4), []

        async def take(name: str, count: int) -> None:
            assert await room.take(count) == min(count, 4)
            order.append(name)

        assert await room.take(3) == 3
        waiting = [asyncio.ensure_future(take("large", 9)), asyncio.ensure_future(take("b", 1))]
        given_up = asyncio.ensure_future(take("c", 1))
        await asyncio.sleep(0)
        assert order == []
        given_up.cancel()
        await asyncio.sleep(0)
        room.give_back(3)
        await asyncio.sleep(0)
        assert (order, room.used) == (["large"], 4)
        room.give_back(4)
        await asyncio.gather(*waiting)
        assert (order, room.used) == (["large", "b"], 1)
        late = asyncio.ensure_future(take("late", 4))
        await asyncio.sleep(0)
        room.give_back(1)
        late.cancel()  # its turn has just come
        await asyncio.gather(late, return_exceptions=True)
        assert room.used == 0
        return order

    assert asyncio.run(play()) == ["large", "b"]
    with pytest.raises(ValueError, match="room"):
        PrefetchBudget(0)


def test_the_io_thread_runs_tasks_and_ends_them():
    errors: list[BaseException] = []
    runtime = IORuntime(max_tasks=2, on_error=errors.append)
    runtime.refuse_inside("nothing")
    assert not runtime.call_soon(lambda: None), "there is no thread yet"
    ended = threading.Semaphore(0)

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    async def fails() -> None:
        raise ZeroDivisionError

    assert runtime.start(fails)
    wait_until(lambda: runtime.num_tasks == 0)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert runtime.start(for_ever)
    assert runtime.start(for_ever)
    assert not runtime.start(for_ever), "no more than two"
    runtime.close(10)
    runtime.close(10)
    assert ended.acquire(timeout=0)
    assert ended.acquire(timeout=0)
    assert runtime.num_tasks == 0
    assert not runtime.start(for_ever)
    assert not runtime.call_soon(lambda: None)


def test_a_task_that_was_never_begun_still_gets_to_answer():
    runtime = IORuntime(max_tasks=8, on_error=lambda error: None)
    answered: list[int] = []
    begin = threading.Event()

    async def answer(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            answered.append(number)

    async def first() -> None:
        assert begin.wait(20)  # the loop is held up, so that the others cannot begin

    runtime.start(first)
    for number in range(5):
        runtime.start(lambda number=number: answer(number))
    threading.Timer(0.05, begin.set).start()
    runtime.close(10)
    assert sorted(answered) == [0, 1, 2, 3, 4]


def test_an_idle_io_thread_is_closed():
    runtime = IORuntime(max_tasks=1, on_error=lambda error: None)
    done = threading.Event()

    async def quick() -> None:
        done.set()

    runtime.start(quick)
    assert done.wait(10)
    runtime.close(10)


def test_calls_that_block_hold_up_only_their_own_threads():
    gate, ran = threading.Event(), threading.Semaphore(0)
    calls = CallThreads("slow", limit=2, stall_timeout_s=0.05)

    def block() -> None:
        assert gate.wait(20)
        ran.release()

    futures = [calls.submit(block) for _ in range(3)]
    wait_until(lambda: len(calls._running) == 2)
    threading.Event().wait(0.1)
    assert calls.submit(block).cancelled(), "every thread hangs"
    gate.set()
    for future in futures:
        assert future.result(20) is None
    assert calls.submit(ran.release).result(20) is None
    calls.close(10)
    calls.close(10)
    assert calls.submit(block).cancelled()


def test_calls_that_have_not_begun_are_cancelled_by_the_close():
    gate = threading.Event()
    calls = CallThreads("slow", limit=1, stall_timeout_s=60)
    running = calls.submit(lambda: gate.wait(20) and None)
    wait_until(lambda: bool(calls._running))
    waiting = calls.submit(lambda: None)
    threading.Timer(0.05, gate.set).start()
    calls.close(10)
    assert waiting.cancelled()
    assert running.done()
