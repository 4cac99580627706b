"""Where the time of a cold and of a warm request through vLLM goes.

    python benchmarks/vllm_profile.py [--tokens 4096] [--turns 3] [--top 25]

Engine core and worker run in this process, so that one profile (cProfile, in the engine's thread)
sees all of it. Prints the share of each step, and with ``--top`` the functions that took most.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import random
from typing import Annotated, Any

import typer

#: What a request passes through: label, file name, function.
STEPS = (
    (
        "kvkeep: lookup (scheduler)",
        "kvkeep/connectors/vllm/connector.py",
        "get_num_new_matched_tokens",
    ),
    (
        "kvkeep: step metadata (scheduler)",
        "kvkeep/connectors/vllm/connector.py",
        "build_connector_meta",
    ),
    ("kvkeep: load (worker)", "kvkeep/connectors/vllm/worker.py", "load"),
    ("kvkeep: save (worker)", "kvkeep/connectors/vllm/worker.py", "save"),
    ("kvkeep: of these, keys", "kvkeep/tokens.py", "process_tokens"),
    ("kvkeep: of these, copies", "kvkeep/gpu/paged.py", "copy"),
    ("vLLM: forward pass", "vllm/v1/worker/gpu_model_runner.py", "_model_forward"),
    ("vLLM: execute_model", "vllm/v1/worker/gpu_model_runner.py", "execute_model"),
    ("vLLM: scheduling", "vllm/v1/core/sched/scheduler.py", "schedule"),
)


def start() -> Any:
    """An engine with kvkeep in this process."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM

    from kvkeep.demo.model import prepare_model

    return LLM(
        str(prepare_model()),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_transfer_config={
            "kv_connector": "KVKeepConnector",
            "kv_connector_module_path": "kvkeep.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu.size": "2GiB", "cpu.prefault": "1GiB"},
        },
    )


def steps_of(stats: pstats.Stats) -> tuple[float, list[tuple[str, float]]]:
    """Seconds in all, and in each step."""
    entries = stats.stats  # type: ignore[attr-defined]
    found = []
    for label, path, name in STEPS:
        seconds = sum(
            entry[3]
            for (file, _, function), entry in entries.items()
            if function == name and file.endswith(path)
        )
        found.append((label, seconds))
    return stats.total_tt, found  # type: ignore[attr-defined]


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    turns: Annotated[int, typer.Option(help="Prompts.")] = 3,
    top: Annotated[int, typer.Option(help="Functions to print, of each kind of request.")] = 0,
) -> None:
    """Profile cold and warm requests."""
    engine = start()
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0)
    numbers = random.Random(3)

    def ask(prompt: list[int]) -> None:
        engine.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)

    ask([numbers.randrange(3, 49_000) for _ in range(300)])
    profiles = {"cold": cProfile.Profile(), "warm": cProfile.Profile()}
    for _ in range(turns):
        prompt = [numbers.randrange(3, 49_000) for _ in range(tokens)]
        for profile in profiles.values():
            profile.enable()
            ask(prompt)
            profile.disable()
    for kind, profile in profiles.items():
        stats = pstats.Stats(profile)
        total, steps = steps_of(stats)
        print(f"{kind}: {total / turns * 1e3:.1f} ms per request of {tokens:,} tokens")
        for label, seconds in steps:
            print(f"  {label:<36} {seconds / turns * 1e3:9.2f} ms {seconds / total:7.2%}")
        if top:
            stats.sort_stats("tottime").print_stats(top)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    typer.run(main)
