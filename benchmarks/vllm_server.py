"""One vLLM engine in a process of its own, asked over a pipe; for bench_vllm.py.

    python benchmarks/vllm_server.py '{"model": "FOLDER", "transfer": {"kv_connector": ...}}'

Needs nothing but vLLM, so that another connector's interpreter can run it. Reads one JSON object
per line, ``{"prompts": [[ids], ...], "max_tokens": n}``, and answers each with one,
``{"total_s": s, "tokens": [[ids], ...]}``: the time from asking until the last token of all is
here, and what was generated. The first answer, ``{}``, says that it serves. An empty line ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def start(asked: dict[str, Any]) -> Any:
    """The engine, in float32, its own prefix cache off."""
    from vllm import LLM

    return LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_transfer_config=asked["transfer"],
        disable_log_stats=True,
    )


def answer(engine: Any, line: str) -> dict[str, object]:
    """Generate what one line asks for."""
    from vllm import SamplingParams

    request = json.loads(line)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    params = SamplingParams(
        max_tokens=request["max_tokens"], temperature=0, ignore_eos=True, detokenize=False
    )
    begun = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    total_s = time.perf_counter() - begun
    return {"total_s": total_s, "tokens": [list(out.outputs[0].token_ids) for out in outputs]}


def main() -> None:
    """Serve until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print, in whatever process, is no answer
        engine = start(json.loads(sys.argv[1]))
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            if not line.strip():
                break
            print(json.dumps(answer(engine, line)), file=answers, flush=True)
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
