"""What copies are held against is a copy of the same bytes, under the same conditions."""

from __future__ import annotations

import sys

import pytest

from kvkeep.bench import engine


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_limit_copies_every_byte(threads: int) -> None:
    limit = engine.Memcpy(1_000_003, threads)
    assert limit._to.all()  # touched
    limit._from[:] = 5
    limit()
    assert (limit._to == 5).all()


def test_the_limit_has_huge_pages_as_the_pool_has(monkeypatch) -> None:
    taken = []
    advise = engine.advise_huge_pages
    monkeypatch.setattr(engine, "advise_huge_pages", lambda some: taken.append(advise(some)))
    engine.Memcpy(16 << 20)
    assert len(taken) == 2
    if sys.platform == "linux":
        assert all(size >= 12 << 20 for size in taken)
