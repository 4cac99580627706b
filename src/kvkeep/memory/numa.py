"""NUMA: which memory node is nearest to a GPU, and how to have a pool's memory there.

Copies between a GPU and memory of another node are slower. The node is a preference, not a demand:
when it is full, memory comes from another one, and nobody is killed for it. Called once, when a
pool is made; callable from any thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.memory.report import Choice

#: Topic of the choices made here.
TOPIC = "NUMA node"
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
        return None, Choice(TOPIC, "any", "the worker has no CUDA device")
    if given is not None:
        node = given.get(cuda_device)
        if node is None:
            return None, Choice(TOPIC, "any", f"the given map does not name GPU {cuda_device}")
        if node not in nodes:
            raise ValueError(
                f"the map puts GPU {cuda_device} at memory node {node}; this machine has "
                f"{nodes or 'no nodes that its system tells of'}"
            )
        return node, Choice(TOPIC, str(node), f"given for GPU {cuda_device}")
    if len(nodes) < 2:
        return None, Choice(TOPIC, "any", "this machine has one node only")
    address = address_of(cuda_device)
    found = node_of_pci(address, sysfs) if address is not None else None
    if found not in nodes:
        return None, Choice(TOPIC, "any", f"the system does not say where GPU {cuda_device} is")
    return found, Choice(TOPIC, str(found), f"nearest to GPU {cuda_device} at {address}")


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
