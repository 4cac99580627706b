"""The demo's second process: the same questions, answered from what the first left on the disk.

Run by :func:`kvkeep.demo.transformers_run.run_transformers`. Before each question the CPU tier is
emptied, so that each answer comes from the disk. A few tokens are computed before the first one,
so that starting up is not taken for reading.
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

#: Step of the first question; whatever comes before it is the start of the process.
FIRST_QUESTION = 2
#: Tokens of a prompt that the model computes while starting up.
WARM_UP_TOKENS = 64
#: What lookups found on the disk.
DISK_HITS = 'kvkeep_lookup_hit_tokens_total{tier="LocalDiskBackend"}'
#: Name of the tier that is emptied.
MEMORY_TIER = "LocalCPUBackend"


def num_steps(num_questions: int) -> int:
    """Steps of this process."""
    return FIRST_QUESTION + num_questions


def work(job: Mapping[str, Any], step: Step) -> dict[str, Any]:
    """Answer from the disk.

    Args:
        job: that of the first process.
        step: told each step.

    Returns:
        ``replies``, one per question.
    """
    from kvkeep.connectors.hf import attach

    step(0, "a new process: loading the model")
    tokenizer, model = load_model(job["model"])
    prompts = build_prompts(tokenizer, job["questions"])
    settings = load_settings(env=os.environ, extra=disk_settings(job["disk"]))
    with attach(model, settings) as kept:
        step(1, "a new process: warming up")
        answer(model, prompts[0].token_ids[:WARM_UP_TOKENS], model.device, num_tokens=2)
        replies = []
        for number, prompt in enumerate(prompts):
            step(FIRST_QUESTION + number, f"from disk, question {number + 1}: {prompt.question}")
            kept.engine.clear([MEMORY_TIER])
            before = kept.stats().get(DISK_HITS, 0)
            reply = answer(kept, prompt.token_ids, model.device)
            found = int(kept.stats().get(DISK_HITS, 0) - before)
            replies.append(asdict(replace(reply, num_found=found)))
    return {"replies": replies}


if __name__ == "__main__":
    sys.exit(serve(work))
