from __future__ import annotations

from kvkeep.engine.removal import MIN_PRUNE, TaggedKeys
from kvkeep.hashing import ChunkKey

TEAM = (("team", "a"),)


def keys(first: int, last: int) -> list[ChunkKey]:
    return [ChunkKey(number.to_bytes(32, "big")) for number in range(first, last)]


def test_taken_once() -> None:
    tagged = TaggedKeys(lambda key: True)
    tagged.note(TEAM, keys(0, 3))
    tagged.note((), keys(3, 5))
    assert sorted(tagged.take(TEAM)) == keys(0, 3)
    assert tagged.take(TEAM) == []
    assert tagged.take(()) == []
    tagged.note(TEAM, keys(0, 3))
    tagged.forget_all()
    assert tagged.take(TEAM) == []


def test_chunks_that_are_gone_are_forgotten() -> None:
    living = set(keys(0, 100))
    tagged = TaggedKeys(living.__contains__)
    tagged.note(TEAM, keys(0, MIN_PRUNE - 1))
    tagged.note(TEAM, keys(MIN_PRUNE, MIN_PRUNE + 1))
    assert set(tagged.take(TEAM)) == living
