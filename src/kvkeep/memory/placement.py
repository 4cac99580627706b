"""NUMA: which memory node is nearest to a GPU, and how to have a pool's memory there.

Copies between a GPU and memory of another node are slower. The node is a preference, not a demand:
when it is full, memory comes from another one, and nobody is killed for it. Called once, when a
pool is made; callable from any thread.

How large a worker's pool is: pure arithmetic, and what memory the system has to give.

Called once, when a worker is set up; callable from any thread.

Huge pages: asks the system for them, and says what it answered.

Called once, when an arena is made or an engine's caches are registered.

AllocatorReport: what was chosen for a pool, and why. Immutable values, for any thread.

A choice that the machine could not grant is no error: the pool works without it, and the report
says so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was decided about a pool.

    Attributes:
        topic: what about: ``"size"``, ``"huge pages"``, ...
        chosen: what it is now, a few words.
        why: the reason, one clause.
    """

    topic: str
    chosen: str
    why: str


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """A pool as it was built.

    Attributes:
        allocator: name of the allocator's class.
        size_bytes: bytes of its arena.
        choices: in the order in which they were made.
    """

    allocator: str
    size_bytes: int
    choices: tuple[Choice, ...]

    def choice(self, topic: str) -> Choice:
        """The choice about ``topic``.

        Raises:
            KeyError: nothing was decided about it.
        """
        for choice in self.choices:
            if choice.topic == topic:
                return choice
        raise KeyError(topic)

    def lines(self) -> list[str]:
        """For people: one line per choice."""
        head = f"{self.allocator} over {self.size_bytes} bytes"
        return [head, *(f"{c.topic}: {c.chosen} ({c.why})" for c in self.choices)]


#: Topic of the choices made here.
NUMA_TOPIC = "NUMA node"
#: Policy of a memory range: take this node, others when it is full (linux/mempolicy.h).
_MPOL_PREFERRED = 1
#: Number of the system call mbind, where no libnuma offers it.
_MBIND_NUMBERS = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
_SYSFS = Path("/sys")
_MBIND_TYPES = (
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_uint),
)

#: (address, length, policy, node mask, bits in the mask, flags) -> 0 or -1 with errno.
_Mbind = Callable[[int, int, int, object, int, int], int]


def online_nodes(sysfs: Path = _SYSFS) -> list[int]:
    """The memory nodes of this machine; empty where the system does not say."""
    nodes: list[int] = []
    try:
        text = (sysfs / "devices/system/node/online").read_text().strip()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            nodes.extend(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return []
    return nodes


def cuda_address(device: int) -> str | None:
    """PCI address of a CUDA device, like ``"0000:3b:00.0"``; None if nothing tells it."""
    import torch

    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(device)
    try:
        parts = [getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device")]
    except AttributeError:  # an older torch
        return None
    return "{:04x}:{:02x}:{:02x}.0".format(*parts)


def node_of_pci(address: str, sysfs: Path = _SYSFS) -> int | None:
    """The node that a PCI device is attached to; None if the system does not say."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def choose_node(
    cuda_device: int | None,
    given: Mapping[int, int] | None,
    *,
    address_of: Callable[[int], str | None] = cuda_address,
    sysfs: Path = _SYSFS,
) -> tuple[int | None, Choice]:
    """The node for the pool of the worker of ``cuda_device``, and why; None for no preference.

    Args:
        cuda_device: number of the worker's GPU; None without one.
        given: GPU number -> node, from the settings; None asks the system.
        address_of: the PCI address of a GPU.
        sysfs: where the system describes itself.

    Raises:
        ValueError: ``given`` names a node that this machine does not have.
    """
    nodes = online_nodes(sysfs)
    if cuda_device is None:
        return None, Choice(NUMA_TOPIC, "any", "the worker has no CUDA device")
    if given is not None:
        node = given.get(cuda_device)
        if node is None:
            return None, Choice(NUMA_TOPIC, "any", f"the given map does not name GPU {cuda_device}")
        if node not in nodes:
            raise ValueError(
                f"the map puts GPU {cuda_device} at memory node {node}; this machine has "
                f"{nodes or 'no nodes that its system tells of'}"
            )
        return node, Choice(NUMA_TOPIC, str(node), f"given for GPU {cuda_device}")
    if len(nodes) < 2:
        return None, Choice(NUMA_TOPIC, "any", "this machine has one node only")
    address = address_of(cuda_device)
    found = node_of_pci(address, sysfs) if address is not None else None
    if found not in nodes:
        return None, Choice(
            NUMA_TOPIC, "any", f"the system does not say where GPU {cuda_device} is"
        )
    return found, Choice(NUMA_TOPIC, str(found), f"nearest to GPU {cuda_device} at {address}")


def prefer_node(array: npt.NDArray[np.uint8], node: int) -> str | None:
    """Have the pages of ``array`` that are not committed yet come from ``node``.

    Args:
        array: memory that starts on a page border.
        node: the memory node.

    Returns:
        None, or why the system does not do it.
    """
    mbind = _find_mbind()
    if mbind is None:
        return f"no way to call mbind on {sys.platform} {platform.machine()}"
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = (ctypes.c_ulong * (node // bits + 1))()
    words[node // bits] = 1 << (node % bits)
    address: int = array.__array_interface__["data"][0]
    # The kernel takes one bit less than it is told.
    if mbind(address, array.size, _MPOL_PREFERRED, words, len(words) * bits + 1, 0) != 0:
        return f"mbind: {os.strerror(ctypes.get_errno())}"
    return None


def _find_mbind() -> _Mbind | None:
    """The function mbind of libnuma, or the system call itself."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL("libnuma.so.1", use_errno=True).mbind
    except (OSError, AttributeError):
        return _raw_mbind()
    function.argtypes, function.restype = _MBIND_TYPES, ctypes.c_long
    return lambda *arguments: int(function(*arguments))


def _raw_mbind() -> _Mbind | None:
    number = _MBIND_NUMBERS.get(platform.machine())
    if number is None:
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.argtypes, syscall.restype = (ctypes.c_long, *_MBIND_TYPES), ctypes.c_long
    return lambda *arguments: int(syscall(number, *arguments))


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


#: Size of a huge page, and a multiple of it elsewhere than on x86-64.
HUGE_PAGE_BYTES = 2 << 20

#: Topic of the choice made here.
HUGE_PAGES_TOPIC = "huge pages"


def ask_for_huge_pages(
    mapping: mmap.mmap, *, is_shared: bool, wanted: bool, sysfs: Path = _SYSFS
) -> Choice:
    """Ask for transparent huge pages for a whole mapping.

    Args:
        mapping: the memory; nothing of it is committed yet.
        is_shared: it is shared memory, for which the system has a switch of its own.
        wanted: by the settings.
        sysfs: where the system describes itself.
    """
    if not wanted:
        return Choice(HUGE_PAGES_TOPIC, "not asked for", "as set")
    if sys.platform != "linux":
        return Choice(HUGE_PAGES_TOPIC, "no", f"{sys.platform} gives none on request")
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # the kernel is built without
        return Choice(HUGE_PAGES_TOPIC, "no", f"the system refuses: {error.strerror}")
    name = "shmem_enabled" if is_shared else "enabled"
    try:
        text = (sysfs / "kernel/mm/transparent_hugepage" / name).read_text()
    except OSError:
        return Choice(HUGE_PAGES_TOPIC, "asked for", "the system does not say whether it gives any")
    found = re.search(r"\[(\w+)\]", text)
    mode = found[1] if found else "unknown"
    granted = mode in ("always", "madvise", "within_size", "advise", "force")
    return Choice(
        HUGE_PAGES_TOPIC, "yes" if granted else "no", f"the system's switch {name} is {mode!r}"
    )


def advise_huge_pages(ranges: Mapping[int, int]) -> int:
    """Ask for huge pages for memory of somebody else; what is committed already stays as it is.

    It is advice: the content does not change, and a system that has none, or refuses, is no error.

    Args:
        ranges: number of bytes by address. Whole huge pages inside of them are asked for.

    Returns:
        Bytes for which the system took the advice.
    """
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    taken = 0
    for address, num_bytes in ranges.items():
        start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        size = (address + num_bytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if size > 0 and madvise(start, size, mmap.MADV_HUGEPAGE) == 0:
            taken += size
    return taken
