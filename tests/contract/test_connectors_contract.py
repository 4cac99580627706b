from __future__ import annotations

import pytest
import torch

from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.testing.connectors import NUM_PAGES, ConnectorContract, Made


def paged(tensors: list[torch.Tensor], page_bytes: int, **options) -> Made:
    group = GroupLayout("full", len(tensors), page_bytes)
    layout = KVLayout(MemoryFormat.OPAQUE_PAGES, "uint8", 4, (group,), 0, 0, "test")
    return Made(PagedGPUConnector(layout, **options), tensors, tensors)


class TestPagedConnector(ConnectorContract):
    @pytest.fixture(
        params=[
            {},
            {"copy_threads": 3},
            {"use_torch": True},
            {"use_torch": True, "copy_threads": 2},
        ]
    )
    def made(self, request):
        return paged(
            [torch.zeros(NUM_PAGES, 96, dtype=torch.uint8) for _ in range(5)], 96, **request.param
        )


class TestPagedConnectorOnOneStorage(ConnectorContract):
    """All layers interleaved in one storage, tokens before heads in memory, bfloat16."""

    @pytest.fixture(params=[False, True])
    def made(self, request):
        storage = torch.zeros(NUM_PAGES, 3, 4, 2, 8, dtype=torch.bfloat16)
        tensors = [storage[:, layer].transpose(1, 2) for layer in range(3)]
        return paged(tensors, 128, use_torch=request.param)


class TestDenseConnector(ConnectorContract):
    @pytest.fixture(params=["float32", "bfloat16", "int8"])
    def made(self, request):
        dtype = getattr(torch, request.param)
        group = GroupLayout("full", 3, 2 * 2 * 8 * dtype.itemsize)
        layout = KVLayout(MemoryFormat.KV_2LTD, request.param, 1, (group,), 2, 8, "test")
        heads_first = [torch.zeros(2, NUM_PAGES, 8, dtype=dtype) for _ in range(6)]
        tensors = [tensor.transpose(0, 1) for tensor in heads_first]
        pairs = [(tensors[2 * layer], tensors[2 * layer + 1]) for layer in range(3)]
        return Made(DenseGPUConnector(layout), pairs, tensors)


class TestDenseConnectorOfLatents(ConnectorContract):
    @pytest.fixture
    def made(self):
        group = GroupLayout("full", 2, 48)
        layout = KVLayout(MemoryFormat.KV_MLA_FMT, "float16", 1, (group,), 1, 24, "test")
        tensors = [torch.zeros(NUM_PAGES, 1, 24, dtype=torch.float16) for _ in range(2)]
        return Made(DenseGPUConnector(layout), tensors, tensors)
