"""How much work the verbs do, in counts: no clock, so a slow machine cannot fail them.

Each bound stands a little above what is done today. A change that doubles the work of a request, or
makes it grow with something it did not grow with, fails here; one that has a reason for it says so
and moves the bound.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvkeep import hashing
from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.directory import DiskDirectory
from kvkeep.backends.disk.index import DiskIndex, DiskReports
from kvkeep.backends.io_pool import IOPool, StoreJob
from kvkeep.backends.local_cpu import LocalCPUBackend
from kvkeep.backends.remote import create_connector
from kvkeep.bench.rig import make_dense_engine
from kvkeep.config.base import RemoteURL
from kvkeep.gpu import host_copy
from kvkeep.gpu.host_copy import RowCopier
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import References
from kvkeep.memory.factory import initialize_allocator
from kvkeep.metrics import Metrics
from kvkeep.policy.names import POLICIES, create_policy
from kvkeep.testing.chunks import CHUNK_BYTES, DTYPE, SHAPE, make_keys, make_pool, put
from kvkeep.testing.remote_stores import OPTIONS, random_value, read
from kvkeep.tokens import ChunkedTokenDatabase
from support.disk import IDENTITY, FaultyIO, make_disk
from support.engine_rig import EngineRig

FMT = MemoryFormat.OPAQUE_PAGES
CHUNK = 8
LAYERS = 3


def calls_in(call: Callable[[], object]) -> int:
    """Function calls, in Python and in C, that ``call`` makes in this thread."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def system_calls_in(call: Callable[[], object]) -> Counter[str]:
    """Functions of ``os`` that ``call`` calls in this thread."""
    found: Counter[str] = Counter()

    def note(frame: object, event: str, argument: object) -> None:
        if event == "c_call" and getattr(argument, "__module__", None) == "posix":
            found[argument.__name__] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    del found["fspath"]
    return found


def allocated_in(call: Callable[[], object]) -> int:
    """Most bytes of Python and numpy memory that ``call`` holds at once."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def per_chunk(count_of: Callable[[int], int], few: int = 64, many: int = 192) -> float:
    """What one chunk more costs; what a call costs whatever its length is, cancels out."""
    return (count_of(many) - count_of(few)) / (many - few)


def tokens_of(num_chunks: int) -> list[int]:
    return list(range(num_chunks * CHUNK))


@pytest.fixture
def rig():
    with EngineRig(pool_chunks=200, num_pages=400) as made:
        yield made


@pytest.fixture
def stored(rig):
    """A rig that holds a prompt of 200 chunks."""
    rig.fill(tokens_of(200))
    return rig


# --- keys


class CountedSha256:
    """hashlib.sha256 that counts its objects and their bytes."""

    def __init__(self) -> None:
        self.objects = self.num_bytes = 0

    def __call__(self, data: bytes = b""):
        self.objects += 1
        self.num_bytes += len(data)
        return _CountedDigest(self, hashlib.sha256(data))


class _CountedDigest:
    def __init__(self, counted: CountedSha256, digest) -> None:
        self._counted, self._digest = counted, digest

    def update(self, data: bytes) -> None:
        self._counted.num_bytes += len(data)
        self._digest.update(data)

    def digest(self) -> bytes:
        return self._digest.digest()


@pytest.fixture
def hashed(monkeypatch):
    counted = CountedSha256()
    monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(sha256=counted))
    return counted


def test_each_token_is_hashed_once(rig, hashed) -> None:
    rig.engine.lookup([1])  # makes the root
    hashed.objects = hashed.num_bytes = 0
    rig.fill(tokens_of(100))
    rig.engine.lookup(tokens_of(100))
    rig.engine.lookup(tokens_of(100), lookup_id="x", pin=True)
    rig.engine.retrieve(
        tokens_of(100),
        kvcaches=rig.model.caches,
        slot_mapping=rig.model.slots(range(200), 800),
        req_id="x",
    )
    assert hashed.objects == 100
    assert hashed.num_bytes == 100 * (hashing.KEY_BYTES + CHUNK * hashing.TOKEN_BYTES)


def test_a_chat_of_fifty_turns_is_hashed_once(rig, hashed) -> None:
    """The bytes that are hashed grow with the chat, not with its square."""
    rig.engine.lookup([1])
    hashed.objects = hashed.num_bytes = 0
    chat: list[int] = []
    for turn in range(50):
        chat += range(turn * 1000, turn * 1000 + 3 * CHUNK + 1)
        rig.engine.lookup(chat)
    assert hashed.objects == len(chat) // CHUNK
    assert hashed.num_bytes == hashed.objects * (hashing.KEY_BYTES + CHUNK * hashing.TOKEN_BYTES)


def test_keys_take_few_calls_and_little_memory(rig) -> None:
    def fresh(num_chunks: int) -> Callable[[], object]:
        database = ChunkedTokenDatabase(rig.engine.token_database.identity)
        database.process_tokens([1])  # makes the root
        tokens = tokens_of(num_chunks)
        return lambda: database.process_tokens(tokens)

    # per chunk: sha256(), update, digest and append
    assert per_chunk(lambda count: calls_in(fresh(count))) <= 4.1
    # per chunk: its ids twice (the array and the bytes), and one key
    assert per_chunk(lambda count: allocated_in(fresh(count))) <= 2 * CHUNK * 4 + 120


# --- lookups


def test_a_lookup_takes_few_calls_and_little_memory(stored) -> None:
    def lookup(num_chunks: int) -> Callable[[], object]:
        tokens = tokens_of(num_chunks)
        stored.engine.lookup(tokens)
        return lambda: stored.engine.lookup(tokens)

    assert per_chunk(lambda count: calls_in(lookup(count))) <= 0.1
    assert per_chunk(lambda count: allocated_in(lookup(count))) <= 2 * CHUNK * 4 + 100
    assert calls_in(lookup(100)) <= 120


def test_a_pinned_lookup_takes_few_calls(stored) -> None:
    def lookup(num_chunks: int) -> Callable[[], object]:
        tokens = tokens_of(num_chunks)

        def run() -> None:
            stored.engine.lookup(tokens, lookup_id="x", pin=True)
            stored.engine.lookup_unpin("x")

        run()
        return run

    assert per_chunk(lambda count: calls_in(lookup(count))) <= 4.5
    assert calls_in(lookup(100)) <= 4.5 * 100 + 250


class CountedLock:
    """A lock that counts how often it is taken."""

    def __init__(self, lock) -> None:
        self._lock = lock
        self.taken = 0

    def acquire(self, *args, **kwargs):
        self.taken += 1
        return self._lock.acquire(*args, **kwargs)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *error) -> None:
        self.release()


@pytest.mark.parametrize("num_chunks", [3, 150])
def test_locks_and_metrics_do_not_count_chunks(stored, monkeypatch, num_chunks: int) -> None:
    """One lock of the index and one of the pool's counts per batch, however long it is."""
    index = CountedLock(stored.cpu._lock)
    stored.cpu._lock = index
    counts = CountedLock(stored.cpu.allocator.count_lock)
    stored.cpu.allocator.count_lock = counts
    added = []
    add = Metrics._add
    monkeypatch.setattr(Metrics, "_add", lambda *args: (added.append(args), add(*args)))
    tokens = tokens_of(num_chunks)
    stored.engine.lookup(tokens)
    assert (index.taken, counts.taken) == (1, 0)
    assert len(added) <= 2
    stored.engine.lookup(tokens, lookup_id="x", pin=True)
    assert (index.taken, counts.taken) == (2, 1)
    stored.engine.lookup_unpin("x")
    assert (index.taken, counts.taken) == (3, 2)
    assert len(added) <= 6


# --- copies


class CountedMoves:
    """Counts the copies of numpy or of compiled code that a transfer makes, and their bytes."""

    def __init__(self, monkeypatch) -> None:
        self.copies = self.num_bytes = 0
        self._lock = threading.Lock()
        for name in ("gather", "scatter"):
            monkeypatch.setattr(host_copy, name, self._counting(getattr(host_copy, name)))
        copy = RowCopier.copy

        def counted(copier, to, source, pieces, how) -> None:
            self._count(1, len(to) * pieces.count * pieces.num_bytes)
            copy(copier, to, source, pieces, how)

        monkeypatch.setattr(RowCopier, "copy", counted)

    def _counting(self, copy):
        def counted(rows, moves, chunk) -> None:
            self._count(len(moves), sum(chunk[move.part].nbytes for move in moves))
            copy(rows, moves, chunk)

        return counted

    def _count(self, copies: int, num_bytes: int) -> None:
        with self._lock:
            self.copies += copies
            self.num_bytes += num_bytes

    def taken(self) -> tuple[int, int]:
        result = (self.copies, self.num_bytes)
        self.copies = self.num_bytes = 0
        return result


@pytest.fixture(params=["compiled", "numpy"])
def is_compiled(request, monkeypatch) -> bool:
    """How rows are copied; an installation without the compiled copies has one way only."""
    if request.param == "numpy":
        monkeypatch.setattr(host_copy, "load_rows", lambda: None)
    return host_copy.load_rows() is not None


@pytest.mark.parametrize("order", ["neighbours", "shuffled"])
def test_a_layer_is_one_copy(rig, monkeypatch, is_compiled: bool, order: str) -> None:
    """Every byte moves once; compiled code is called per layer, numpy per layer and chunk."""
    count = 100
    copies = LAYERS if is_compiled else LAYERS * count
    pages = list(range(2 * count))
    if order == "shuffled":
        pages = torch.randperm(400, generator=torch.Generator().manual_seed(1))[
            : 2 * count
        ].tolist()
    moved = CountedMoves(monkeypatch)
    rig.fill(tokens_of(count), pages)
    num_bytes = count * rig.model.layout.chunk_bytes(CHUNK)
    assert moved.taken() == (copies, num_bytes)
    where = dict(kvcaches=rig.model.caches, slot_mapping=rig.model.slots(pages, count * CHUNK))
    rig.engine.retrieve(tokens_of(count), **where)
    assert moved.taken() == (copies, num_bytes)
    list(rig.engine.retrieve_layer(tokens_of(count), **where))
    assert moved.taken() == (copies, num_bytes)
    rig.engine.clear()
    list(rig.engine.store_layer(tokens_of(count), **where))
    assert moved.taken() == (copies, num_bytes)
    rig.engine.store(tokens_of(count), **where)
    assert moved.taken() == (0, 0)  # what is stored is not copied again


def test_dense_caches_are_one_copy_per_tensor(monkeypatch, is_compiled: bool) -> None:
    with make_dense_engine(
        num_chunks=5, num_layers=2, dtype="bfloat16", heads=(2, 8), chunk_size=CHUNK
    ) as made:
        moved = CountedMoves(monkeypatch)
        made.engine.store(tokens_of(5), kvcaches=None, slot_mapping=None)
        copies = 2 * 2 if is_compiled else 2 * 2 * 5
        assert moved.taken() == (copies, 5 * CHUNK * 2 * 2 * 2 * 8 * 2)


def test_a_transfer_takes_few_calls(rig, is_compiled: bool) -> None:
    """Per chunk no more than a few calls; with numpy, also per layer the copy and its views."""
    where = dict(kvcaches=rig.model.caches)

    def fill(num_chunks: int) -> Callable[[], object]:
        rig.engine.clear()
        slots = rig.model.slots(range(2 * num_chunks), num_chunks * CHUNK)
        rig.engine.lookup(tokens_of(num_chunks))
        return lambda: rig.engine.store(tokens_of(num_chunks), slot_mapping=slots, **where)

    def load(num_chunks: int) -> Callable[[], object]:
        rig.fill(tokens_of(num_chunks))
        slots = rig.model.slots(range(2 * num_chunks), num_chunks * CHUNK)
        return lambda: rig.engine.retrieve(tokens_of(num_chunks), slot_mapping=slots, **where)

    most_out, most_in = (56, 30) if is_compiled else (136, 96)
    assert per_chunk(lambda count: calls_in(fill(count))) <= most_out
    assert per_chunk(lambda count: calls_in(load(count))) <= most_in


# --- evictions


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_eviction_takes_as_many_calls_in_a_large_pool(name: str) -> None:
    def calls(capacity: int) -> float:
        allocator = initialize_allocator(
            capacity * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, huge_pages=False
        )
        pool = LocalCPUBackend(allocator, create_policy(name), metrics=Metrics())
        names = make_keys(capacity + 256)

        def put(some) -> None:
            with References(pool.batched_allocate(SHAPE, DTYPE, len(some), FMT)) as objs:
                pool.batched_submit_put_task(some, objs.objects)

        for start in range(0, capacity, 16):
            put(names[start : start + 16])
        rest = [names[start : start + 16] for start in range(capacity, capacity + 256, 16)]
        count = calls_in(lambda: [put(some) for some in rest])
        assert len(pool) == capacity
        pool.close()
        return count / 256

    small, large = calls(256), calls(2048)
    assert large <= 1.3 * small
    assert large <= 90


# --- disk


def test_a_chunk_on_disk_takes_few_system_calls(tmp_path) -> None:
    allocator = initialize_allocator(64 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, huge_pages=False)
    pool = LocalCPUBackend(allocator, create_policy("lru"), metrics=Metrics())
    io = FaultyIO()
    disk = make_disk(pool, tmp_path, io=io)
    io.calls.clear()
    names = make_keys(20)
    with References(pool.batched_allocate(SHAPE, DTYPE, 20, FMT)) as objs:
        disk.batched_submit_put_task(names, objs.objects)
        assert disk.flush(10)
    written = {name: count / 20 for name, count in io.calls.items()}
    # asked for, written (payload, then header), renamed (and its folder, once, when it is made)
    assert written.pop("rename") <= 2
    assert written == {"open_read": 1, "open_new": 1, "write": 2}
    io.calls.clear()
    assert disk.batched_contains(names) == 20
    assert io.calls == {}
    with References(disk.batched_get_blocking(names)) as found:
        assert None not in found.objects
    assert {name: count / 20 for name, count in io.calls.items()} == {"open_read": 1, "read": 2}
    disk.close()
    pool.close()


def test_a_store_wakes_nobody_but_who_writes_it(monkeypatch) -> None:
    """Neither the thread for loads nor who waits for the last store, until it is done."""
    waits: Counter[str] = Counter()
    wait = threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        waits[threading.current_thread().name] += 1
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", counted)
    pool = IOPool(name="test", threads=3, max_queued_bytes=100, on_error=pytest.fail)
    pool.load(lambda: None).result(10)
    done: list[int] = []
    waits.clear()
    for number in range(100):
        assert pool.store(StoreJob(partial(done.append, number), pytest.fail, 1))
    assert pool.wait_idle(10)
    assert sorted(done) == list(range(100))
    assert waits["kvkeep-test-0"] <= 1  # its first one may come as late as that
    assert waits[threading.current_thread().name] <= 1
    pool.close(10)


def test_a_file_in_a_shared_directory_takes_few_system_calls(tmp_path) -> None:
    connector = create_connector(RemoteURL.parse(f"file://{tmp_path}"), OPTIONS)
    names = [f"kvkeep-v1/test/{number:064x}" for number in range(21)]
    values = [random_value(5000, number) for number in range(21)]
    connector.put(names[:1], values[:1], 10)  # which makes the folders
    put = system_calls_in(lambda: connector.put(names[1:], values[1:], 10))
    # the payload, then the header
    assert put == {"open": 20, "pwrite": 40, "close": 20, "rename": 20}
    assert system_calls_in(lambda: connector.sizes(names[1:], 10)) == {"stat": 20}
    got = system_calls_in(lambda: read(connector, names[1:]))
    assert got == dict.fromkeys(("open", "fstat", "pread", "preadv", "close"), 20)


def test_a_start_takes_few_calls_per_chunk_on_disk(tmp_path) -> None:
    def start(count: int) -> int:
        pool, folder = make_pool(), tmp_path / str(count)
        disk = make_disk(pool, folder)
        names = make_keys(count)
        for first in range(0, count, 32):
            put(disk, pool, names[first : first + 32])
            pool.clear()
        disk.close()
        io, index = FaultyIO(), DiskIndex(create_policy("lru"))
        directory = DiskDirectory(folder, budget_bytes=1 << 30, io=io)
        reports = DiskReports(Metrics())
        catalog = Catalog(directory, index, identity=IDENTITY, io=io, reports=reports)
        calls = calls_in(catalog.open)
        assert len(index) == count
        assert io.calls == {"open_read": count, "read": count}
        directory.close()
        pool.close()
        return calls

    assert per_chunk(start) <= 160  # with as many folders, since there are few chunks
