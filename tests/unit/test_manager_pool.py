"""The pool that CacheManager builds: every setting has its effect, and the report says which."""

from __future__ import annotations

import logging
import mmap
import uuid
from pathlib import Path

import pytest
import torch

from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import ConfigError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.layout import MemoryFormat
from kvkeep.memory.allocators import PagedAllocator
from kvkeep.memory.arena import Arena
from kvkeep.memory.factory import tensor_pool
from kvkeep.memory.placement import WorkerPlace, online_nodes
from kvkeep.testing.chunks import wait_until
from support.paged_engine import PagedEngine

MIB = 1 << 20
CHUNK = 384
TOKENS = list(range(1000, 1024))


class Built:
    """A manager over a paged engine whose chunks have 384 bytes; stores and loads one prompt."""

    def __init__(self, place: WorkerPlace = WorkerPlace(), **cpu: object) -> None:  # noqa: B008
        self.model = PagedEngine(num_pages=16)
        settings = load_settings(extra={"chunk_size": 8, "cpu": {"size": "1MiB", **cpu}})
        self.manager = CacheManager.create(
            settings,
            CacheIdentity("m", "1", self.model.layout, chunk_size=8),
            PagedGPUConnector(self.model.layout),
            place=place,
        )
        self.report = self.manager.allocator_report
        self.allocator = self.manager.storage.allocator_backend.allocator
        self.pool = tensor_pool(self.allocator)

    def works(self) -> None:
        slots = self.model.slots(range(6), 24)
        self.model.prefill(TOKENS, range(6))
        self.manager.engine.store(TOKENS, kvcaches=self.model.caches, slot_mapping=slots)
        self.model.wipe(range(16))
        mask = self.manager.engine.retrieve(TOKENS, kvcaches=self.model.caches, slot_mapping=slots)
        assert mask.all()
        assert self.model.right_pages(TOKENS, range(6)) == [True] * 6

    def __enter__(self) -> Built:
        return self

    def __exit__(self, *error: object) -> None:
        self.manager.engine.clear()
        report = self.manager.engine.check()
        assert (report.used_bytes, report.num_objects, report.open_leases) == (0, 0, 0)
        self.manager.close()


def test_without_settings_it_is_a_pool_for_kv_and_one_for_buffers(caplog) -> None:
    with caplog.at_level(logging.INFO, "kvkeep.engine.build"), Built() as built:
        built.works()
        assert built.report.allocator == "MixedMemoryAllocator"
        assert built.report.size_bytes == 17 * MIB
        assert built.pool.usage().capacity_bytes == MIB // CHUNK * CHUNK
        assert built.report.choice("NUMA node").why == "the worker has no CUDA device"
    (record,) = [each for each in caplog.records if each.name == "kvkeep.engine.build"]
    assert record.message.startswith("pool: MixedMemoryAllocator over 17825792 bytes; allocator: ")


@pytest.mark.parametrize("buffers", ["1MiB", "0B"])
def test_byte_buffers_have_a_pool_of_their_own_or_share_the_one_for_kv(buffers) -> None:
    with Built(buffers=buffers) as built:
        before = built.pool.usage().used_bytes
        buffer = built.manager.storage.allocate((100,), torch.uint8, MemoryFormat.BINARY)
        took = built.pool.usage().used_bytes - before
        buffer.ref_count_down()
        assert took == (CHUNK if buffers == "0B" else 0)
        assert isinstance(built.allocator, PagedAllocator) == (buffers == "0B")
        built.works()


def test_slots_that_can_be_registered() -> None:
    with Built(allocator="paged") as built:
        built.works()
        assert built.report.allocator == "PagedCpuGpuMemoryAllocator"
        assert "take slots, not cpu.buffers" in built.report.choice("allocator").why
        export = built.allocator.export()
        assert (export.slot_bytes, export.num_slots) == (mmap.PAGESIZE, MIB // mmap.PAGESIZE)


def test_the_reserve_makes_it_smaller_or_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr("kvkeep.engine.build.available_bytes", lambda: 3 * MIB)
    with Built(size="2MiB", reserve="2560KiB", prefault="0B") as built:
        built.works()
        assert built.pool.usage().capacity_bytes == MIB // 2 // CHUNK * CHUNK
        assert "reduced from 2097152" in built.report.choice("size").why
    with pytest.raises(ConfigError, match=r"the settings of cpu say: .*make cpu\.reserve smaller"):
        Built(reserve="3MiB")


@pytest.mark.parametrize(
    ("rank", "is_latent", "size"), [(0, True, 2 * MIB), (1, True, MIB), (0, False, MIB)]
)
def test_the_first_rank_of_a_latent_attention_model(rank, is_latent, size) -> None:
    place = WorkerPlace(rank=rank, num_ranks=2, num_local=2, has_same_kv=is_latent)
    with Built(place, first_rank_size="2MiB", buffers="0B") as built:
        built.works()
        assert built.report.size_bytes == size


def test_memory_that_other_processes_can_map() -> None:
    """Each rank has a name of its own; one that is in use is an error that says so."""
    name = f"manager-{uuid.uuid4().hex}"
    with Built(shared_name=name, buffers="0B") as built:
        built.works()
        other = Arena.attach(name)
        key = built.manager.engine.token_database.process_tokens(TOKENS).keys[0]
        obj = built.manager.storage.get(key)
        seen = other.array[obj.offset : obj.offset + obj.size_bytes].tobytes()
        assert seen == obj.array.tobytes()
        obj.ref_count_down()
        other.close()
        with pytest.raises(ConfigError, match="belongs to a living process"):
            Built(shared_name=name)
        with Built(WorkerPlace(rank=1, num_ranks=2, num_local=2), shared_name=name) as second:
            assert second.report.choice("memory").chosen == f"shared as {name}-1"
    assert not list(Path("/dev/shm").glob(f"kvkeep-{name}*"))


@pytest.mark.skipif(not online_nodes(), reason="the system tells of no memory nodes")
def test_the_node_that_the_map_gives() -> None:
    node = online_nodes()[-1]
    place = WorkerPlace(cuda_device=3)
    with Built(place, numa={"3": node}, prefault="0B") as built:
        built.works()
        address = f"{built.pool.arena.array.__array_interface__['data'][0]:x} "
        maps = Path("/proc/self/numa_maps").read_text().splitlines()
        assert [line.split()[1] for line in maps if line.startswith(address)] == [f"prefer:{node}"]
        assert built.report.choice("NUMA node").why == "given for GPU 3"
    with pytest.raises(ConfigError, match="GPU 3 at memory node 999"):
        Built(place, numa={3: 999})
    with Built(place, numa="off") as built:
        assert built.report.choice("NUMA node").why == "off, as set"


def test_huge_pages_are_asked_for_or_not() -> None:
    for wanted in (True, False):
        with Built(huge_pages=wanted) as built:
            assert (built.report.choice("huge pages").chosen == "not asked for") == (not wanted)


def test_memory_is_committed_ahead_where_it_is_wanted(monkeypatch) -> None:
    """Fault 50: the first store finds memory that is there."""
    committed = []
    prefault = Arena.prefault

    def note(self, start, end):
        prefault(self, start, end)
        committed.append((start, end))

    monkeypatch.setattr(Arena, "prefault", note)
    with Built(prefault="64KiB", buffers="0B") as built:
        wait_until(lambda: committed == [(0, 64 << 10)])
        built.works()
        wait_until(lambda: committed[-1][1] == (64 << 10) + 3 * CHUNK)
        assert built.report.choice("memory is committed").chosen == "65536 bytes ahead"
    committed.clear()
    with Built(prefault="0B") as built:
        built.works()
        assert built.report.choice("memory is committed").chosen == "when it is first used"
    assert committed == []


def test_what_the_machine_does_not_have_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="shared memory were asked for"):
        Built(size="9000TB", shared_name=f"huge-{uuid.uuid4().hex}")


def test_health_settings_reach_the_checks() -> None:
    settings = load_settings(extra={"health": {"interval": "7s", "timeout": "3s"}})
    model = PagedEngine(num_pages=4)
    manager = CacheManager.create(
        settings,
        CacheIdentity("m", "1", model.layout),
        PagedGPUConnector(model.layout),
    )
    with manager:
        assert manager.engine._monitor.timeout_s == 3
        wait_until(lambda: manager.engine.is_healthy())


def test_a_pool_that_holds_no_chunk_is_told(caplog):
    """Or nobody would know why nothing is ever found."""
    model = PagedEngine(num_pages=16, page_bytes=4096)
    settings = load_settings(extra={"chunk_size": 8, "cpu.size": "4KiB"})
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    with CacheManager.create(settings, identity, PagedGPUConnector(model.layout)):
        assert "nothing is kept: the pool has 4096 bytes and a chunk needs" in caplog.text
    caplog.clear()
    with Built():
        assert "nothing is kept" not in caplog.text
