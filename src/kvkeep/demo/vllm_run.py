"""The demo through vLLM: an engine without kvkeep, one with it, and a new one after a restart.

vLLM's own prefix cache is off everywhere, or it would answer for kvkeep. The time to the first
token is the one that vLLM measures itself, from the arrival of the request on. Engine and worker
are processes of their own, which end with each engine.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.config import load_settings
from kvkeep.demo.model import Prompt, build_prompts, disk_settings, leave_page_cache
from kvkeep.demo.outcome import Comparison, DemoResult, Progress, Reply
from kvkeep.errors import KVKeepError, MissingExtraError
from kvkeep.lookup.client import LookupClient

#: Tokens of an answer, at most.
ANSWER_TOKENS = 24
#: Tokens of a prompt that a new engine computes before it is timed.
WARM_UP_TOKENS = 64
#: Memory for vLLM's own KV pages; a few prompts of the demo fit.
KV_PAGES_BYTES = 1 << 30
#: How vLLM finds the connector.
TRANSFER_CONFIG = {
    "kv_connector": "KVKeepConnector",
    "kv_connector_module_path": "kvkeep.connectors.vllm",
    "kv_role": "kv_both",
}
#: What lookups found on the disk.
DISK_HITS = 'kvkeep_lookup_hit_tokens_total{tier="LocalDiskBackend"}'
#: How long the worker may take to say what it holds.
CHECK_TIMEOUT_S = 30.0


def run_vllm(
    model_name: str, questions: Sequence[str], progress: Progress, disk: Path
) -> DemoResult:
    """Ask all questions without kvkeep, with the document in memory, and after a restart.

    Args:
        model_name: a folder or the name of a model.
        questions: what to ask about the document.
        progress: told before each step.
        disk: folder of the disk tier.

    Raises:
        MissingExtraError: vLLM is not installed.
        KVKeepError: vLLM did not start.
    """
    require_vllm()
    steps = _Steps(progress, total=3 * len(questions) + 4)
    steps.next("starting vLLM without kvkeep")
    with _running(model_name, None) as engine:
        tokenizer = engine.get_tokenizer()
        prompts = build_prompts(tokenizer, questions)
        _answer(engine, prompts[0].token_ids, num_tokens=2)
        cold: list[Reply] = []
        for number, prompt in enumerate(prompts, 1):
            steps.next(f"cold, question {number}: {prompt.question}")
            cold.append(_answer(engine, prompt.token_ids))
    steps.next("starting vLLM with kvkeep")
    with _running(model_name, disk) as engine:
        steps.next("reading the document once, with kvkeep")
        _answer(engine, prompts[0].token_ids, num_tokens=2)
        warm: list[Reply] = []
        for number, prompt in enumerate(prompts, 1):
            steps.next(f"warm, question {number}: {prompt.question}")
            warm.append(_answer(engine, prompt.token_ids))
    leave_page_cache(disk)
    started = time.perf_counter()
    steps.next("starting vLLM again")
    with _running(model_name, disk) as engine:
        _answer(engine, prompts[0].token_ids[:WARM_UP_TOKENS], num_tokens=2)
        start_s = time.perf_counter() - started
        restarted = _answer_from_disk(engine, prompts, disk, steps)
    comparisons = [
        Comparison(
            question=prompt.question,
            answer=tokenizer.decode(warm[number].token_ids, skip_special_tokens=True),
            num_prompt_tokens=len(prompt.token_ids),
            cold=cold[number],
            warm=warm[number],
            restarted=restarted[number],
        )
        for number, prompt in enumerate(prompts)
    ]
    return DemoResult("vllm", model_name, comparisons, None, start_s)


def require_vllm() -> None:
    """Nothing where vLLM is installed.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("the demo through vLLM", "vllm")


class _Steps:
    """Counts the steps of a run."""

    def __init__(self, progress: Progress, *, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def next(self, doing: str) -> None:
        """The next step begins."""
        self._progress(self._done, self._total, doing)
        self._done += 1


@contextmanager
def _running(model_name: str, disk: Path | None) -> Iterator[Any]:
    """A vLLM engine in float32 without its own prefix cache; its processes end at the end.

    Args:
        model_name: the model.
        disk: folder of kvkeep's disk tier; None for no kvkeep.

    Raises:
        KVKeepError: it does not start.
    """
    from vllm import LLM

    transfer = None
    if disk is not None:
        transfer = TRANSFER_CONFIG | {"kv_connector_extra_config": disk_settings(str(disk))}
    try:
        engine = LLM(
            model=model_name,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            kv_cache_memory_bytes=KV_PAGES_BYTES,
            kv_transfer_config=transfer,
            disable_log_stats=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise KVKeepError(f"vLLM did not start with {model_name}: {error}") from error
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def _answer(engine: Any, token_ids: list[int], num_tokens: int = ANSWER_TOKENS) -> Reply:
    """Greedy answer to one prompt, alone in the engine."""
    from vllm import SamplingParams

    [output] = engine.generate(
        [{"prompt_token_ids": token_ids}],
        SamplingParams(temperature=0.0, max_tokens=num_tokens),
        use_tqdm=False,
    )
    if output.metrics is None:
        raise KVKeepError("this vLLM does not report when the first token of a request came")
    return Reply(
        list(output.outputs[0].token_ids),
        output.metrics.first_token_latency,
        output.num_cached_tokens or 0,
    )


def _answer_from_disk(
    engine: Any, prompts: Sequence[Prompt], disk: Path, steps: _Steps
) -> list[Reply]:
    """Answers for which the worker's CPU tier was emptied before."""
    from kvkeep.connectors.vllm.build import socket_paths

    settings = load_settings(env=os.environ, extra=disk_settings(str(disk)))
    engine_id = engine.llm_engine.vllm_config.kv_transfer_config.engine_id
    paths = socket_paths(settings, os.environ, engine_id=engine_id, world_size=1)
    replies: list[Reply] = []
    with closing(LookupClient(paths, timeout_s=CHECK_TIMEOUT_S)) as worker:
        for number, prompt in enumerate(prompts, 1):
            steps.next(f"from disk, question {number}: {prompt.question}")
            worker.clear(["LocalCPUBackend"])
            before = worker.check()[0].metrics.get(DISK_HITS, 0)
            reply = _answer(engine, prompt.token_ids)
            found = int(worker.check()[0].metrics.get(DISK_HITS, 0) - before)
            replies.append(replace(reply, num_found=found))
    return replies
