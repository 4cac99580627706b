"""How large a worker's pool is: pure arithmetic, and what memory the system has to give.

Called once, when a worker is set up; callable from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from kvkeep.memory.report import Choice

#: Size of the pool, unless half of the worker's share of the available memory is less.
DEFAULT_POOL_BYTES = 5_000_000_000

#: Where Linux says how much memory a container may use (cgroup v2, seen from inside).
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker stands among its fellows, and on which device.

    Attributes:
        rank: its rank.
        num_ranks: ranks of its engine.
        num_local: ranks of its engine on this machine, this one included; they share its memory.
        has_same_kv: the KV of a token is the same on every rank (latent attention).
        first_rank_only: rank 0 alone stores, and the others copy out of its memory.
        cuda_device: number of its CUDA device, as this process counts them; None without one.
    """

    rank: int = 0
    num_ranks: int = 1
    num_local: int = 1
    has_same_kv: bool = False
    first_rank_only: bool = False
    cuda_device: int | None = None

    @property
    def is_passive(self) -> bool:
        """The worker stores nothing: rank 0 does."""
        return self.first_rank_only and self.rank > 0


@dataclass(frozen=True, slots=True)
class WantedSize:
    """What the settings say about the size of a pool.

    Attributes:
        size_bytes: of every worker; None takes the default.
        first_rank_bytes: of rank 0 of a latent-attention model; None takes ``size_bytes``.
        reserve_bytes: keep that much of the machine's available memory out of all pools; None for
            no such limit.
    """

    size_bytes: int | None = None
    first_rank_bytes: int | None = None
    reserve_bytes: int | None = None


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that can be used now without swapping, by the system and by the container's limit.

    Files that the container has read count as available, since the system gives their memory up.
    """
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return available
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # another system, or no container
        return available
    stat = dict(line.split() for line in lines)
    files = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
    return max(0, min(available, int(limit) - used + files))


def default_pool_bytes(available: int | None = None, num_local: int = 1) -> int:
    """Size without a setting: 5 GB or half of a worker's share of the available memory.

    Args:
        available: bytes; None asks the system.
        num_local: workers that share them.
    """
    if available is None:
        available = available_bytes()
    return min(DEFAULT_POOL_BYTES, available // num_local // 2)


def choose_size(wanted: WantedSize, place: WorkerPlace, available: int) -> tuple[int, Choice]:
    """The size of a worker's pool, and why.

    Args:
        wanted: by the settings.
        place: the worker.
        available: bytes of memory that the machine has to give.

    Raises:
        ValueError: ``wanted.reserve_bytes`` leaves nothing.
    """
    num_sharing = 1 if place.first_rank_only else place.num_local
    if wanted.first_rank_bytes is not None and place.has_same_kv and place.rank == 0:
        size, why = wanted.first_rank_bytes, "first rank of a model whose KV is the same on each"
    elif wanted.size_bytes is not None:
        size, why = wanted.size_bytes, "as set"
    else:
        size = default_pool_bytes(available, num_sharing)
        why = "default: 5 GB, or half of this worker's share of the available memory"
    if wanted.first_rank_bytes is not None and not place.has_same_kv:
        why += "; cpu.first_rank_size has no effect, since each rank has KV of its own"
    if wanted.reserve_bytes is not None:
        share = (available - wanted.reserve_bytes) // num_sharing
        if share < 1:
            raise ValueError(
                f"{available} bytes of memory are available and {wanted.reserve_bytes} are to stay "
                "free, which leaves nothing for the pool; make cpu.reserve smaller"
            )
        if share < size:
            why += f", reduced from {size} so that {wanted.reserve_bytes} bytes stay free"
            size = share
    return size, Choice("size", f"{size} bytes", why)
