"""PrefetchBudget: giving up and getting a turn at the same moment."""

from __future__ import annotations

import asyncio

import pytest

from kvkeep.storage.prefetch import PrefetchBudget


def test_room_is_given_back_while_one_that_waits_is_being_given_up():
    async def run() -> int:
        room = PrefetchBudget(2)
        await room.take(2)
        given_up = asyncio.create_task(room.take(1))
        next_one = asyncio.create_task(room.take(2))
        await asyncio.sleep(0)
        given_up.cancel()  # it has not run since
        room.give_back(2)
        assert await next_one == 2
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return room.used

    assert asyncio.run(run()) == 2


def test_one_whose_turn_has_come_is_given_up():
    async def run() -> int:
        room = PrefetchBudget(2)
        await room.take(2)
        given_up = asyncio.create_task(room.take(1))
        await asyncio.sleep(0)
        room.give_back(2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return room.used

    assert asyncio.run(run()) == 0
