"""In bfloat16 (spec 11.4): pages come back bit for bit, and tokens equal a run split alike.

Another split of the same prefill rounds differently there, with vLLM's own prefix cache just as
well. So the run to compare with is vLLM without kvkeep and with its own prefix cache, which splits
the prompts of this test at the same token.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import cloudpickle
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

BLOCK, CHUNK, SHARED = 128, 256, 1024


def watch(worker: Any) -> None:
    """Runs in the worker: note the content of every page stored and loaded."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._worker
    caches = side._engine._connector._registered[0]
    stored: dict[bytes, bytes] = {}
    loaded: list[tuple[bytes, bytes]] = []
    save, load = side.save, side.load

    def page(block: int) -> bytes:
        content = hashlib.sha256()
        for cache in caches:
            content.update(cache[block].contiguous().view(torch.uint8).numpy())
        return content.digest()

    def name(tokens: bytes, block: int) -> bytes:
        return hashlib.sha256(tokens[: (block + 1) * BLOCK * 4]).digest()

    def watched_save(meta: Any) -> None:
        save(meta)
        for spec in meta.saves:
            for number, block in enumerate(spec.block_ids, spec.start // BLOCK):
                stored[name(spec.tokens, number)] = page(block)

    def watched_load(meta: Any) -> None:
        load(meta)
        for spec in meta.loads:
            for number in range(spec.start // BLOCK, -(-spec.end // BLOCK)):
                loaded.append((name(spec.tokens, number), page(spec.block_ids[number])))

    side.save, side.load, side.watched = watched_save, watched_load, (stored, loaded)


def watched(worker: Any) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]]]:
    """Runs in the worker: what was noted."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker.watched


def test_pages_and_tokens(running, cases):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    order = [*cases.concurrent[:4], *cases.concurrent[:4]]
    with running(None, dtype="bfloat16", enable_prefix_caching=True) as bare:
        expected = [bare.generate([case])[0] for case in order]
        assert bare.metric("prefix_cache_hits") == 7 * SHARED
    with running({}, dtype="bfloat16") as engine:
        engine.llm.collective_rpc(watch)
        assert [engine.generate([case])[0] for case in order] == expected
        assert engine.external_hits() == 7 * SHARED
        whole = cases.by_length[2 * CHUNK]
        for _ in range(2):
            engine.generate([whole])
        stored, loaded = engine.llm.collective_rpc(watched)[0]
        assert len(loaded) == 7 * SHARED // BLOCK + 2 * CHUNK // BLOCK
        assert all(stored[name] == content for name, content in loaded)
        engine.check_nothing_held()
