"""Faults 4, 5, 16, 39: whatever happens to the files of the disk tier is a miss, counted by cause.

What does not verify is removed, and the tier goes on: after every kind of damage the same chunk can
be stored and read again, and its neighbour was never touched.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from dataclasses import replace

import pytest

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.codec.frame import HEADER_BYTES, ChunkMeta, FrameHeader, checksum, writer_digest
from kvkeep.layout import MemoryFormat
from kvkeep.metrics import Metrics
from kvkeep.testing.chunks import (
    CHUNK_BYTES,
    DTYPE,
    SHAPE,
    bytes_of,
    check_found,
    make_key,
    make_keys,
    make_pool,
    put,
    wait_until,
)
from support.disk import IDENTITY, chunk_files, chunk_path, file_bytes, make_disk

KEY, NEIGHBOUR = make_keys(2)
FILE_BYTES = HEADER_BYTES + CHUNK_BYTES


class Tier:
    """A pool and a disk tier over one directory, with its metrics; it can be restarted."""

    def __init__(self, path):
        self.path = path
        self.pool = make_pool()
        self.metrics = Metrics()
        self.disk = make_disk(self.pool, path, metrics=self.metrics)

    def restart(self, damage=None):
        """End it, damage what is there, and start it again with new metrics."""
        self.disk.close()
        self.pool.clear()
        if damage is not None:
            damage()
        self.metrics = Metrics()
        self.disk = make_disk(self.pool, self.path, metrics=self.metrics)

    def put(self, *keys):
        return put(self.disk, self.pool, keys)

    def read(self, *keys):
        return check_found(keys, self.disk.batched_get_blocking(keys))

    def causes(self, operation):
        """Causes of failures of one operation so far, with their number."""
        start = f'kvkeep_failures_total{{tier="LocalDiskBackend",operation="{operation}",cause="'
        return {
            name[len(start) : -2]: int(value)
            for name, value in self.metrics.snapshot().items()
            if name.startswith(start)
        }

    def check(self):
        assert self.disk.used_bytes() == file_bytes(self.path / ROOT_NAME)
        self.pool.clear()
        assert self.pool.memcheck().num_objects == 0


@pytest.fixture
def tier(tmp_path):
    tier = Tier(tmp_path)
    yield tier
    tier.check()
    tier.disk.close()
    tier.pool.close()


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def frame(key=KEY, identity=IDENTITY, fmt=MemoryFormat.OPAQUE_PAGES, shape=SHAPE, payload=None):
    """A whole frame as another engine, or a mistaken one, would write it."""
    meta = ChunkMeta(fmt, "uint8", shape)
    payload = bytes_of(key) if payload is None else payload
    header = FrameHeader(key, writer_digest(identity), meta, len(payload), checksum(payload))
    return header.pack() + payload


def make_directory(path):
    path.unlink()
    path.mkdir()


def make_link(path):
    elsewhere = path.parents[3] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


OTHER_MODEL = replace(IDENTITY, model="another")
OTHER_LAYOUT = replace(IDENTITY, layout=replace(IDENTITY.layout, engine="another order"))
#: What is done to the file, and the cause at a read and at a start (None: kept for its owner).
DAMAGE = {
    "empty": (lambda p: p.write_bytes(b""), "truncated", "truncated"),
    "garbage": (lambda p: p.write_bytes(b"\xff" * FILE_BYTES), "magic", "magic"),
    "zeroes": (lambda p: p.write_bytes(bytes(FILE_BYTES)), "magic", "magic"),
    "grown": (lambda p: p.write_bytes(p.read_bytes() + b"\0"), "length", "length"),
    "half": (lambda p: os.truncate(p, FILE_BYTES // 2), "truncated", "truncated"),
    "version": (lambda p: flip(p, 65), "version", "version"),
    "other key": (lambda p: p.write_bytes(frame(NEIGHBOUR)), "wrong_key", "wrong_key"),
    "other model": (lambda p: p.write_bytes(frame(identity=OTHER_MODEL)), "wrong_identity", None),
    "other layout": (lambda p: p.write_bytes(frame(identity=OTHER_LAYOUT)), "wrong_identity", None),
    "other format": (
        lambda p: p.write_bytes(frame(fmt=MemoryFormat.KV_T2D)),
        "wrong_layout",
        "wrong_layout",
    ),
    "other size": (
        lambda p: p.write_bytes(frame(shape=(5, 10), payload=bytes(50))),
        "wrong_layout",
        "wrong_layout",
    ),
    "directory": (make_directory, "not_a_file", "not_a_file"),
    "link": (make_link, "not_a_file", "not_a_file"),
    "pipe": (make_pipe, "not_a_file", "not_a_file"),
    "gone": (lambda p: p.unlink(), "missing", None),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_while_the_tier_is_open(tier, name):
    """Faults 4, 5, 39: a miss with a cause, and the file is gone."""
    damage, cause, _ = DAMAGE[name]
    tier.put(KEY, NEIGHBOUR)
    damage(chunk_path(tier.path, KEY))
    assert tier.read(KEY, NEIGHBOUR) == [False, True]
    assert tier.causes("get") == {cause: 1}
    assert not os.path.lexists(chunk_path(tier.path, KEY))
    assert not tier.disk.contains(KEY)
    assert tier.disk.keys() == [NEIGHBOUR]
    assert tier.disk.health().healthy
    assert tier.put(KEY) == [PutOutcome.STORED]
    assert tier.read(KEY, NEIGHBOUR) == [True, True]
    tier.restart()


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_found_at_a_start(tier, name):
    """Faults 5, 39: nothing is trusted that does not verify."""
    damage, read_cause, cause = DAMAGE[name]
    tier.put(KEY, NEIGHBOUR)
    tier.restart(lambda: damage(chunk_path(tier.path, KEY)))
    found = tier.causes("scan")
    assert sum(found.values()) == found.get(cause, 0)
    assert (cause in found) == (cause is not None)
    assert tier.disk.keys() == [NEIGHBOUR]
    assert not tier.disk.contains(KEY)
    assert tier.read(KEY, NEIGHBOUR) == [False, True]
    assert not os.path.lexists(chunk_path(tier.path, KEY))
    if read_cause == "wrong_identity":
        assert tier.causes("lookup") == {"wrong_identity": 1}
    assert tier.put(KEY) == [PutOutcome.STORED]
    assert tier.read(KEY, NEIGHBOUR) == [True, True]


def test_another_engines_chunk_is_replaced_by_a_store(tier):
    """Nobody looked the chunk up in between: the store does not believe it is there."""
    tier.put(NEIGHBOUR)
    path = chunk_path(tier.path, KEY)
    path.parent.mkdir(exist_ok=True)
    tier.restart(lambda: path.write_bytes(frame(identity=OTHER_MODEL)))
    assert path.exists()
    assert tier.put(KEY) == [PutOutcome.STORED]
    assert tier.read(KEY, NEIGHBOUR) == [True, True]


def test_every_single_bit_of_a_header(tier):
    """Fault 5: in a file, not in memory only."""
    tier.put(KEY)
    path = chunk_path(tier.path, KEY)
    good = path.read_bytes()
    for bit in range(8 * HEADER_BYTES):
        flip(path, bit)
        assert tier.read(KEY) == [False], bit
        assert not path.exists()
        path.write_bytes(good)  # as another process would: it is found again without a restart
        assert tier.read(KEY) == [True], bit
    assert sum(tier.causes("get").values()) == 8 * HEADER_BYTES
    assert set(tier.causes("get")) == {"magic", "version", "header_checksum"}
    tier.restart()


def test_random_bits_of_payloads(tier):
    """Fault 5: right length, wrong content."""
    tier.put(KEY)
    path = chunk_path(tier.path, KEY)
    good = path.read_bytes()
    chance = random.Random(5)
    for bit in chance.sample(range(8 * HEADER_BYTES, 8 * FILE_BYTES), 300):
        flip(path, bit)
        assert tier.read(KEY) == [False], bit
        path.write_bytes(good)
        assert tier.read(KEY) == [True], bit
    assert tier.causes("get") == {"payload_checksum": 300}
    tier.restart()


def test_truncation_at_every_boundary(tier):
    """Fault 5: the memory that a load fills was another chunk's; nothing of it is served."""
    tier.put(KEY)
    path = chunk_path(tier.path, KEY)
    good = path.read_bytes()
    for length in range(FILE_BYTES):
        os.truncate(path, length)
        assert tier.read(KEY) == [False], length
        path.write_bytes(good)
        assert tier.read(KEY) == [True], length
    assert tier.causes("get") == {"truncated": FILE_BYTES}
    tier.restart()


def test_damaged_headers_found_at_a_start(tier):
    keys = make_keys(60)
    chance = random.Random(9)
    for _ in range(10):
        tier.put(*keys)
        tier.restart(
            lambda: [
                flip(path, chance.randrange(8 * HEADER_BYTES)) for path in chunk_files(tier.path)
            ]
        )
        assert tier.disk.keys() == []
        assert chunk_files(tier.path) == []
        assert sum(tier.causes("scan").values()) == 60


def test_strangers_in_the_directory(tier):
    """What is not the tier's is removed below its own directories, and nowhere else."""
    tier.put(KEY)
    root = tier.path / ROOT_NAME
    outside = tier.path / "someone's file"
    outside.write_bytes(b"hello")
    strangers = [
        root / "chunks" / "file",
        root / "chunks" / "00" / "not a chunk",
        root / "chunks" / "00" / ("ab" * 32 + ".kvc"),  # the right form in the wrong place
        root / "chunks" / KEY.hex()[:2] / KEY.hex().upper(),
        root / "tmp" / "garbage",
        root / "tmp" / f"{'00' * 16}-1-4096.tmp",
        root / "members" / ("11" * 16),
    ]

    def damage():
        for path in strangers:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * 5000)

    tier.restart(damage)
    assert [path for path in strangers if path.exists()] == []
    assert outside.read_bytes() == b"hello"
    assert tier.read(KEY) == [True]
    assert tier.causes("scan") == {"stranger": 4}


def test_a_directory_that_others_filled_is_left_alone(tier):
    """It is no chunk, it cannot be removed, and its chunk is dropped: counted, and life goes on."""
    tier.put(KEY, NEIGHBOUR)
    path = chunk_path(tier.path, KEY)

    def damage():
        make_directory(path)
        (path / "file").write_bytes(b"")

    tier.restart(damage)
    assert tier.read(KEY, NEIGHBOUR) == [False, True]
    obj = tier.pool.batched_allocate(SHAPE, DTYPE, 1, MemoryFormat.OPAQUE_PAGES)
    assert tier.disk.batched_submit_put_task([KEY], obj) == [PutOutcome.STORED]
    obj[0].ref_count_down()
    assert tier.disk.flush(10)
    assert tier.causes("put")["directory"] == 1
    assert tier.read(KEY, NEIGHBOUR) == [False, True]
    shutil.rmtree(path)


@pytest.mark.parametrize("length", [0, 1, 4095, 4097])
def test_a_ledger_of_the_wrong_length(tier, length):
    ledger = tier.path / ROOT_NAME / "ledger"
    tier.put(KEY)
    tier.restart(lambda: ledger.write_bytes(b"\x55" * length))
    assert tier.read(KEY) == [True]
    ledger.write_bytes(b"\x55" * length)  # while it is open
    assert tier.put(NEIGHBOUR) == [PutOutcome.STORED]
    assert tier.read(KEY, NEIGHBOUR) == [True, True]
    assert tier.disk.used_bytes() == file_bytes(tier.path / ROOT_NAME)


def test_bits_of_the_ledger(tier):
    """Fault 38: the sum is derived again from what is there."""
    ledger = tier.path / ROOT_NAME / "ledger"
    tier.put(KEY)
    chance = random.Random(3)
    for bit in [*range(8 * 96), *chance.sample(range(8 * 4096), 300)]:
        flip(ledger, bit)
        assert tier.disk.used_bytes() == 4096 + 4096
    assert tier.read(KEY) == [True]


def test_the_ledger_is_removed(tier):
    tier.put(KEY)
    (tier.path / ROOT_NAME / "ledger").unlink()
    assert tier.put(NEIGHBOUR) == [PutOutcome.STORED]
    assert tier.disk.used_bytes() == file_bytes(tier.path / ROOT_NAME)


@pytest.mark.parametrize("what", ["", "chunks", "tmp", "members"])
def test_a_removed_directory(tier, what):
    """Fault 39: what was in it is a miss; the next store makes it anew."""
    tier.put(KEY, NEIGHBOUR)
    shutil.rmtree(tier.path / ROOT_NAME / what)
    there = what in ("tmp", "members")
    assert tier.read(KEY, NEIGHBOUR) == [there, there]
    other = make_key("other")
    assert tier.put(other) == [PutOutcome.STORED]
    assert tier.read(other) == [True]
    assert tier.put(KEY) == [PutOutcome.PRESENT if there else PutOutcome.STORED]
    tier.restart()
    assert tier.read(KEY, other) == [True, True]


def test_a_directory_where_the_ledger_should_be(tmp_path, caplog):
    (tmp_path / ROOT_NAME / "ledger").mkdir(parents=True)
    tier = Tier(tmp_path)
    assert not tier.disk.health().healthy
    assert tier.causes("open") == {"directory": 1}
    assert tier.read(KEY) == [False]
    obj = tier.pool.batched_allocate(SHAPE, DTYPE, 1, MemoryFormat.OPAQUE_PAGES)
    assert tier.disk.batched_submit_put_task([KEY], obj) == [PutOutcome.DROPPED]
    obj[0].ref_count_down()
    wait_until(lambda: not tier.disk.health().healthy and tier.causes("open")["directory"] > 2)
    assert caplog.text.count("cannot be opened") == 1, "tried often, told once"
    tier.disk.close()
    tier.pool.close()


@pytest.mark.parametrize("stamp_s", [0, 1, 4_000_000_000])
def test_a_clock_set_back_or_forward(tier, stamp_s):
    """Times at files order chunks for eviction; nothing is believed or refused for them."""
    keys = make_keys(20)
    tier.put(*keys)

    def damage():
        for path in chunk_files(tier.path)[::2]:
            os.utime(path, (stamp_s, stamp_s))

    tier.restart(damage)
    assert tier.read(*keys) == [True] * 20
    assert tier.put(*make_keys(10, first=100)) == [PutOutcome.STORED] * 10


def test_damage_under_readers(tier):
    """While a file is damaged again and again, nobody ever reads a wrong byte."""
    keys = make_keys(6)
    tier.put(*keys)
    stop = threading.Event()
    ended = []

    def read():
        while not stop.is_set():
            tier.read(*keys)
        ended.append(True)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    chance = random.Random(1)
    try:
        for _ in range(50):
            key = chance.choice(keys)
            path = chunk_path(tier.path, key)
            if path.exists():
                flip(path, chance.randrange(8 * FILE_BYTES))
                tier.read(key)
            tier.put(key)
    finally:
        stop.set()
        for reader in readers:
            reader.join(30)
    assert len(ended) == 4
    tier.restart()
