"""Every metric moves by what its page says, driven by a real engine over real tiers.

Each function is the proof of the metrics that it names. One that nobody proves fails the last test.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.server import LookupServer
from kvkeep.metrics import Metrics
from kvkeep.metrics.catalogue import CATALOGUE, Kind
from kvkeep.storage.cost import TOO_SLOW, CostOptions
from support.disk import FaultyIO, chunk_files, make_disk
from support.engine_rig import EngineRig

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
TOKENS = list(range(40))  # five chunks
LONG_S = 30.0

PROOFS: dict[str, Callable[..., None]] = {}


def proves(*names: str):
    """The test is the proof of these metrics."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            assert name in CATALOGUE, name
            PROOFS[name] = test
        return test

    return note


class Moves:
    """What has moved since it was made or last asked, by series, for some metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._before = metrics.snapshot()

    def of(self, *names: str) -> dict[str, float]:
        now = self._metrics.snapshot()
        moved = {
            name: value - self._before.get(name, 0.0)
            for name, value in now.items()
            if value != self._before.get(name, 0.0) and name.startswith(names or ("kvkeep_",))
        }
        self._before = now
        return {name.removeprefix("kvkeep_"): value for name, value in moved.items()}


@contextmanager
def open_rig(path: Path | None = None, *, io: FaultyIO | None = None, **options) -> Iterator:
    """A rig, with a disk tier if a path is given, and what moves in it."""
    disk = options.pop("disk", {})
    tiers = []
    if path is not None:
        tiers = [lambda pool: make_disk(pool, path, metrics=pool._metrics, io=io, **disk)]
    with EngineRig(tiers=tiers, **options) as rig:
        yield rig, Moves(rig.metrics)


def flush(rig: EngineRig) -> None:
    assert rig.storage.storage_backends[DISK].flush(LONG_S)


def retrieve(rig: EngineRig, tokens=TOKENS, **more):
    pages = range(rig.model.num_pages_for(len(tokens)))
    slots = rig.model.slots(pages, len(tokens))
    return rig.engine.retrieve(tokens, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@proves("kvkeep_lookup_tokens", "kvkeep_lookup_hit_tokens", "kvkeep_lookup_seconds")
def test_lookups(tmp_path):
    with open_rig(tmp_path) as (rig, moves):
        rig.fill(TOKENS[:24])
        flush(rig)
        assert moves.of("kvkeep_lookup") == {}
        rig.engine.lookup(TOKENS)
        moved = moves.of("kvkeep_lookup")
        assert moved.pop("lookup_seconds_sum") > 0
        hits = f'lookup_hit_tokens_total{{tier="{CPU}"}}'
        assert moved == {"lookup_tokens_total": 40, hits: 24, "lookup_seconds_count": 1}
        rig.engine.clear([CPU])
        rig.engine.lookup(TOKENS[:16])
        rig.engine.lookup([99] * 8)
        moved = moves.of("kvkeep_lookup")
        assert moved.pop("lookup_seconds_sum") > 0
        hits = f'lookup_hit_tokens_total{{tier="{DISK}"}}'
        assert moved == {"lookup_tokens_total": 24, hits: 16, "lookup_seconds_count": 2}


@proves("kvkeep_lookup_failed_tokens")
def test_lookups_that_are_given_up(tmp_path):
    path = tmp_path / "sockets" / "lookup.sock"
    client = LookupClient([path], timeout_s=1.0)
    with open_rig() as (rig, moves):
        rig.fill(TOKENS)
        assert client.lookup("a", TOKENS[:16]) == 0  # nobody is there
        identity = rig.engine.token_database.identity
        server = LookupServer(rig.engine, path, identity=identity, metrics=rig.metrics)
        wait_for(lambda: client.lookup("b", TOKENS[:8], pin=False) == 8)
        client.unpin(["a"])
        client.check()
        moved = moves.of("kvkeep_lookup_failed", "kvkeep_lookup_tokens", "kvkeep_lookup_hit")
        late = moved['lookup_failed_tokens_total{cause="timeout"}']
        down = moved.get('lookup_failed_tokens_total{cause="down"}', 0)
        assert late >= 16
        assert moved["lookup_tokens_total"] == late + down + 8
        assert moved[f'lookup_hit_tokens_total{{tier="{CPU}"}}'] == 8
        client.close()
        server.close()


@proves("kvkeep_stored_tokens", "kvkeep_transfer_bytes", "kvkeep_transfer_seconds")
def test_stores(tmp_path):
    with open_rig(tmp_path) as (rig, moves):
        rig.fill(TOKENS[:28])  # three chunks and a tail
        flush(rig)
        num_bytes = 3 * rig.model.layout.chunk_bytes(8)
        moved = moves.of("kvkeep_stored", "kvkeep_transfer")
        for tier, count in ((CPU, 1), (DISK, 3)):  # one store of a request, one write per chunk
            labels = f'{{tier="{tier}",direction="store"}}'
            assert moved.pop(f"transfer_seconds_sum{labels}") > 0
            assert moved.pop(f"transfer_bytes_sum{labels}") == num_bytes
            assert moved.pop(f"transfer_bytes_count{labels}") == count
            assert moved.pop(f"transfer_seconds_count{labels}") == count
        assert moved == {"stored_tokens_total": 24}
        rig.fill(TOKENS[:28])  # is stored already
        assert moves.of("kvkeep_stored", "kvkeep_transfer") == {}


@proves("kvkeep_loaded_tokens")
def test_loads(tmp_path):
    with open_rig(tmp_path) as (rig, moves):
        rig.fill(TOKENS[:24])
        flush(rig)
        moves.of()
        num_bytes = 3 * rig.model.layout.chunk_bytes(8)
        for tier in (CPU, DISK):
            retrieve(rig)
            moved = moves.of("kvkeep_loaded", "kvkeep_transfer_bytes")
            assert moved.pop(f'loaded_tokens_total{{tier="{tier}"}}') == 24
            assert moved.pop(f'transfer_bytes_sum{{tier="{CPU}",direction="load"}}') == num_bytes
            assert moved.pop(f'transfer_bytes_count{{tier="{CPU}",direction="load"}}') == 1
            if tier == DISK:
                labels = f'{{tier="{DISK}",direction="load"}}'
                assert moved.pop(f"transfer_bytes_sum{labels}") == num_bytes
                assert moved.pop(f"transfer_bytes_count{labels}") == 3
            assert moved == {}
            rig.engine.clear([CPU])


@proves("kvkeep_load_failed_tokens")
def test_loads_that_fall_short(monkeypatch):
    with open_rig() as (rig, moves):
        rig.fill(TOKENS[:24])
        moves.of()

        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(rig.connector, "batched_to_gpu", fail)
        monkeypatch.setattr(rig.connector, "to_gpu", fail)
        retrieve(rig)
        assert moves.of() == {
            'load_failed_tokens_total{cause="copy"}': 24,
            'failures_total{tier="engine",operation="load",cause="RuntimeError"}': 1,
        }


@proves("kvkeep_store_skipped_tokens")
def test_stores_that_leave_something_out():
    with open_rig(pool_chunks=2) as (rig, moves):
        rig.fill(TOKENS)
        assert moves.of("kvkeep_store") == {
            "stored_tokens_total": 16,
            'store_skipped_tokens_total{cause="no_room"}': 24,
        }
        rig.engine.freeze(True)
        rig.fill([7] * 16)
        assert moves.of("kvkeep_store") == {'store_skipped_tokens_total{cause="frozen"}': 16}


@proves("kvkeep_dropped_chunks")
def test_chunks_that_a_tier_sheds(tmp_path):
    with open_rig(tmp_path, disk={"size_bytes": 4096}) as (rig, moves):
        rig.fill(TOKENS[:24])  # none of them fits on the disk, all are in memory
        assert moves.of("kvkeep_dropped", "kvkeep_stored") == {
            f'dropped_chunks_total{{tier="{DISK}",cause="no_room"}}': 3,
            "stored_tokens_total": 24,
        }


@proves("kvkeep_evictions")
def test_evictions():
    with open_rig(pool_chunks=3) as (rig, moves):
        rig.fill(TOKENS[:24])
        assert moves.of("kvkeep_evictions") == {}
        rig.fill([7] * 16)
        assert moves.of("kvkeep_evictions") == {f'evictions_total{{tier="{CPU}"}}': 2}


@proves("kvkeep_failures", "kvkeep_integrity_failures")
def test_failures_and_those_of_integrity(tmp_path):
    io = FaultyIO()
    with open_rig(tmp_path, io=io) as (rig, moves):
        rig.fill(TOKENS[:24])
        flush(rig)
        rig.engine.clear([CPU])
        damaged = chunk_files(tmp_path)[0]
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        moves.of()
        retrieve(rig)
        cause = "payload_checksum"
        assert moves.of("kvkeep_failures", "kvkeep_integrity") == {
            f'failures_total{{tier="{DISK}",operation="get",cause="{cause}"}}': 1,
            f'integrity_failures_total{{tier="{DISK}",cause="{cause}"}}': 1,
        }
        rig.engine.clear([CPU])
        io.before = raise_on("open_read", errno.EIO)
        retrieve(rig, TOKENS[:8])
        io.before = lambda operation: None
        moved = moves.of("kvkeep_failures", "kvkeep_integrity")
        assert moved and all('cause="io_error"' in name for name in moved)


def raise_on(operation: str, number: int) -> Callable[[str], None]:
    def before(called: str) -> None:
        if called == operation:
            raise OSError(number, "on purpose")

    return before


@proves("kvkeep_leases_open", "kvkeep_leases_expired")
def test_leases():
    with open_rig() as (rig, moves):
        rig.fill(TOKENS[:24])
        moves.of()
        rig.engine.lookup(TOKENS, lookup_id="a", pin=True)
        assert moves.of("kvkeep_leases") == {"leases_open": 1}
        assert rig.engine.lookup_unpin("a")
        assert moves.of("kvkeep_leases") == {"leases_open": -1}
        rig.engine.lookup(TOKENS, lookup_id="b", pin=True)
        rig.expire_leases()
        retrieve(rig, req_id="b")  # finds its lease expired, and asks again by key
        assert moves.of("kvkeep_leases") == {"leases_expired_total": 1}


@proves("kvkeep_pool_bytes", "kvkeep_chunks")
def test_what_is_held(tmp_path):
    with open_rig(tmp_path) as (rig, moves):
        rig.fill(TOKENS[:24])
        flush(rig)
        used = rig.engine.check().used_bytes
        held = {f'chunks{{tier="{CPU}"}}': 3, f'chunks{{tier="{DISK}"}}': 3}
        pool = {'pool_bytes{state="used"}': used, 'pool_bytes{state="free"}': -used}
        assert moves.of("kvkeep_pool", "kvkeep_chunks") == held | pool
        rig.engine.clear([CPU])
        assert moves.of("kvkeep_pool", "kvkeep_chunks") == {
            f'chunks{{tier="{CPU}"}}': -3,
            'pool_bytes{state="used"}': -used,
            'pool_bytes{state="free"}': used,
        }


@proves("kvkeep_breaker_open", "kvkeep_backend_bypassed")
def test_a_tier_that_fails_and_recovers(tmp_path):
    io = FaultyIO()
    with open_rig(tmp_path, io=io) as (rig, moves):
        rig.fill(TOKENS)
        flush(rig)
        rig.engine.clear([CPU])
        moves.of()
        io.before = raise_on("open_read", errno.EIO)
        retrieve(rig)
        opened = {f'breaker_open{{tier="{DISK}",direction="load"}}': 1}
        assert moves.of("kvkeep_breaker", "kvkeep_backend") == opened
        rig.engine.health()
        bypassed = f'backend_bypassed{{tier="{DISK}"}}'
        assert moves.of("kvkeep_breaker", "kvkeep_backend") == {bypassed: 1}
        io.before = lambda operation: None
        wait_for(lambda: rig.engine.health().backends[DISK].healthy)
        closed = {f'breaker_open{{tier="{DISK}",direction="load"}}': -1, bypassed: -1}
        assert moves.of("kvkeep_breaker", "kvkeep_backend") == closed
        io.before = raise_on("open_new", errno.EIO)
        rig.fill([7] * 40)
        flush(rig)
        opened = {f'breaker_open{{tier="{DISK}",direction="store"}}': 1}
        assert moves.of("kvkeep_breaker", "kvkeep_backend") == opened


@proves("kvkeep_queued_operations", "kvkeep_queued_bytes")
def test_queues(tmp_path):
    io = FaultyIO()
    gate, arrived = threading.Event(), threading.Semaphore(0)

    def wait_on(*operations: str) -> Callable[[str], None]:
        def before(called: str) -> None:
            if called in operations:
                arrived.release()
                assert gate.wait(LONG_S)

        return before

    with open_rig(tmp_path, io=io) as (rig, moves):
        rig.fill(TOKENS)
        flush(rig)
        rig.engine.clear([CPU])
        moves.of()
        io.before = wait_on("open_new")
        rig.fill([7] * 24)  # one store runs in one thread, two wait
        assert arrived.acquire(timeout=LONG_S)
        io.before = wait_on("open_new", "open_read")
        disk = rig.storage.storage_backends[DISK]
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        loading = disk.batched_get_non_blocking(keys)  # one load runs in the other, four wait
        assert arrived.acquire(timeout=LONG_S)
        waiting = {
            f'queued_operations{{tier="{DISK}",direction="store"}}': 2,
            f'queued_operations{{tier="{DISK}",direction="load"}}': 4,
            f'queued_bytes{{tier="{DISK}"}}': 2 * rig.model.layout.chunk_bytes(8),
        }
        assert moves.of("kvkeep_queued") == waiting
        gate.set()
        for obj in loading.result(LONG_S):
            obj.ref_count_down()
        flush(rig)
        assert moves.of("kvkeep_queued") == {name: -value for name, value in waiting.items()}


@proves("kvkeep_prefetches", "kvkeep_prefetches_running")
def test_prefetches(tmp_path):
    io = FaultyIO()
    gate = threading.Event()
    with open_rig(tmp_path, io=io) as (rig, moves):
        rig.fill(TOKENS[:24])
        flush(rig)
        rig.engine.clear([CPU])
        moves.of()
        io.before = lambda operation: assert_true(gate.wait(LONG_S))
        chunks = rig.engine.token_database.process_tokens(TOKENS[:24])
        ends = [chunks.end_of(number) for number in range(len(chunks.keys) + 1)]
        answer = rig.storage.async_lookup_and_prefetch("a", chunks.keys, ends)
        assert moves.of("kvkeep_prefetches") == {"prefetches_running": 1}
        gate.set()
        assert answer.result(LONG_S).num_tokens == 24
        wait_for(lambda: not rig.metrics.snapshot()["kvkeep_prefetches_running"])
        assert moves.of("kvkeep_prefetches") == {
            "prefetches_running": -1,
            'prefetches_total{outcome="done"}': 1,
        }
        rig.storage.batched_unpin("a")


@proves(
    "kvkeep_tier_skipped_tokens",
    "kvkeep_expected_load_bytes_per_second",
    "kvkeep_expected_load_start_seconds",
    "kvkeep_prefill_tokens_per_second",
)
def test_what_loading_and_computing_cost(tmp_path):
    names = ("kvkeep_tier", "kvkeep_expected", "kvkeep_prefill")
    with open_rig(tmp_path) as (rig, moves):
        cost = rig.storage.cost
        chunk_bytes = rig.model.layout.chunk_bytes(8)
        cost._options = CostOptions(chunk_tokens=8, chunk_bytes=chunk_bytes, retry_s=LONG_S)
        rig.fill(TOKENS[:24])
        flush(rig)
        rig.engine.clear([CPU])
        assert moves.of(*names) == {}
        cost.note_prefill(1000, 2.0)
        assert moves.of(*names) == {"prefill_tokens_per_second": 500}
        retrieve(rig)
        (measured,) = moves.of(*names)
        assert measured == f'expected_load_bytes_per_second{{tier="{DISK}"}}'
        rig.engine.clear([CPU])
        for num_chunks in range(1, 200):  # what was measured before hardly matters then
            cost.note_load(DISK, num_chunks, 30.0 + num_chunks)
        retrieve(rig)
        moved = moves.of(*names)
        start_s = moved.pop(f'expected_load_start_seconds{{tier="{DISK}"}}')
        assert 29.0 < start_s < 31.0
        assert moved.pop(f'tier_skipped_tokens_total{{tier="{DISK}",cause="{TOO_SLOW}"}}') > 0
        assert list(moved) == [measured]


def assert_true(value: bool) -> None:
    assert value


def test_every_metric_has_its_proof():
    assert set(PROOFS) == set(CATALOGUE), "a metric without a test that it moves"


def test_names_are_those_of_prometheus():
    """What ``promtool check metrics`` asks for, of every metric, moved or not."""
    reserved = {"le", "quantile", "job", "instance"}
    for name, spec in CATALOGUE.items():
        assert re.fullmatch(r"kvkeep_[a-z]+(_[a-z]+)*", name), name
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_created")), name
        assert not re.search(r"_(counter|gauge|histogram|milliseconds|kilobytes)(_|$)", name), name
        assert spec.text.endswith(".") and spec.moves.endswith("."), name
        assert not set(spec.labels) & reserved, name
        assert all(re.fullmatch(r"[a-z]+", label) for label in spec.labels), name
        if spec.unit in ("bytes", "seconds"):
            assert name.endswith(spec.unit), name
        assert bool(spec.bounds) == (spec.kind is Kind.HISTOGRAM), name


def test_the_exposition_has_every_series_once_with_help_and_type(tmp_path):
    with open_rig(tmp_path) as (rig, _):
        rig.fill(TOKENS)
        flush(rig)
        rig.engine.lookup(TOKENS)
        text = rig.metrics.exposition().decode()
    seen = set()
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in seen
            seen.add(series)
    helps = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    assert len(helps) == len(set(helps)) == len(CATALOGUE)
