"""Spec 14.7: time to first token through vLLM, cold and warm, and the overhead without a hit.

Two engines in turn, with and without kvkeep, engine prefix caching off, cores pinned the same way.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from kvkeep.bench.measure import Row, seconds

MODULE = Path(__file__)


def _serve(with_kvkeep: bool, lengths: list[int], repeats: int) -> dict[str, list[float]]:
    """Times to the first token in this process: {"cold 1024": [s, ...], "warm 1024": [...]}."""
    from vllm import LLM, SamplingParams

    from kvkeep.demo.model import prepare_model

    transfer = {
        "kv_connector": "KVKeepConnector",
        "kv_connector_module_path": "kvkeep.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu.size": "2GiB"},
    }
    llm = LLM(
        str(prepare_model()),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_transfer_config=transfer if with_kvkeep else None,
    )
    one = SamplingParams(max_tokens=1, temperature=0)
    numbers = random.Random(11)
    times: dict[str, list[float]] = {}
    for length in lengths:
        for turn in range(repeats + 1):
            prompt = {"prompt_token_ids": [numbers.randrange(3, 49_000) for _ in range(length)]}
            cold = seconds(lambda p=prompt: llm.generate([p], one, use_tqdm=False))
            warm = seconds(lambda p=prompt: llm.generate([p], one, use_tqdm=False))
            if turn:
                times.setdefault(f"cold {length}", []).append(cold)
                times.setdefault(f"warm {length}", []).append(warm)
    return times


def _in_process(with_kvkeep: bool, lengths: list[int], repeats: int) -> dict[str, list[float]]:
    """Run :func:`_serve` in a process of its own and read its figures."""
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    asked = json.dumps([with_kvkeep, lengths, repeats])
    done = subprocess.run(
        [sys.executable, str(MODULE), asked], env=env, capture_output=True, text=True, timeout=900
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    raise RuntimeError(f"the engine gave no figures:\n{done.stderr[-2000:]}")


def run(repeats: int, lengths: list[int]) -> list[Row]:
    """Rows for each prompt length."""
    without = _in_process(False, lengths, repeats)
    kept = _in_process(True, lengths, repeats)
    rows = []
    for length in lengths:
        cold = [value * 1e3 for value in kept[f"cold {length}"]]
        warm = [value * 1e3 for value in kept[f"warm {length}"]]
        plain = [value * 1e3 for value in without[f"cold {length}"]]
        middle = statistics.median
        ratio = middle(w / c for w, c in zip(warm, cold, strict=True))
        what = f"vLLM first token, {length:,} tokens: warm / cold"
        rows.append(Row(what, middle(warm), middle(cold), "ms", ratio, None))
        what = f"vLLM first token, {length:,} tokens, no hit: with / without"
        rows.append(
            Row(what, middle(cold), middle(plain), "ms", middle(cold) / middle(plain), 1.03)
        )
    return rows


if __name__ == "__main__":
    print(json.dumps(_serve(*json.loads(sys.argv[1]))), flush=True)
