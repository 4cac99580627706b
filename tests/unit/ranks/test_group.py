"""A group whose ranks are threads of one process: who is let in, and what a round comes to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvkeep.config.settings import RanksSettings
from kvkeep.engine.build import is_first_rank_only
from kvkeep.errors import ConfigError, RankError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.arena import Arena
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.factory import initialize_allocator, tensor_pool
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import Done, Join, RankOptions, Verdict, Welcome, encode
from kvkeep.ranks.first import FirstRank, verdict_directory
from kvkeep.ranks.follower import FollowerRank
from kvkeep.testing.chunks import wait_until

PAGES, SIZE = MemoryFormat.OPAQUE_PAGES, 4096
IDENTITY, TAG = bytes(32), bytes(range(32))


def options(folder: Path, rank: int, *, num_ranks: int = 2, shares: bool = True, **more):
    values = {"timeout_s": 5.0, "identity": IDENTITY} | more
    return RankOptions(folder / "ranks.sock", rank, num_ranks, shares, **values)


class Group:
    """Ranks 0 and 1, and three chunks of rank 0's."""

    def __init__(self, folder: Path, *, shares: bool, **more) -> None:
        self.allocator = initialize_allocator(1 << 20, chunk_bytes=SIZE, shareable=True)
        self.metrics = Metrics()
        arena = tensor_pool(self.allocator).arena if shares else None
        self.first = FirstRank(
            options(folder, 0, shares=shares, **more), metrics=self.metrics, arena=arena
        )
        self.other = FollowerRank(options(folder, 1, shares=shares, **more), metrics=self.metrics)
        self.objs: list[MemoryObj] = self.allocator.batched_allocate((SIZE,), torch.uint8, 3, PAGES)
        for number, obj in enumerate(self.objs):
            obj.array[:] = number + 1

    def together(self, first, other):
        """Run one function per rank at once; their answers."""
        answers: dict[str, object] = {}
        thread = threading.Thread(target=lambda: answers.update(other=other()))
        thread.start()
        answers["first"] = first()
        thread.join(20)
        assert not thread.is_alive()
        return answers["first"], answers["other"]


@contextmanager
def group_of(folder: Path, *, shares: bool = True, **more) -> Iterator[Group]:
    folder.chmod(0o700)
    group = Group(folder, shares=shares, **more)
    try:
        wait_until(lambda: group.first.is_whole() and group.other.is_whole())
        yield group
    finally:
        group.other.close()
        group.first.close()
        group.first.close()
        for obj in group.objs:
            obj.ref_count_down()
        group.allocator.close()
    assert list(folder.iterdir()) == []


def load_first(group: Group, written: int, tag: bytes = TAG, count: int = 3):
    def run():
        opened = group.first.open_round(tag, group.objs[:count])
        return None if opened is None else opened.conclude(written)

    return run


def load_other(group: Group, written: int, tag: bytes = TAG):
    def run():
        opened = group.other.open_round(tag)
        if opened is None:
            return None
        objs = [opened.borrow(n, (SIZE,), torch.uint8, PAGES) for n in range(opened.num_offered)]
        assert [int(obj.array[-1]) for obj in objs] == [1, 2, 3][: len(objs)]
        assert opened.borrow(9, (SIZE,), torch.uint8, PAGES) is None
        outcome = opened.conclude(written)
        for obj in objs:
            obj.ref_count_down()
        return outcome

    return run


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("first", "other", "outcome"), [(3, 3, 3), (3, 1, 1), (1, 3, 1), (0, 3, 0), (3, 0, 0)]
)
def test_the_minimum_counts_on_both(tmp_path, shares, first, other, outcome) -> None:
    with group_of(tmp_path, shares=shares) as group:
        for _ in range(2):
            done = group.together(load_first(group, first), load_other(group, other))
            assert done in ((outcome, outcome), (outcome, None))


def test_with_nothing_to_offer_there_is_no_round(tmp_path) -> None:
    with group_of(tmp_path) as group:
        assert group.together(load_first(group, 0, count=0), load_other(group, 0)) == (None, None)
        assert group.together(load_first(group, 3), load_other(group, 3)) == (3, 3)


@pytest.mark.parametrize("shares", [True, False])
def test_whoever_aborts_makes_it_a_miss_for_both(tmp_path, shares) -> None:
    with group_of(tmp_path, shares=shares) as group:

        def abort(rank, *offered):
            opened = rank.open_round(TAG, *offered)
            opened.abort()
            opened.abort()
            return opened.conclude(3)

        first = group.together(lambda: abort(group.first, group.objs), load_other(group, 3))
        assert first in ((0, 0), (0, None))
        wait_until(lambda: group.first.is_whole() and group.other.is_whole())
        done = group.together(load_first(group, 3), lambda: abort(group.other))
        assert done in ((0, 0), (None, 0))
        wait_until(lambda: group.first.is_whole() and group.other.is_whole())
        assert group.together(load_first(group, 3), load_other(group, 3)) == (3, 3)


def test_loads_that_the_other_rank_begins_in_another_order_are_told_apart(tmp_path) -> None:
    """Rank 0's plan for a load comes before it is asked for."""
    with group_of(tmp_path, timeout_s=1.0) as group:
        other_tag = bytes(32)
        assert group.first.open_round(TAG, ()) is None
        done = group.together(load_first(group, 3, other_tag), load_other(group, 3, other_tag))
        assert done == (3, 3)
        assert load_other(group, 3)() is None, "it was refused, and that is remembered"


def test_a_borrowed_chunk_of_another_size_is_none(tmp_path) -> None:
    with group_of(tmp_path) as group:

        def ask():
            opened = group.other.open_round(TAG)
            assert opened.borrow(0, (SIZE - 1,), torch.uint8, PAGES) is None
            assert opened.borrow(-1, (SIZE,), torch.uint8, PAGES) is None
            return opened.conclude(0)

        assert group.together(load_first(group, 3), ask) == (0, 0)


def test_ranks_that_start_together_wait_for_each_other(tmp_path) -> None:
    """The first lookup of an engine that was started again must not miss for want of a rank."""
    tmp_path.chmod(0o700)
    other = FollowerRank(options(tmp_path, 1, shares=False), metrics=Metrics())
    assert not other.wait_until_whole(0.05), "nobody is there to wait for"
    waiting = threading.Thread(target=other.wait_until_whole, args=(60,))
    waiting.start()
    first = FirstRank(options(tmp_path, 0, shares=False), metrics=Metrics(), arena=None)
    assert first.wait_until_whole(60)
    waiting.join(60)
    assert first.is_whole()
    assert other.is_whole()
    other.close()
    first.close()
    assert not first.wait_until_whole(0.0)


def test_rank_0_alone_loads_nothing_and_says_why(tmp_path) -> None:
    tmp_path.chmod(0o700)
    metrics = Metrics()
    first = FirstRank(options(tmp_path, 0, shares=False), metrics=metrics, arena=None)
    assert not first.is_whole()
    assert first.open_round(TAG) is None
    failed = 'kvkeep_failures_total{tier="ranks",operation="load",cause="not_whole"}'
    assert metrics.snapshot()[failed] == 1
    first.close()
    assert not first.is_whole()
    assert first.open_round(TAG) is None


@pytest.mark.parametrize(
    "message",
    [
        encode(Join(1, 1, 2, b"\1" * 32)),
        encode(Join(1, 2, 2, IDENTITY)),
        encode(Join(1, 0, 2, IDENTITY)),
        encode(Join(1, 1, 3, IDENTITY)),
        encode(Join(99, 1, 2, IDENTITY)),
        encode(Done(1, 1)),
        b"\xff\xff\xff\xff",
        b"\x05\0\0\0nonsense",
        b"",
    ],
    ids=["identity", "rank", "rank 0", "size", "protocol", "done", "length", "nonsense", "eof"],
)
def test_fault_36_who_does_not_belong_here_is_sent_away(tmp_path, message) -> None:
    """Fault 36: a stranger at the ranks' socket holds nobody up."""
    with group_of(tmp_path) as group:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / "ranks.sock"))
            stranger.sendall(message)
            if not message:
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            assert group.first.is_whole()
            assert stranger.recv(100) == b""
        assert group.together(load_first(group, 3), load_other(group, 3)) == (3, 3)


def test_fault_36_a_stranger_that_says_nothing_is_not_waited_for(tmp_path) -> None:
    """Fault 36: it is let sit, and the ranks go on."""
    with group_of(tmp_path) as group, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(tmp_path / "ranks.sock"))
        assert group.first.is_whole()
        assert group.together(load_first(group, 3), load_other(group, 3)) == (3, 3)


@pytest.mark.parametrize("message", [Join(1, 1, 2, IDENTITY), Welcome("0" * 32, 1), Verdict(1, 1)])
def test_fault_36_a_rank_that_breaks_the_protocol_is_left_out(tmp_path, message) -> None:
    """Fault 36: what only rank 0 may say, or say once."""
    with group_of(tmp_path, timeout_s=2.0) as group:
        group.other._channel.send(message, 1e12)
        group.first.is_whole()
        wait_until(lambda: group.first.is_whole() and group.other.is_whole())

        def loads() -> bool:
            done = group.together(load_first(group, 3), load_other(group, 3))
            return done == (3, 3)

        wait_until(loads)


def test_a_pool_that_cannot_be_mapped_is_refused(tmp_path) -> None:
    arena = Arena(8192)
    with pytest.raises(RankError, match="no memory"):
        FirstRank(options(tmp_path, 0), metrics=Metrics(), arena=arena)
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_two_engines_do_not_meet_at_one_socket(tmp_path) -> None:
    with group_of(tmp_path, shares=False), pytest.raises(RankError, match="listens"):
        FirstRank(options(tmp_path, 0, shares=False), metrics=Metrics(), arena=None)


def test_what_killed_engines_left_is_removed(tmp_path) -> None:
    tmp_path.chmod(0o700)
    left = verdict_directory(tmp_path / "other.sock")
    left.mkdir()
    os.symlink("3", left / "session-1")
    alive = verdict_directory(tmp_path / "alive.sock")
    alive.mkdir()
    (tmp_path / "alive.sock").touch()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "ranks.sock"))
    dead.close()  # the file stays, as after a kill
    first = FirstRank(options(tmp_path, 0, shares=False), metrics=Metrics(), arena=None)
    assert not left.exists()
    assert alive.exists()
    first.close()


def test_outcomes_do_not_pile_up(tmp_path) -> None:
    with group_of(tmp_path, shares=False) as group:
        for _ in range(30):
            assert group.together(load_first(group, 2), load_other(group, 3)) == (2, 2)
        assert len(list(verdict_directory(tmp_path / "ranks.sock").iterdir())) == 1


def test_whether_rank_0_stores_for_all() -> None:
    unset, on, off = (RanksSettings(save_only_first_rank=value) for value in (None, True, False))
    assert is_first_rank_only(unset, has_same_kv=True, is_one_machine=True)
    assert is_first_rank_only(on, has_same_kv=True, is_one_machine=True)
    assert not is_first_rank_only(off, has_same_kv=True, is_one_machine=True)
    assert not is_first_rank_only(unset, has_same_kv=False, is_one_machine=True)
    with pytest.raises(ConfigError, match="KV of its own"):
        is_first_rank_only(on, has_same_kv=False, is_one_machine=True)
