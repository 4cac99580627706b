"""Two vLLM engines in turn over one Redis (float32): the second finds what the first computed."""

from __future__ import annotations

import pytest

from kvkeep.testing.chunks import wait_until
from support.servers.redis import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

CHUNK = 256
#: A chunk of this model: 256 tokens, 30 layers, K and V, 3 heads of 64 float32.
CHUNK_BYTES = 256 * 30 * 2 * 3 * 64 * 4
CPU, REMOTE = "LocalCPUBackend", "RemoteBackend"


def _hits(engine, tier: str) -> int:
    """Tokens that lookups found in a tier."""
    name = f'kvkeep_lookup_hit_tokens_total{{tier="{tier}"}}'
    return int(engine.report().metrics.get(name, 0))


def test_two_engines_in_turn_over_redis(running, reference, cases):
    """Issue 4, points 1 and 3: chunks come over the network while their requests wait."""
    stored = [cases.concurrent[0], cases.by_length[2 * CHUNK], cases.by_length[3 * CHUNK]]
    with redis_server() as server:
        settings = {"remote.url": server.url, "cpu.size": 12 * CHUNK_BYTES, "cost.enabled": False}
        with running(settings) as engine:
            for case in stored:
                assert engine.generate([case])[0] == reference[case]
            assert _hits(engine, REMOTE) == 0
            wait_until(lambda: server.command("DBSIZE").startswith(b":9\r\n"))
            engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
        with running(settings) as engine:
            assert engine.generate(stored) == [reference[case] for case in stored]
            assert (_hits(engine, REMOTE), _hits(engine, CPU)) == (9 * CHUNK, 0)
            assert engine.external_hits() == 9 * CHUNK - 2  # two prompts are whole chunks
            outcomes = 'kvkeep_prefetches_total{outcome="done"}'
            assert engine.report().metrics[outcomes] >= len(stored)
            assert engine.generate(stored) == [reference[case] for case in stored]
            assert _hits(engine, REMOTE) == 9 * CHUNK
            engine.check_nothing_held(chunk_bytes=CHUNK_BYTES)
