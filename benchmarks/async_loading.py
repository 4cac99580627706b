"""Inter-token times of a running request while another one loads from a slow tier, in real vLLM.

A small model with random weights decodes one request. Meanwhile a second one arrives whose prefix
lies in a tier that takes 200 ms for each chunk. Four engines in turn, each in a process of its own:
requests wait in the queue for their chunks (the default), the same with copies between steps, the
same with lookups that wait (what asynchronous loading replaces), and a full engine in which the
second request has no seat at first. The running request's inter-token times stand beside those of
the same engine a moment before, without a second request; the waiting one's time to first token
beside that of the same load on an idle engine.

Use: ``python benchmarks/async_loading.py [--json]``; about two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHUNK, NUM_CHUNKS = 256, 24
SECONDS_PER_CHUNK = 0.2
#: Tokens that the running request has before the other one comes, and in all.
BEFORE, IN_ALL = 200, 700
SLOW = {
    "plugins": [
        {
            "name": "SlowBackend",
            "module": "kvkeep.testing.faulty:SlowBackend",
            "settings": {"seconds_per_chunk": SECONDS_PER_CHUNK},
        }
    ],
    "cost.enabled": False,
    "identity.revision": "random",
    "cpu.size": "1GiB",
}
ENGINES: dict[str, tuple[Mapping[str, object], int]] = {
    "waits in the queue": ({}, 4),
    "the same, copies between steps": ({"load.asynchronous": True}, 4),
    "without: lookups wait": ({"prefetch.enabled": False, "lookup.timeout": "20s"}, 4),
    "waits in the queue, no free seat": ({}, 1),
}


def make_model(folder: Path) -> None:
    """The config of a small Llama; vLLM makes the weights up."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    ).save_pretrained(folder)


def serve(name: str, folder: str) -> dict[str, Any]:
    """One engine's figures, in seconds; runs in a process of its own."""
    from vllm import LLM, SamplingParams

    extra, seats = ENGINES[name]
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_seqs=seats,
        kv_transfer_config={
            "kv_connector": "KVKeepConnector",
            "kv_connector_module_path": "kvkeep.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": SLOW | dict(extra),
        },
    )
    core = llm.llm_engine
    prompt = [(7 * position) % 900 for position in range(CHUNK * NUM_CHUNKS + 20)]
    runner = [(11 * position) % 900 for position in range(40)]

    def add(req_id: str, tokens: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        core.add_request(req_id, {"prompt_token_ids": tokens}, params)

    def forget() -> None:
        llm.collective_rpc(_forget_memory)

    def first_token(req_id: str) -> float:
        begin = time.perf_counter()
        add(req_id, prompt, 1)
        while not any(output.request_id == req_id for output in core.step()):
            pass
        return time.perf_counter() - begin

    first_token("store")
    forget()
    first_token("warm up")
    forget()
    busy_s = cpu_seconds()
    alone = first_token("alone")
    busy_s = cpu_seconds() - busy_s
    forget()
    add("running", runner, IN_ALL)
    times: list[float] = []
    added = came = 0.0
    while core.has_unfinished_requests():
        for output in core.step():
            now = time.perf_counter()
            if output.request_id == "running":
                times.append(now)
            elif not came:
                came = now
        if len(times) == BEFORE and not added:
            added = time.perf_counter()
            add("waiting", prompt, 1)
    ended = times[-1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    until = next((n for n, moment in enumerate(times) if moment > came), len(gaps))
    return {
        "before": gaps[20 : BEFORE - 1],
        "during": gaps[BEFORE : min(until, len(gaps))],
        "alone": alone,
        "cores": busy_s / alone,
        "first token": came - added,
        "seat": ended - added,
    }


def cpu_seconds() -> float:
    """CPU time of this process and all its children so far."""
    import psutil

    this = psutil.Process()
    times = [process.cpu_times() for process in [this, *this.children(recursive=True)]]
    return sum(spent.user + spent.system for spent in times)


def _forget_memory(worker: object) -> None:
    """Leave chunks in the slow tier alone; runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group()._worker._manager.storage.clear(["LocalCPUBackend"])


def in_process(name: str, folder: str) -> dict[str, Any]:
    """Run :func:`serve` in a process of its own and read its figures."""
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        **os.environ,
    }
    command = [sys.executable, __file__, "--serve", name, folder]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    for line in done.stdout.splitlines():
        if line.startswith('{"before"'):
            return dict(json.loads(line))
    raise RuntimeError(f"the engine gave no figures:\n{done.stderr[-3000:]}")


def spread(gaps: list[float]) -> str:
    """Median, 95th and 99th percentile and the largest, in milliseconds."""
    ordered = sorted(gaps)
    points = [statistics.median(ordered)]
    points += [ordered[int(len(ordered) * share)] for share in (0.95, 0.99)]
    return "  ".join(f"{point * 1e3:7.1f}" for point in [*points, ordered[-1]])


def main() -> None:
    """Print the table, or the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print all times, in seconds")
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        print(json.dumps(serve(*given.serve)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        figures = {name: in_process(name, folder) for name in ENGINES}
    if given.json:
        print(json.dumps(figures))
        return
    print(f"{NUM_CHUNKS} chunks of {SECONDS_PER_CHUNK * 1e3:g} ms each; inter-token times in ms\n")
    print(f"{'':34}{'':10} median      95%      99%  largest")
    for name, figure in figures.items():
        print(f"{name:34}{'before':10}{spread(figure['before'])}")
        print(f"{'':34}{'meanwhile':10}{spread(figure['during'])}")
        print(
            f"{'':34}first token after {figure['first token']:.2f} s, on an idle engine after "
            f"{figure['alone']:.2f} s\n{'':34}(which kept {figure['cores']:.2f} cores busy); "
            f"the running request ended after {figure['seat']:.2f} s\n"
        )


if __name__ == "__main__":
    main()
