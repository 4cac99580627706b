"""NUMA placement: the map, the system's own answer, and what the kernel was told."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvkeep.memory import placement
from kvkeep.memory.arena import Arena
from kvkeep.memory.placement import (
    choose_node,
    cuda_address,
    node_of_pci,
    online_nodes,
    prefer_node,
)

NUMA_MAPS = Path("/proc/self/numa_maps")
needs_numa = pytest.mark.skipif(
    not NUMA_MAPS.exists() or not online_nodes(), reason="the system tells of no memory nodes"
)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A machine with nodes 0, 2 and 3; one GPU at node 2, one at a node nobody told the system."""
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/online").write_text("0,2-3\n")
    for address, node in {"0000:3b:00.0": "2", "0000:5e:00.0": "-1"}.items():
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


def address_of(device: int) -> str | None:
    return ["0000:3b:00.0", "0000:5e:00.0", None][device]


def policy_of(array: np.ndarray) -> str:
    start = f"{array.__array_interface__['data'][0]:x} "
    return next(
        line.split()[1] for line in NUMA_MAPS.read_text().splitlines() if line.startswith(start)
    )


def test_nodes_of_a_machine(sysfs: Path, tmp_path: Path) -> None:
    assert online_nodes(sysfs) == [0, 2, 3]
    assert online_nodes(tmp_path / "elsewhere") == []
    assert node_of_pci("0000:3b:00.0", sysfs) == 2
    assert node_of_pci("0000:5e:00.0", sysfs) is None
    assert node_of_pci("0000:ff:00.0", sysfs) is None


@pytest.mark.parametrize(
    ("device", "given", "node", "why"),
    [
        (0, None, 2, "nearest to GPU 0 at 0000:3b:00.0"),
        (1, None, None, "does not say where GPU 1 is"),
        (2, None, None, "does not say where GPU 2 is"),
        (None, None, None, "no CUDA device"),
        (None, {0: 3}, None, "no CUDA device"),
        (0, {0: 3}, 3, "given for GPU 0"),
        (1, {0: 3}, None, "does not name GPU 1"),
        (0, {}, None, "does not name GPU 0"),
    ],
)
def test_the_node_is_given_or_asked_of_the_system(sysfs, device, given, node, why) -> None:
    found, choice = choose_node(device, given, address_of=address_of, sysfs=sysfs)
    assert found == node
    assert why in choice.why
    assert choice.chosen == ("any" if node is None else str(node))


def test_one_node_needs_no_placement(sysfs: Path) -> None:
    (sysfs / "devices/system/node/online").write_text("0\n")
    node, choice = choose_node(0, None, address_of=address_of, sysfs=sysfs)
    assert node is None
    assert "one node only" in choice.why


def test_a_node_that_is_not_there_is_an_error(sysfs: Path) -> None:
    with pytest.raises(ValueError, match=r"GPU 0 at memory node 1; this machine has \[0, 2, 3\]"):
        choose_node(0, {0: 1}, address_of=address_of, sysfs=sysfs)


def test_the_address_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_address(0) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    known = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    assert cuda_address(0) == "0001:3b:00.0"
    assert cuda_address(1) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert cuda_address(0) is None


@needs_numa
@pytest.mark.parametrize("has_library", [True, False])
def test_the_kernel_prefers_the_node(has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over libnuma, and over the system call where there is no libnuma."""
    if not has_library:
        monkeypatch.setattr(placement, "_find_mbind", placement._raw_mbind)
    node = online_nodes()[0]
    arena = Arena(1 << 20, huge_pages=False)
    assert prefer_node(arena.array, node) is None
    assert policy_of(arena.array) == f"prefer:{node}"
    arena.array[:] = 7
    assert (arena.array == 7).all()
    arena.close()


@needs_numa
def test_what_the_kernel_refuses_is_said_and_is_no_error() -> None:
    missing = max(online_nodes()) + 40
    arena = Arena(1 << 20)
    arena.place_on(choose_node(0, {0: online_nodes()[0]})[1], missing)
    assert arena.choices[-1].chosen == "any"
    assert "given for GPU 0, but mbind: " in arena.choices[-1].why
    arena.close()


def test_without_a_way_to_ask_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.platform, "machine", lambda: "toaster")
    assert placement._raw_mbind() is None
    monkeypatch.setattr(placement, "_find_mbind", lambda: None)
    refused = prefer_node(np.zeros(4096, np.uint8), 0)
    assert refused == f"no way to call mbind on {sys.platform} toaster"
