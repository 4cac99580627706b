"""A pool in which no prompt fits, and one in which no chunk fits (float32)."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK = 256
#: A chunk of this model: 256 tokens, 30 layers, K and V, 3 heads of 64 float32.
CHUNK_BYTES = 256 * 30 * 2 * 3 * 64 * 4


def test_a_pool_smaller_than_one_prompt(running, cases, reference):
    """The prefix that fits is kept; the rest goes on without."""
    prompts = cases.concurrent[:4]
    expected = [reference[case] for case in prompts]
    with running({"cpu.size": 2 * CHUNK_BYTES + 4096}) as engine:
        for _ in range(2):
            assert engine.generate(prompts) == expected
            report = engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
            assert report.num_chunks <= 2
        hits = engine.external_hits()
        assert engine.generate([prompts[0]])[0] == expected[0]
        assert engine.external_hits() - hits == 2 * CHUNK
        other = cases.by_length[3 * CHUNK]
        for _ in range(2):
            assert engine.generate([other])[0] == reference[other]
            engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
        assert engine.counter("kvkeep_evictions_total") > 0


def test_a_pool_smaller_than_one_chunk(running, cases, reference):
    prompts = [cases.by_length[2 * CHUNK], cases.by_length[CHUNK + 1]]
    with running({"cpu.size": CHUNK_BYTES // 2}) as engine:
        for _ in range(2):
            assert engine.generate(prompts) == [reference[case] for case in prompts]
            report = engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
            assert (report.num_chunks, report.used_bytes) == (0, 0)
        assert engine.external_hits() == 0
        assert engine.counter("kvkeep_store_skipped_tokens_total") > 0
