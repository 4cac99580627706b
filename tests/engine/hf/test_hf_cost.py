"""The cost rule under real transformers: a slow tier is left alone until it is quick again."""

from __future__ import annotations

import time

import torch

from kvkeep.config import load_settings
from kvkeep.connectors.hf import attach
from kvkeep.storage.cost import TOO_SLOW
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
CHUNK = 64
#: Much longer than the model takes for the prompt, also on a machine that is busy.
DELAY_S = 6.0


def test_a_slow_tier_is_skipped_until_it_is_quick(smollm2, tmp_path):
    """Fault 42: loading from the slow tier takes longer than computing again."""
    tokenizer, model = smollm2
    text = "The keeper of the lighthouse writes down what the wind does. " * 30
    prompt = tokenizer(text, return_tensors="pt").input_ids[:, : 4 * CHUNK + 3]
    plain = model.generate(prompt, do_sample=False, max_new_tokens=4).tolist()
    values = {
        "chunk_size": CHUNK,
        "cpu.size": "256MiB",
        "disk.path": str(tmp_path),
        "lookup.timeout": "60s",
        "cost.retry": "1h",
    }
    with attach(model, load_settings(env={}, extra=values)) as kept:
        storage = kept._manager.storage
        disk = storage.storage_backends[DISK]
        slow = storage.storage_backends[DISK] = FaultyBackend(disk)

        def answer():
            """What a new answer finds on the disk; the tokens are always the same."""
            assert disk.flush(60)
            kept.engine.clear([CPU])
            before = counted("kvkeep_lookup_hit_tokens_total", f'tier="{DISK}"')
            out = kept.generate(prompt, do_sample=False, max_new_tokens=4)
            assert out.tolist() == plain
            return counted("kvkeep_lookup_hit_tokens_total", f'tier="{DISK}"') - before

        def counted(name, labels):
            return int(kept.stats().get(f"{name}{{{labels}}}", 0))

        def skipped():
            return counted("kvkeep_tier_skipped_tokens_total", f'tier="{DISK}",cause="{TOO_SLOW}"')

        assert answer() == 0, "cold"
        assert kept.stats()["kvkeep_prefill_tokens_per_second"] > 0
        assert [answer(), answer()] == [4 * CHUNK, 4 * CHUNK], "a quick tier is used"
        assert skipped() == 0

        slow.faults = [Fault("contains", FaultKind.DELAY, delay_s=DELAY_S)]
        slow.calls.clear()
        assert answer() == 4 * CHUNK, "nobody knows yet that it is slow now"
        slow.faults = []  # nobody knows either that it is quick again
        assert [answer(), answer()] == [0, 0]
        assert skipped() == 2 * 4 * CHUNK
        kept.generate(prompt, do_sample=False, max_new_tokens=1)
        assert kept.last_call.num_found == 4 * CHUNK, "what was computed again is in memory"

        storage.cost._clock = lambda: time.monotonic() + 3601
        assert [answer(), answer()] == [4 * CHUNK, 4 * CHUNK], "one trial, and it is back"
        assert skipped() == 2 * 4 * CHUNK
        report = kept.engine.check()
        assert report.open_leases == 0
        assert report.num_objects == report.num_chunks


def test_switched_off_a_slow_tier_is_used(smollm2, tmp_path):
    _, model = smollm2
    prompt = torch.arange(1000, 1000 + 2 * CHUNK + 3)[None]
    values = {
        "chunk_size": CHUNK,
        "cpu.size": "64MiB",
        "disk.path": str(tmp_path),
        "lookup.timeout": "60s",
        "cost.enabled": False,
    }
    with attach(model, load_settings(env={}, extra=values)) as kept:
        for _ in range(3):
            storage = kept._manager.storage
            for _ in range(9):
                storage.cost.note_load(DISK, 1, 1000.0)
            kept.generate(prompt, do_sample=False, max_new_tokens=1)
            assert storage.storage_backends[DISK].flush(60)
            kept.engine.clear([CPU])
        assert kept.stats()[f'kvkeep_lookup_hit_tokens_total{{tier="{DISK}"}}'] == 2 * 2 * CHUNK
