from __future__ import annotations

import os
import threading

import pytest

from kvkeep.errors import RankError
from kvkeep.ranks.first import Verdicts, make_directory, remove_directory


def test_the_first_one_decides(tmp_path) -> None:
    first, second = Verdicts(tmp_path, "a"), Verdicts(tmp_path, "a")
    assert first.read(1) is None
    assert first.decide(1, 5) == 5
    assert second.decide(1, 0) == 5
    assert second.decide(2, 0) == 0
    assert first.decide(2, 5) == 0
    assert (first.read(1), first.read(2)) == (5, 0)
    assert Verdicts(tmp_path, "b").decide(1, 3) == 3, "another session counts anew"


def test_many_who_try_at_once_agree(tmp_path) -> None:
    verdicts = Verdicts(tmp_path, "a")
    start = threading.Barrier(8)
    outcomes: list[list[int]] = [[] for _ in range(8)]

    def decide(number: int) -> None:
        start.wait()
        for seq in range(200):
            outcomes[number].append(verdicts.decide(seq, number + 1))

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_outcomes_are_forgotten_in_order(tmp_path) -> None:
    verdicts = Verdicts(tmp_path, "a")
    for seq in range(5):
        verdicts.decide(seq, seq)
    verdicts.forget_before(3)
    assert sorted(os.listdir(tmp_path)) == ["a-3", "a-4"]
    verdicts.forget_before(2)
    assert sorted(os.listdir(tmp_path)) == ["a-3", "a-4"]


@pytest.mark.parametrize("target", ["x", "-1", "1" * 19, "²", "nan"])
def test_what_is_no_outcome_is_a_miss(tmp_path, target) -> None:
    os.symlink(target, tmp_path / "a-1")
    assert Verdicts(tmp_path, "a").decide(1, 4) == 0


def test_where_nothing_can_be_written_nothing_counts(tmp_path) -> None:
    verdicts = Verdicts(tmp_path / "gone", "a")
    assert verdicts.decide(1, 4) == 0
    assert verdicts.read(1) is None


def test_a_new_rank_0_starts_with_an_empty_directory(tmp_path) -> None:
    directory = tmp_path / "verdicts"
    make_directory(directory)
    Verdicts(directory, "old").decide(1, 4)
    make_directory(directory)
    assert list(directory.iterdir()) == []
    assert directory.stat().st_mode & 0o777 == 0o700
    Verdicts(directory, "new").decide(1, 4)
    remove_directory(directory)
    remove_directory(directory)
    assert not directory.exists()


def test_a_link_in_its_place_is_refused(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "verdicts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RankError, match="no directory"):
        make_directory(tmp_path / "verdicts")
    with pytest.raises(RankError, match="cannot make"):
        make_directory(tmp_path / "missing" / "verdicts")
