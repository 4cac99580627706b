"""A pool that is too small, a frozen engine, a closed wrapper: misses, never errors."""

from __future__ import annotations

import pytest
import torch

from kvkeep.connectors.hf.caches import ModelCaches

pytestmark = pytest.mark.engine

GREEDY = {"do_sample": False, "max_new_tokens": 4}
#: Bytes of a tiny model's chunk: K and V, 2 layers, 16 tokens, 2 heads of 16 float32.
CHUNK_BYTES = 2 * 2 * 16 * 2 * 16 * 4


def test_pool_smaller_than_a_prompt(tiny, keep, prompt) -> None:
    model = tiny()
    with keep(model, **{"cpu.size": 3 * CHUNK_BYTES}) as kept:
        for seed in range(6):
            ids = prompt(100, seed=seed)
            plain = model.generate(ids, **GREEDY)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)
            assert 0 < kept.last_call.num_found <= 3 * 16


def test_pool_smaller_than_a_chunk(tiny, keep, prompt) -> None:
    model = tiny()
    with keep(model, chunk_size=64, **{"cpu.size": 2 * CHUNK_BYTES}) as kept:
        ids = prompt(100)
        for _ in range(2):
            assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
            assert kept.last_call.num_found == 0


def test_many_prompts_through_a_small_pool(tiny, keep, prompt, left_pad) -> None:
    model = tiny()
    with keep(model, **{"cpu.size": 5 * CHUNK_BYTES}) as kept:
        for seed in range(12):
            rows = [prompt(20 + 7 * (seed % 4), seed=seed % 5), prompt(33, seed=seed % 3)]
            ids, mask = left_pad(rows)
            plain = model.generate(ids, attention_mask=mask, **GREEDY)
            assert torch.equal(kept.generate(ids, attention_mask=mask, **GREEDY), plain)


def test_frozen_engine_still_loads_but_stores_nothing(tiny, keep, prompt) -> None:
    model = tiny()
    known, new = prompt(40), prompt(40, seed=1)
    with keep(model) as kept:
        kept.generate(known, **GREEDY)
        kept.engine.freeze(True)
        kept.generate(known, **GREEDY)
        assert kept.last_call.num_found == 32
        for _ in range(2):
            assert torch.equal(kept.generate(new, **GREEDY), model.generate(new, **GREEDY))
            assert kept.last_call.num_found == 0
        kept.engine.freeze(False)


def test_a_model_that_raises_leaves_nothing_behind(tiny, keep, prompt, monkeypatch) -> None:
    """Faults 17 and 18: a lookup's pins and a request's objects end with the request."""
    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1], "forward", _raise)
            with pytest.raises(ZeroDivisionError):
                kept.generate(torch.cat([ids, prompt(40, seed=1)], dim=1), **GREEDY)
        assert kept.engine.check().open_leases == 0
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_no_memory_for_what_was_found_gives_the_pins_back(
    tiny, keep, prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 17: a lookup that is never loaded."""
    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)

        def fail(self: object, num_tokens: int) -> None:
            assert kept.engine.check().open_leases == 1
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(ModelCaches, "allocate", fail)
            with pytest.raises(MemoryError):
                kept.generate(ids, **GREEDY)
        assert kept.engine.check().open_leases == 0
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert kept.last_call.num_found == 32


def _raise(*args: object, **more: object) -> None:
    raise ZeroDivisionError


def test_closed(tiny, keep, prompt) -> None:
    from kvkeep.connectors.hf import attach

    model = tiny()
    kept = attach(model)
    kept.close()
    kept.close()
    with pytest.raises(RuntimeError, match="closed"):
        kept.generate(prompt(4), **GREEDY)
    assert model.generate(prompt(4), **GREEDY).shape == (1, 8)


def test_training_mode_is_refused(tiny, keep, prompt) -> None:
    model = tiny()
    with keep(model) as kept:
        model.train()
        with pytest.raises(RuntimeError, match="eval"):
            kept.generate(prompt(4), **GREEDY)
        model.eval()


def test_autocast_is_refused(tiny, keep, prompt) -> None:
    with keep(tiny()) as kept:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
            kept.generate(prompt(40), **GREEDY)
        kept.generate(prompt(40), **GREEDY)
