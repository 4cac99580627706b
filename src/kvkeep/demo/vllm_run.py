"""The demo through vLLM: an engine without kvkeep, then one with it.

vLLM's own prefix cache is off on both sides, or it would answer for kvkeep. The time to the first
token is the one that vLLM measures itself, from the arrival of the request on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from kvkeep.demo.outcome import DemoResult, Progress, Reply, compare
from kvkeep.demo.prompts import Prompt, build_prompts
from kvkeep.errors import KVKeepError, MissingExtraError

#: Tokens of an answer, at most.
ANSWER_TOKENS = 24
#: Memory for vLLM's own KV pages; a few prompts of the demo fit.
KV_PAGES_BYTES = 1 << 30
#: How vLLM finds the connector.
TRANSFER_CONFIG = {
    "kv_connector": "KVKeepConnector",
    "kv_connector_module_path": "kvkeep.connectors.vllm",
    "kv_role": "kv_both",
}


def run_vllm(model_name: str, questions: Sequence[str], progress: Progress) -> DemoResult:
    """Ask all questions without kvkeep, then read the document once with it and ask them again.

    Args:
        model_name: a folder or the name of a model.
        questions: what to ask about the document.
        progress: told before each step.

    Raises:
        MissingExtraError: vLLM is not installed.
        KVKeepError: vLLM did not start.
    """
    require_vllm()
    steps = 2 * len(questions) + 4
    progress(0, steps, "starting vLLM without kvkeep")
    engine = _start(model_name, None)
    try:
        tokenizer = engine.get_tokenizer()
        prompts = build_prompts(tokenizer, questions)
        _answer(engine, prompts[0], num_tokens=2)
        cold: list[Reply] = []
        for number, prompt in enumerate(prompts):
            progress(1 + number, steps, f"cold, question {number + 1}: {prompt.question}")
            cold.append(_answer(engine, prompt))
    finally:
        _stop(engine)
    progress(1 + len(prompts), steps, "starting vLLM with kvkeep")
    engine = _start(model_name, TRANSFER_CONFIG)
    try:
        progress(2 + len(prompts), steps, "reading the document once, with kvkeep")
        _answer(engine, prompts[0], num_tokens=2)
        warm: list[Reply] = []
        for number, prompt in enumerate(prompts):
            done = 3 + len(prompts) + number
            progress(done, steps, f"warm, question {number + 1}: {prompt.question}")
            warm.append(_answer(engine, prompt))
    finally:
        _stop(engine)
    progress(steps, steps, "done")
    comparisons = compare(tokenizer, prompts, cold, warm)
    return DemoResult("vllm", model_name, comparisons, None)


def require_vllm() -> None:
    """Nothing where vLLM is installed.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("the demo through vLLM", "vllm")


def _start(model_name: str, transfer_config: dict[str, str] | None) -> Any:
    """A vLLM engine in float32 without its own prefix cache."""
    from vllm import LLM

    try:
        return LLM(
            model=model_name,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=4096,
            kv_cache_memory_bytes=KV_PAGES_BYTES,
            kv_transfer_config=transfer_config,
            disable_log_stats=False,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise KVKeepError(f"vLLM did not start with {model_name}: {error}") from error


def _stop(engine: Any) -> None:
    """End the engine's process, so that the next one has the machine to itself."""
    engine.llm_engine.engine_core.shutdown()


def _answer(engine: Any, prompt: Prompt, num_tokens: int = ANSWER_TOKENS) -> Reply:
    """Greedy answer to one prompt, alone in the engine."""
    from vllm import SamplingParams

    [output] = engine.generate(
        [{"prompt_token_ids": prompt.token_ids}],
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
