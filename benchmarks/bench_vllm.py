"""Spec 14.7: through vLLM, with a real model in float32, the engine's own prefix cache off.

Every engine is a process of its own, all bound to the same cores. What is compared is asked in
turn: the engine without kvkeep and the one with it, prompt by prompt, so that what the machine does
besides falls on both.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from kvkeep.bench.measure import Row

SERVER = Path(__file__).with_name("vllm_server.py")
#: Prompts of the warm rows; the last one is the longest of whole blocks that the model takes.
LENGTHS = (1024, 2048, 4096, 8064)
#: Prompt lengths after a restart, from disk and from Redis.
RESTART_LENGTHS = (1024, 4096)
#: How much longer a request may take that never hits.
OVERHEAD = 1.03
#: LMCache 0.5.6 with its separate server and shared memory, this model, 4,096 tokens, two cores of
#: an AMD EPYC: seconds to the first token, cold and warm.
REFERENCE_COLD_S, REFERENCE_WARM_S = 4.2, 0.075


class Engine:
    """A running engine, asked from one thread."""

    def __init__(self, config: dict[str, object]) -> None:
        """Start it and wait until it serves.

        Args:
            config: ``kvkeep``: the connector's extra config, or None.
        """
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), json.dumps(config)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the engine gave no answer:\n{self._log.read()[-2000:]}")
        return dict(json.loads(line))

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        """Generate; see ``vllm_server.py``."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"prompts": list(prompts), "max_tokens": max_tokens}) + "\n"
        )
        self._process.stdin.flush()
        return self._read()

    def first_ms(self, prompt: list[int]) -> float:
        """Milliseconds to the first token of one prompt, the answer's way back included."""
        return float(self.ask([prompt])["total_s"]) * 1e3

    def close(self) -> None:
        """Let it end, and what it writes reach its tiers."""
        assert self._process.stdin is not None
        with self._process.stdin:
            self._process.stdin.write("\n")
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Prompts:
    """Prompts that nobody has seen."""

    def __init__(self, seed: int) -> None:
        """The same ones for the same seed."""
        self._random = random.Random(seed)

    def new(self, length: int) -> list[int]:
        """One more."""
        return [self._random.randrange(3, 49_000) for _ in range(length)]


def _row(what: str, ours: list[float], limit: list[float], target: float | None) -> Row:
    ratio = statistics.median(a / b for a, b in zip(ours, limit, strict=True))
    return Row(what, statistics.median(ours), statistics.median(limit), "ms", ratio, target)


def memory_rows(repeats: int) -> list[Row]:
    """Warm from memory against cold, and the overhead on requests that never hit."""
    rows = []
    prompts = Prompts(11)
    with (
        closing(Engine({"kvkeep": None})) as plain,
        closing(Engine({"kvkeep": {"cpu.size": "3GiB", "cpu.prefault": "3GiB"}})) as kept,
    ):
        for engine in (plain, kept):
            engine.ask([prompts.new(300)])
        for length in LENGTHS:
            turns = repeats if length <= 4096 else 2
            cold, warm, without = [], [], []
            for _ in range(turns):
                prompt = prompts.new(length)
                without.append(plain.first_ms(prompt) if length <= 4096 else 0.0)
                cold.append(kept.first_ms(prompt))
                warm.append(kept.first_ms(prompt))
            for _ in range(repeats - turns):
                warm.append(kept.first_ms(prompt))
            cold += [statistics.median(cold)] * (repeats - turns)
            what = f"vLLM, first token of {length:,}: from memory / cold"
            rows.append(_row(what, warm, cold, None))
            if length <= 4096:
                what = f"vLLM, first token of {length:,}, no hit: with / without"
                rows.append(_row(what, cold, without, OVERHEAD))
            if length == 4096:
                rows.append(_reference_row(warm, cold))
        rows += _mixed_rows(plain, kept, prompts, min(repeats, 3))
    return rows


def _reference_row(warm: list[float], cold: list[float]) -> Row:
    """Warm as a share of cold, beside the share that the reference reached."""
    ours = statistics.median(w / c for w, c in zip(warm, cold, strict=True))
    share = REFERENCE_WARM_S / REFERENCE_COLD_S
    limit = share * statistics.median(cold)
    what = "vLLM, 4,096 from memory / LMCache's share of cold"
    return Row(what, statistics.median(warm), limit, "ms", ours / share, 1.0)


def _mixed_rows(plain: Engine, kept: Engine, prompts: Prompts, repeats: int) -> list[Row]:
    """16 requests at once, 128 to 1,088 tokens, 16 new each: all new, then half of them known."""
    new_with, new_without, known_with, known_without = [], [], [], []
    for _ in range(repeats):
        batch = [prompts.new(128 + 64 * number) for number in range(16)]
        new_without.append(plain.ask(batch, 16)["total_s"] * 1e3)
        new_with.append(kept.ask(batch, 16)["total_s"] * 1e3)
        half = batch[::2] + [prompts.new(128 + 64 * number) for number in range(1, 16, 2)]
        known_without.append(plain.ask(half, 16)["total_s"] * 1e3)
        known_with.append(kept.ask(half, 16)["total_s"] * 1e3)
    return [
        _row("vLLM, 16 mixed requests, all new: with / without", new_with, new_without, OVERHEAD),
        _row("vLLM, 16 mixed requests, half known", known_with, known_without, 1.0),
    ]


@contextmanager
def _redis() -> Iterator[str | None]:
    """The URL of a Redis server, or None where there is none to start."""
    from kvkeep.testing.servers.process import ServerError
    from kvkeep.testing.servers.redis import redis_server

    with ExitStack() as stack:
        try:
            server = stack.enter_context(redis_server())
        except ServerError:
            yield None
            return
        yield server.url


def restart_rows(repeats: int) -> list[Row]:
    """The first request for a prompt after a restart: from disk, and from Redis."""
    prompts = Prompts(12)
    folder = Path(tempfile.mkdtemp(prefix="kvkeep-bench-"))
    memory = {"cpu.size": "2GiB", "cpu.prefault": "2GiB"}
    disk = {"disk.path": str(folder), "disk.size": "20GiB"}
    rows: list[Row] = []
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        url = stack.enter_context(_redis())
        remote: dict[str, str] = {"remote.url": url} if url else {}
        asked = {
            length: [prompts.new(length) for _ in range(repeats)] for length in RESTART_LENGTHS
        }
        cold: dict[int, list[float]] = {}
        with closing(Engine({"kvkeep": {**memory, **disk, **remote}})) as engine:
            engine.ask([prompts.new(300)])
            for length, some in asked.items():
                cold[length] = [engine.first_ms(prompt) for prompt in some]
        for name, tier in (("disk", disk), ("Redis", remote)):
            if not tier:
                continue
            with closing(Engine({"kvkeep": {**memory, **tier}})) as engine:
                engine.ask([prompts.new(300)])
                for length, some in asked.items():
                    warm = [engine.first_ms(prompt) for prompt in some]
                    what = f"vLLM, first token of {length:,}: from {name} after a restart / cold"
                    rows.append(_row(what, warm, cold[length], None))
    return rows


def run(repeats: int) -> list[Row]:
    """All rows."""
    return [*memory_rows(repeats), *restart_rows(repeats)]
