"""Spec 14.7: through vLLM, with a real model in float32, the engine's own prefix cache off.

In this order: what kvkeep costs requests that never hit, and gives a load of mixed ones (an engine
with it and one without, asked in turn); the time to the first token, cold and from memory, with
LMCache beside it if its interpreter is given; the same first after a restart, from disk and from
Redis, of both. Prompts are random tokens; that a warm answer is the cold one is checked each time.
"""

from __future__ import annotations

import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from vllm_engines import (
    Engine,
    EngineError,
    Engines,
    LMCacheServer,
    kvkeep_transfer,
    lmcache_server,
    settle,
)

from kvkeep.bench.measure import Row
from kvkeep.demo.model import prepare_model

#: Prompts of each length that are computed cold, where 7 repeats are asked for: on two cores one
#: of 8k takes 25 s. The longest one is of as many whole chunks as the model takes with an answer.
NUM_COLD = {1024: 7, 2048: 7, 4096: 4, 7936: 2}
#: Pairs with and without kvkeep, by length of the prompt.
NUM_PAIRS = {256: 28, 1024: 10}
#: Rounds of the mixed requests, their number and the tokens that each generates.
MIXED_ROUNDS, NUM_MIXED, MIXED_TOKENS = 3, 16, 16
#: How much longer a request may take that never hits.
OVERHEAD = 1.03
#: LMCache 0.5.6 with its separate server and shared memory, this model, 4,096 tokens, two cores of
#: an AMD EPYC: seconds to the first token, cold and warm. Where it is not measured beside us.
REFERENCE_COLD_S, REFERENCE_WARM_S = 4.2, 0.075
#: Memory of the caches, in GiB.
POOL_GIB = 2
#: Threads of the plain client of Redis, as many as kvkeep has, and tokens of a value.
PLAIN_THREADS, CHUNK_TOKENS = 4, 256
#: A request after a restart of LMCache that takes more of its cold time has found nothing.
RECOMPUTED = 0.5

Prompt = list[int]
#: What each engine is asked first.
WARM_UP: Prompt = list(range(10, 310))


class WrongTokenError(AssertionError):
    """A warm answer is not the cold one."""


@dataclass
class Timing:
    """One prompt's milliseconds to the first token, by name of the measurement."""

    prompt: Prompt
    token: int | None = None
    ms: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, name: str, engines: Engines, engine: Engine) -> None:
        """Measure once more.

        Raises:
            WrongTokenError: the token is another one than before.
        """
        answer = engines.ask(engine, [self.prompt])
        token = answer.tokens[0][0]
        if self.token is not None and token != self.token:
            length = len(self.prompt)
            raise WrongTokenError(f"{engine.name}: {token} after {length} tokens, not {self.token}")
        self.token = token
        self.ms.setdefault(name, []).append(answer.total_ms)

    def median(self, name: str) -> float:
        """Of what was measured under a name."""
        return statistics.median(self.ms[name])


@dataclass
class Peer:
    """LMCache's engine, for as long as it answers as it should, and its server's process."""

    engine: Engine | None
    server_pid: int = 0

    def ask(self, report: Report, timing: Timing, name: str, engines: Engines) -> None:
        """Measure once more, if it is there."""
        if self.engine is None:
            return
        try:
            timing.ask(name, engines, self.engine)
        except (EngineError, WrongTokenError) as error:
            report.say(f"[red]LMCache is left out from here on: {error}[/red]")
            self.engine = None


class Report:
    """Says what is going on, and keeps rows as they come."""

    def __init__(self, keep: Callable[[Sequence[Row]], object]) -> None:
        """No rows yet; ``keep`` gets all of them after each new one."""
        self.rows: list[Row] = []
        self._keep = keep
        self._begun = time.monotonic()
        self._console = Console(stderr=True)

    def say(self, text: str) -> None:
        """A line of progress."""
        self._console.print(f"{time.monotonic() - self._begun:5.0f} s  {text}", highlight=False)

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        self._keep(self.rows)
        self.say(f"[bold]{row.label}: {row.kvkeep:,.1f} {row.unit}, ratio {row.ratio:.3f}[/bold]")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose rows are left out if an engine fails."""
        self.say(name)
        try:
            yield
        except EngineError as error:
            self.say(f"[red]{name}: the rest is left out: {error}[/red]")


def engine_of(name: str, settings: dict[str, object] | None) -> Engine:
    """An engine with kvkeep, or without any connector; warmed up, its pool committed."""
    pool = {"cpu.size": f"{POOL_GIB}GiB", "cpu.prefault": f"{POOL_GIB}GiB"}
    transfer = kvkeep_transfer({**pool, **settings}) if settings is not None else None
    engine = Engine(name, transfer, model=prepare_model())
    try:
        engine.ask([WARM_UP])
        engine.settle()
    except BaseException:
        engine.close()
        raise
    return engine


def prompts_of(seed: int, length: int, count: int) -> list[Prompt]:
    """Random tokens; the same for the same seed and length."""
    numbers = random.Random(f"{seed} {length}")
    return [[numbers.randrange(3, 49_000) for _ in range(length)] for _ in range(count)]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the median of as many pairs lies nine times in ten, by resampling them."""
    numbers = random.Random(0)
    medians = sorted(statistics.median(numbers.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[50], medians[949]


def paired_row(
    what: str, pairs: Sequence[tuple[float, float]], target: float | None, unit: str = "ms"
) -> Row:
    """A row of (kvkeep, limit)."""
    ours, limit = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    return Row(what, ours, limit, unit, statistics.median(ratios), target, interval(ratios))


def never_hit(report: Report, engines: Engines, plain: Engine, kept: Engine, share: float) -> None:
    """Requests that find nothing, with and without kvkeep, in alternating order."""
    for length, full in NUM_PAIRS.items():
        count = max(2, round(full * share))
        report.say(f"{count} pairs of {length:,} tokens that nobody has seen")
        pairs = []
        for turn, prompt in enumerate(prompts_of(1, length, count)):
            timing = Timing(prompt)
            for engine in (plain, kept) if turn % 2 else (kept, plain):
                timing.ask(engine.name, engines, engine)
            pairs.append((timing.median(kept.name), timing.median(plain.name)))
        what = f"vLLM, {length:,} tokens, no hit: with / without kvkeep"
        report.add(paired_row(what, pairs, OVERHEAD))


def mixed(report: Report, engines: Engines, plain: Engine, kept: Engine, share: float) -> None:
    """16 requests at once of 64 to 544 tokens, 16 new ones each; and the same ones again."""
    rounds = max(1, round(MIXED_ROUNDS * share))
    lengths = [64 + 32 * number for number in range(NUM_MIXED)]
    num_tokens = sum(lengths) + NUM_MIXED * MIXED_TOKENS
    rates: dict[str, list[tuple[float, float]]] = {"first": [], "second": []}
    for turn in range(rounds):
        report.say(f"{NUM_MIXED} mixed requests, round {turn + 1} of {rounds}")
        batch = [prompts_of(20 + turn, length, 1)[0] for length in lengths]
        for found in rates.values():
            with_s, without_s = (
                engines.ask(engine, batch, MIXED_TOKENS).total_ms / 1e3 for engine in (kept, plain)
            )
            found.append((num_tokens / with_s, num_tokens / without_s))
    for time_name, target in (("first", 1 / OVERHEAD), ("second", 1.0)):
        what = f"vLLM, {NUM_MIXED} mixed requests, {time_name} time: with / without"
        report.add(paired_row(what, rates[time_name], target, "tokens/s"))


def from_memory(
    report: Report, kept: Engine, peer: Peer, share: float, repeats: int
) -> dict[int, list[Timing]]:
    """Cold, and from memory; returns the timings by length, for what comes after a restart."""
    both = [engine for engine in (kept, peer.engine) if engine is not None]
    engines = Engines(*both)
    timings: dict[int, list[Timing]] = {}
    for length, full in NUM_COLD.items():
        count = max(1, round(full * share))
        report.say(f"{count} prompts of {length:,} tokens, cold and warm")
        some = [Timing(prompt) for prompt in prompts_of(2, length, count)]
        for timing in some:
            peer.ask(report, timing, "peer cold", engines)
        if peer.engine is not None:
            settle(peer.server_pid)  # it writes to its tiers
        for timing in some:  # not in turn: who is stopped writes to Redis too late
            timing.ask("cold", engines, kept)
        for engine in both:  # what is written behind arrives in the other tiers
            engine.signal(signal.SIGCONT)
        kept.settle()
        for _ in range(-(-repeats // count)):
            for timing in some:
                peer.ask(report, timing, "peer", engines)
                timing.ask("memory", engines, kept)
        pairs = [(timing.median("memory"), timing.median("cold")) for timing in some]
        what = f"vLLM, first token of {length:,}: from memory / cold"
        report.add(paired_row(what, pairs, None))
        pairs = [(t.median("cold"), t.median("peer cold")) for t in some if "peer cold" in t.ms]
        if pairs:
            report.add(paired_row(f"vLLM, {length:,}, cold: kvkeep / LMCache", pairs, None))
        against_reference(report, length, some, "memory")
        timings[length] = some
    return timings


def against_reference(report: Report, length: int, some: Sequence[Timing], name: str) -> None:
    """A row beside LMCache's warm time: as measured, or else as its share of cold was elsewhere."""
    what = f"vLLM, {length:,}, from {name} / LMCache from memory"
    if all("peer" in timing.ms for timing in some):
        pairs = [
            pair
            for timing in some
            for pair in (
                zip(timing.ms[name], timing.ms["peer"], strict=False)  # asked in turn
                if name == "memory"
                else [(timing.median(name), timing.median("peer"))]
            )
        ]
        report.add(paired_row(what, pairs, 1.0))
    elif length == 4096:
        quoted = REFERENCE_WARM_S / REFERENCE_COLD_S
        pairs = [(timing.median(name), quoted * timing.median("cold")) for timing in some]
        report.add(paired_row(f"{what}, as quoted", pairs, 1.0))


def into_page_cache(tier: dict[str, object]) -> None:
    """Read the files of a disk, of which the system may have dropped some meanwhile."""
    folder = tier.get("disk.path", tier.get("base_path"))
    if folder is not None:
        for path in Path(str(folder)).rglob("*"):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(16 << 20):
                        pass


def after_restart(
    report: Report, name: str, tier: dict[str, object], timings: dict[int, list[Timing]]
) -> None:
    """The first request for each prompt of a new process, from one slow tier."""
    with report.part(f"a new process, with {name}"), closing(engine_of(name, tier)) as engine:
        engines = Engines(engine)
        into_page_cache(tier)
        for length, some in timings.items():
            for timing in some:
                timing.ask(name, engines, engine)
            pairs = [(timing.median(name), timing.median("cold")) for timing in some]
            what = f"vLLM, first token of {length:,}: from {name} after a restart / cold"
            report.add(paired_row(what, pairs, None))
            against_reference(report, length, some, name)


@contextmanager
def peer_engine(
    python: str, tiers: Sequence[dict[str, object]]
) -> Iterator[tuple[Engine, LMCacheServer]]:
    """LMCache's server and an engine that uses it, warmed up."""
    with (
        lmcache_server(python, 2 * POOL_GIB, tiers) as server,
        closing(Engine("LMCache", server.transfer, model=prepare_model(), python=python)) as engine,
    ):
        engine.ask([WARM_UP])
        engine.settle()
        yield engine, server


def peer_after_restart(
    report: Report,
    name: str,
    python: str,
    tier: dict[str, object],
    timings: dict[int, list[Timing]],
) -> None:
    """The same for LMCache, whose server is a new process, too; rows beside kvkeep's."""
    key = f"peer {name}"
    with (
        report.part(f"new processes of LMCache, with {name}"),
        peer_engine(python, [tier]) as (engine, _),
    ):
        peer = Peer(engine)
        into_page_cache(tier)
        for length, some in timings.items():
            if not all(name in timing.ms and "peer cold" in timing.ms for timing in some):
                continue
            for timing in some:
                peer.ask(report, timing, key, Engines(engine))
            if not all(key in timing.ms for timing in some):
                return
            hits = [t.median(key) < RECOMPUTED * t.median("peer cold") for t in some]
            end = "" if all(hits) else f" (recomputed {hits.count(False)} of {len(hits)})"
            what = f"vLLM, {length:,}, from {name} / LMCache from {name}, after a restart{end}"
            pairs = [(timing.median(name), timing.median(key)) for timing in some]
            report.add(paired_row(what, pairs, 1.0))


def plain_redis(report: Report, url: str, timings: dict[int, list[Timing]]) -> None:
    """From Redis beside what as many bytes take a plain client, and the request from memory."""
    import redis

    client = redis.Redis.from_url(url)
    names = list(client.scan_iter(match="kvkeep-v1/*", count=1000))
    with closing(client), ThreadPoolExecutor(PLAIN_THREADS) as threads:
        for length, some in timings.items():
            chosen = names[: length // CHUNK_TOKENS]
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                list(threads.map(client.get, chosen))
                times.append((time.perf_counter() - begun) * 1e3)
            plain_ms = statistics.median(times)
            pairs = [(t.median("Redis"), plain_ms + t.median("memory")) for t in some]
            what = f"vLLM, {length:,}, from Redis / a plain client's get + from memory"
            report.add(paired_row(what, pairs, None))


@contextmanager
def redis_tier(report: Report) -> Iterator[dict[str, object]]:
    """Settings of a Redis server that runs; none where there is none to start."""
    from support.servers.process import ServerError
    from support.servers.redis import redis_server

    with ExitStack() as stack:
        tier: dict[str, object] = {}
        try:
            tier["remote.url"] = stack.enter_context(redis_server()).url
        except ServerError as error:
            report.say(f"Redis is left out: {error}")
        yield tier


def first_part(report: Report, share: float) -> None:
    """With and without kvkeep."""
    with (
        report.part("two engines, without kvkeep and with it"),
        closing(engine_of("vLLM alone", None)) as plain,
    ):
        plain.signal(signal.SIGSTOP)
        with closing(engine_of("vLLM with kvkeep", {})) as kept:
            engines = Engines(plain, kept)
            never_hit(report, engines, plain, kept, share)
            mixed(report, engines, plain, kept, share)
            for engine in (plain, kept):
                engine.end()  # both at once


def second_part(report: Report, share: float, repeats: int, lmcache_python: str) -> None:
    """Cold and warm, from each tier."""
    with ExitStack() as stack:
        both_folders = Path(tempfile.mkdtemp(prefix="kvkeep-bench-"))
        stack.callback(shutil.rmtree, both_folders, ignore_errors=True)
        folder, peer_folder = both_folders / "kvkeep", both_folders / "lmcache"
        folder.mkdir()
        peer_folder.mkdir()
        disk: dict[str, object] = {"disk.path": str(folder), "disk.size": "20GiB"}
        redis = stack.enter_context(redis_tier(report))
        peer_tiers: dict[str, dict[str, object]] = {
            "disk": {"type": "fs_native", "base_path": str(peer_folder)}
        }
        if redis:
            address = urlsplit(str(redis["remote.url"]))
            peer_tiers["Redis"] = {
                "type": "resp",
                "host": address.hostname,
                "port": address.port,
            }
        timings: dict[int, list[Timing]] = {}
        with ExitStack() as running, report.part("an engine with memory, disk and Redis"):
            peer = Peer(None)
            if lmcache_python:
                with report.part("an engine with LMCache"):
                    both = peer_engine(lmcache_python, list(peer_tiers.values()))
                    engine, server = running.enter_context(both)
                    engine.signal(signal.SIGSTOP)
                    peer.engine, peer.server_pid = engine, server.pid
            kept = running.enter_context(closing(engine_of("kvkeep", {**disk, **redis})))
            timings = from_memory(report, kept, peer, share, repeats)
        if timings:
            after_restart(report, "disk", disk, timings)
        if timings and redis:
            after_restart(report, "Redis", redis, timings)
            with report.part("a plain client of Redis"):
                plain_redis(report, str(redis["remote.url"]), timings)
        if lmcache_python:
            for name, tier in peer_tiers.items():
                peer_after_restart(report, name, lmcache_python, tier, timings)


def run(
    repeats: int, keep: Callable[[Sequence[Row]], object], lmcache_python: str = ""
) -> list[Row]:
    """All rows.

    Args:
        repeats: of each warm figure; what takes long has fewer, or more if this is more than 7.
        keep: called with all rows so far whenever there is a new one.
        lmcache_python: interpreter that has vLLM and LMCache, to be measured beside kvkeep.

    Raises:
        WrongTokenError: a warm answer is not the cold one.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped engine stays
    report = Report(keep)
    first_part(report, repeats / 7)
    second_part(report, repeats / 7, repeats, lmcache_python)
    return report.rows
