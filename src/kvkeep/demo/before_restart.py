"""The demo's first process: every question cold, the document once with kvkeep, then warm.

Run by :func:`kvkeep.demo.transformers_run.run_transformers`. Before anything is timed, a prompt is
answered, so that code and memory are warm for the cold side too. Closing the cache at the end
writes to the disk what is still queued for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from kvkeep.config import load_settings
from kvkeep.demo.child import Step, serve
from kvkeep.demo.model import build_prompts, disk_settings
from kvkeep.demo.transformers_side import answer, load_model


def num_steps(num_questions: int) -> int:
    """Steps of this process."""
    return 2 * num_questions + 4


def work(job: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Answer cold and warm.

    Args:
        job: ``model``, ``questions`` and ``disk``, the folder of the disk tier.
        step: told each step.

    Returns:
        ``store_s`` and, per question, ``answers`` with the fields of a Comparison.
    """
    from kvkeep.connectors.hf import attach

    step(0, "loading the model")
    tokenizer, model = load_model(job["model"])
    prompts = build_prompts(tokenizer, job["questions"])
    step(1, "warming up the machine")
    answer(model, prompts[0].token_ids, model.device, num_tokens=2)
    cold = []
    for number, prompt in enumerate(prompts):
        step(2 + number, f"cold, question {number + 1}: {prompt.question}")
        cold.append(answer(model, prompt.token_ids, model.device))
    warm = []
    done = 2 + len(prompts)
    settings = load_settings(env=os.environ, extra=disk_settings(job["disk"]))
    with attach(model, settings) as kept:
        step(done, "reading the document once, with kvkeep")
        answer(kept, prompts[0].token_ids, model.device, num_tokens=1)
        stored = kept.last_call
        for number, prompt in enumerate(prompts):
            step(done + 1 + number, f"warm, question {number + 1}: {prompt.question}")
            reply = answer(kept, prompt.token_ids, model.device)
            found = kept.last_call.num_found if kept.last_call else 0
            warm.append(replace(reply, num_found=found))
        step(done + 1 + len(prompts), "ending the process")
    answers = [
        {
            "question": prompt.question,
            "answer": tokenizer.decode(warm_reply.token_ids, skip_special_tokens=True),
            "num_prompt_tokens": len(prompt.token_ids),
            "cold": asdict(cold_reply),
            "warm": asdict(warm_reply),
        }
        for prompt, cold_reply, warm_reply in zip(prompts, cold, warm, strict=True)
    ]
    return {"store_s": stored.store_s if stored else None, "answers": answers}


if __name__ == "__main__":
    sys.exit(serve(work))
