"""One vLLM engine in a process of its own, asked over a pipe; for bench_vllm.py.

    python benchmarks/vllm_server.py '{"kvkeep": {"cpu.size": "2GiB"}}'

Reads one JSON object per line, ``{"prompts": [[ids], ...], "max_tokens": n}``, and answers each
with one, ``{"first_s": [...], "total_s": s}``: the time from asking to each request's first token,
and to the last token of all. An empty line ends it.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Serve until the input ends."""
    asked = json.loads(sys.argv[1])
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    from vllm import LLM, SamplingParams

    from kvkeep.demo.model import prepare_model

    transfer = None
    if asked.get("kvkeep") is not None:
        transfer = {
            "kv_connector": "KVKeepConnector",
            "kv_connector_module_path": "kvkeep.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": asked["kvkeep"],
        }
    elif asked.get("transfer") is not None:
        transfer = asked["transfer"]
    engine = LLM(
        str(prepare_model()),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=bool(asked.get("prefix_caching")),
        max_model_len=8192,
        max_num_batched_tokens=8192,
        kv_transfer_config=transfer,
        disable_log_stats=False,
    )

    def answer(line: str) -> dict[str, object]:
        request = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=0, ignore_eos=True)
        begun = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        total_s = time.perf_counter() - begun
        first_s = [
            out.metrics.first_token_latency if out.metrics is not None else total_s
            for out in outputs
        ]
        return {"first_s": first_s, "total_s": total_s}

    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        print(json.dumps(answer(line)), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
