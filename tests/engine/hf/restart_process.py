"""A process that answers prompts with a disk tier, and then ends in order or is killed.

Use: ``python restart_process.py JOB``, JOB being JSON: model, settings, prompts, max_new_tokens,
and end ("close" or "kill"). Prints one line of JSON per prompt: the generated tokens, and how many
were found.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
from transformers import AutoModelForCausalLM

from kvkeep.config import load_settings
from kvkeep.connectors.hf import attach


def main(job: dict) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    with attach(model, load_settings(extra=job["settings"])) as kept:
        for prompt in job["prompts"]:
            ids = torch.tensor([prompt])
            out = kept.generate(ids, do_sample=False, max_new_tokens=job["max_new_tokens"])
            answer = [out[0, len(prompt) :].tolist(), kept.last_call.num_found]
            print(json.dumps(answer), flush=True)
        if job["end"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
