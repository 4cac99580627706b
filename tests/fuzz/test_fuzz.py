"""Every parser of bytes from outside survives what was kept, and variations of it.

``make fuzz`` looks for more, guided by coverage; ``KVKEEP_FUZZ_SECONDS`` says for how long.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from support.fuzz_targets import TARGETS
from support.fuzzing import MAX_INPUT_BYTES, corpus_of, variations

CORPUS = Path(__file__).parent / "corpus"
#: Variations of the corpus that a test tries.
COUNT = 250
#: Most that a parser takes for the largest input, whatever it claims.
MAX_PEAK_BYTES = 64 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_and_variations_of_it(name) -> None:
    corpus = corpus_of(CORPUS, name)
    assert corpus
    target = TARGETS[name]
    target(b"")
    tracemalloc.start()
    try:
        for data in [*corpus, *variations(corpus, COUNT, seed=1)]:
            target(data)
        assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES
    finally:
        tracemalloc.stop()


def test_every_folder_has_its_target() -> None:
    assert sorted(path.name for path in CORPUS.iterdir()) == sorted(TARGETS)


def test_variations_are_the_same_each_time_and_bounded() -> None:
    corpus = [b"abc", bytes(MAX_INPUT_BYTES)]
    first, second = (list(variations(corpus, 200, seed=3)) for _ in range(2))
    assert first == second
    assert len(set(first)) > 150
    assert max(map(len, first)) <= MAX_INPUT_BYTES


def test_the_target_of_a_wrong_hit_would_notice_one(monkeypatch) -> None:
    """A loader that accepts what does not verify does not pass."""
    from kvkeep.backends.remote import values
    from kvkeep.codec.frame import HEADER_BYTES

    good = next(data for data in corpus_of(CORPUS, "remote_value") if len(data) > HEADER_BYTES + 64)
    TARGETS["remote_value"](good)
    monkeypatch.setattr(values.LoadRules, "fault_of", lambda *args: None)
    foreign = bytearray(good)
    foreign[80] ^= 1
    with pytest.raises(AssertionError):
        for where in range(64, HEADER_BYTES - 8, 8):
            foreign = bytearray(good)
            foreign[where] ^= 1
            TARGETS["remote_value"](bytes(foreign))


def test_a_deeply_nested_line_is_no_trace() -> None:
    """What a JSON parser gives up on is an error of the trace's, not of the program's."""
    with pytest.raises(RecursionError):
        json.loads(b"[" * 100_000)
    TARGETS["trace_file"](b"[" * 100_000)
    TARGETS["trace_file"](b'{"prompt": ' + b"[" * 100_000)
