"""The demo through transformers: one process that answers cold and warm, and one after it.

This process only starts the other two and puts side by side what they found. The first has ended
before the second starts; all that they have in common is the folder of the disk tier.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvkeep.demo import after_restart, before_restart
from kvkeep.demo.child import run_child
from kvkeep.demo.model import leave_page_cache
from kvkeep.demo.outcome import Comparison, DemoResult, Progress, Reply


def run_transformers(
    model_name: str, questions: Sequence[str], progress: Progress, disk: Path
) -> DemoResult:
    """Ask all questions cold, with the document in memory, and in a new process from the disk.

    Args:
        model_name: a folder or the name of a model.
        questions: what to ask about the document.
        progress: told before each step.
        disk: folder of the disk tier.

    Raises:
        KVKeepError: the demo cannot run: transformers is not installed, there is no such model, or
            its cache is of a kind that kvkeep does not keep.
    """
    first_steps = before_restart.num_steps(len(questions))
    steps = first_steps + after_restart.num_steps(len(questions))
    job = {"model": model_name, "questions": list(questions), "disk": str(disk)}
    first = run_child(
        "kvkeep.demo.before_restart", job, lambda step, doing: progress(step, steps, doing)
    )
    leave_page_cache(disk)
    started, start_s = time.perf_counter(), 0.0

    def on_step(step: int, doing: str) -> None:
        nonlocal start_s
        if step == after_restart.FIRST_QUESTION:
            start_s = time.perf_counter() - started
        progress(first_steps + step, steps, doing)

    second = run_child("kvkeep.demo.after_restart", job, on_step)
    progress(steps, steps, "done")
    comparisons = [
        Comparison(
            question=item["question"],
            answer=item["answer"],
            num_prompt_tokens=item["num_prompt_tokens"],
            cold=Reply(**item["cold"]),
            warm=Reply(**item["warm"]),
            restarted=Reply(**reply),
        )
        for item, reply in zip(first["answers"], second["replies"], strict=True)
    ]
    return DemoResult("transformers", model_name, comparisons, first["store_s"], start_s)
