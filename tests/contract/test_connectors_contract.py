from __future__ import annotations

import pytest
import torch

from kvkeep.gpu import host_copy, threads
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.testing.connectors import NUM_PAGES, ConnectorContract, Made


def paged(tensors: list[torch.Tensor], page_bytes: int, **options) -> Made:
    group = GroupLayout("full", len(tensors), page_bytes)
    layout = KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", 4, (group,), 0, 0, "test")
    return Made(PagedGPUConnector(layout, **options), tensors, tensors)


@pytest.fixture(params=["compiled", "compiled, streaming", "numpy"])
def native(request, monkeypatch) -> bool:
    """The ways to copy on the CPU; these copies are too small to stream by themselves."""
    if "streaming" in request.param:
        monkeypatch.setattr(host_copy, "STREAM_BYTES", 0)
    return request.param != "numpy"


class TestPagedConnector(ConnectorContract):
    @pytest.fixture(params=[96, 1344])
    def made(self, request, native):
        size = request.param
        tensors = [torch.zeros(NUM_PAGES, size, dtype=torch.uint8) for _ in range(5)]
        return paged(tensors, size, native=native)


class TestPagedConnectorInThreads(ConnectorContract):
    @pytest.fixture
    def made(self, native, monkeypatch):
        monkeypatch.setattr(threads, "HEAD_START_BYTES", 0)  # these layers are too small to share
        tensors = [torch.zeros(NUM_PAGES, 1344, dtype=torch.uint8) for _ in range(5)]
        return paged(tensors, 1344, copy_threads=3, native=native)


class TestPagedConnectorWithTorch(ConnectorContract):
    @pytest.fixture(params=[1, 2])
    def made(self, request):
        tensors = [torch.zeros(NUM_PAGES, 96, dtype=torch.uint8) for _ in range(5)]
        return paged(tensors, 96, use_torch=True, copy_threads=request.param)


class TestPagedConnectorOnOneStorage(ConnectorContract):
    """All layers interleaved in one storage, tokens before heads in memory, bfloat16."""

    @pytest.fixture
    def made(self, native):
        return paged(self.tensors(), 128, native=native)

    @staticmethod
    def tensors() -> list[torch.Tensor]:
        storage = torch.zeros(NUM_PAGES, 3, 4, 2, 8, dtype=torch.bfloat16)
        return [storage[:, layer].transpose(1, 2) for layer in range(3)]


class TestPagedConnectorOnOneStorageWithTorch(TestPagedConnectorOnOneStorage):
    @pytest.fixture
    def made(self):
        return paged(self.tensors(), 128, use_torch=True)


class TestDenseConnector(ConnectorContract):
    @pytest.fixture(params=["float32", "bfloat16", "int8"])
    def made(self, request, native):
        dtype = getattr(torch, request.param)
        group = GroupLayout("full", 3, 2 * 2 * 64 * dtype.itemsize)
        layout = KVLayout(MemoryFormat.KV_2LTD, request.param, 1, (group,), 2, 64, "test")
        heads_first = [torch.zeros(2, NUM_PAGES, 64, dtype=dtype) for _ in range(6)]
        tensors = [tensor.transpose(0, 1) for tensor in heads_first]
        pairs = [(tensors[2 * layer], tensors[2 * layer + 1]) for layer in range(3)]
        return Made(DenseGPUConnector(layout, native=native), pairs, tensors)


class TestDenseConnectorOfLatents(ConnectorContract):
    @pytest.fixture
    def made(self, native):
        group = GroupLayout("full", 2, 48)
        layout = KVLayout(MemoryFormat.KV_MLA_FMT, "float16", 1, (group,), 1, 24, "test")
        tensors = [torch.zeros(NUM_PAGES, 1, 24, dtype=torch.float16) for _ in range(2)]
        return Made(DenseGPUConnector(layout, native=native), tensors, tensors)
