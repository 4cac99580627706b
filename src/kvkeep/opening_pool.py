"""open_pool: a worker's pool from the settings, and what was chosen for it.

Called once, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

import logging

from kvkeep.config.settings import CpuSettings
from kvkeep.errors import ConfigError, OwnershipError
from kvkeep.memory.base import MemoryAllocatorInterface
from kvkeep.memory.factory import initialize_allocator, report_on, tensor_pool
from kvkeep.memory.numa import TOPIC as NUMA_TOPIC
from kvkeep.memory.numa import choose_node
from kvkeep.memory.paged import PagedAllocator
from kvkeep.memory.prefault import Prefaulter
from kvkeep.memory.report import AllocatorReport, Choice
from kvkeep.memory.sizing import WantedSize, WorkerPlace, available_bytes, choose_size

_log = logging.getLogger(__name__)

#: Of a pool that nothing is stored in, beside one chunk.
_PASSIVE_BYTES = 4096


def open_pool(
    cpu: CpuSettings, place: WorkerPlace, chunk_bytes: int
) -> tuple[MemoryAllocatorInterface, AllocatorReport]:
    """Make the pool.

    Args:
        cpu: its settings.
        place: the worker that it is for.
        chunk_bytes: size of a full chunk.

    Raises:
        ConfigError: the settings ask for what this machine does not have.
    """
    is_registrable = cpu.allocator == "paged"
    buffer_bytes = 0 if is_registrable else cpu.buffers
    try:
        wanted = WantedSize(cpu.size, cpu.first_rank_size, cpu.reserve)
        if place.is_passive:
            size_bytes = _PASSIVE_BYTES + chunk_bytes
            why_size = Choice("size", f"{size_bytes} bytes", "rank 0 stores, this one copies")
            buffer_bytes = 0
        else:
            size_bytes, why_size = choose_size(wanted, place, available_bytes())
            _warn_of_no_room(size_bytes, chunk_bytes)
        allocator = initialize_allocator(
            size_bytes + buffer_bytes,
            chunk_bytes=chunk_bytes,
            buffer_bytes=buffer_bytes,
            is_registrable=is_registrable,
            shared_name=None if place.is_passive else _shared_name(cpu, place),
            shareable=place.first_rank_only and not place.is_passive,
            huge_pages=cpu.huge_pages,
            numa=_numa(cpu, place),
        )
    except (ValueError, OwnershipError, OSError) as error:
        raise ConfigError(f"the pool cannot be made as the settings of cpu say: {error}") from error
    return allocator, report_on(allocator, *_decided(cpu, why_size))


def start_prefault(cpu: CpuSettings, allocator: MemoryAllocatorInterface) -> Prefaulter | None:
    """The thread that commits memory ahead, if the settings want one."""
    pool = tensor_pool(allocator)
    if not cpu.prefault or not isinstance(pool, PagedAllocator):
        return None
    return Prefaulter(pool, ahead_bytes=cpu.prefault, keep_free_bytes=cpu.reserve or 0)


def _warn_of_no_room(size_bytes: int, chunk_bytes: int) -> None:
    if size_bytes < chunk_bytes:
        _log.warning(
            "nothing is kept: the pool has %d bytes and a chunk needs %d; make cpu.size larger or "
            "chunk_size smaller",
            size_bytes,
            chunk_bytes,
        )


def _shared_name(cpu: CpuSettings, place: WorkerPlace) -> str | None:
    if cpu.shared_name is None or place.num_ranks == 1:
        return cpu.shared_name
    return f"{cpu.shared_name}-{place.rank}"


def _numa(cpu: CpuSettings, place: WorkerPlace) -> tuple[int | None, Choice]:
    if cpu.numa == "off":
        return None, Choice(NUMA_TOPIC, "any", "off, as set")
    given = None if isinstance(cpu.numa, str) else dict(cpu.numa)
    return choose_node(place.cuda_device, given)


def _decided(cpu: CpuSettings, size: Choice) -> list[Choice]:
    """What the settings decided before there was an allocator."""
    is_paged = cpu.allocator == "paged"
    why = "KV and byte buffers have a pool each"
    if is_paged:
        why = "slots can be registered for transfers; byte buffers take slots, not cpu.buffers"
    ahead = f"{cpu.prefault} bytes ahead" if cpu.prefault else "when it is first used"
    return [
        Choice("allocator", cpu.allocator, why),
        size,
        Choice("memory is committed", ahead, "as cpu.prefault says"),
    ]
