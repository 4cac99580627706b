"""vLLM's own prefix cache is on as well: each has what the other lacks (float32)."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK, BLOCK, SHARED = 256, 128, 1024


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine({"chunk_size": CHUNK}, enable_prefix_caching=True)


def test_eight_concurrent_requests_three_times(engine, cases, reference):
    """Cold, then from vLLM's own cache, then from kvkeep after vLLM has lost its own."""
    expected = [reference[case] for case in cases.concurrent]
    assert engine.generate(cases.concurrent) == expected
    assert engine.generate(cases.concurrent) == expected
    local = engine.metric("prefix_cache_hits")
    assert local >= len(expected) * SHARED
    assert engine.llm.reset_prefix_cache()
    hits = engine.external_hits()
    assert engine.generate(cases.concurrent) == expected
    gained = engine.external_hits() - hits
    assert gained >= SHARED
    assert gained + engine.metric("prefix_cache_hits") - local >= len(expected) * SHARED
    engine.check_nothing_held()


def test_kvkeep_goes_on_where_the_engines_own_prefix_ends(engine, cases, reference):
    """vLLM has an odd number of blocks, so the load starts inside a chunk."""
    case = cases.concurrent[0]
    engine.generate([case])
    assert engine.llm.reset_prefix_cache()
    engine.generate([replace(case, tokens=case.tokens[: 3 * BLOCK + 5])])
    hits = engine.external_hits()
    local = engine.metric("prefix_cache_hits")
    assert engine.generate([case])[0] == reference[case]
    assert engine.metric("prefix_cache_hits") - local == 3 * BLOCK
    assert engine.external_hits() - hits == SHARED - 3 * BLOCK
    engine.check_nothing_held()


def test_two_samples_and_resets(engine, cases, reference):
    for case in cases.sampled:
        assert engine.generate([case])[0] == reference[case]
        assert engine.llm.reset_prefix_cache()
        assert engine.generate([case])[0] == reference[case]
    engine.check_nothing_held()


def test_reset_of_the_connector_forgets_every_chunk(engine, cases, reference):
    case = cases.by_length[2 * CHUNK]
    engine.generate([case])
    assert engine.report().num_chunks > 0
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.report().num_chunks == 0
    hits = engine.external_hits()
    assert engine.generate([case])[0] == reference[case]
    assert engine.external_hits() == hits
    report = engine.check_nothing_held()
    assert report.num_chunks == 2
