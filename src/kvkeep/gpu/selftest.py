"""The self-test of a connector on the caches that are being registered (spec 3.2).

A declared layout is believed only after pages have survived a store, a wipe and a load. The test
writes through the engine's own tensors and copies through the connector, so a wrong stride, pages
or layers that overlap and a page that is larger or smaller than declared show. It uses a few pages
and puts their bytes back, whatever happens. Called from the thread that registers, before the
engine uses its caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.gpu.pages import describe
from kvkeep.memory.base import MemoryObj, References
from kvkeep.memory.factory import initialize_allocator


def run_self_test(connector: GPUConnectorInterface, tensors: Sequence[torch.Tensor]) -> None:
    """Store, wipe, load and compare some pages.

    Args:
        connector: with the caches registered.
        tensors: all of the caches' tensors; dimension 0 is the page (dense: the slot).

    Raises:
        LayoutError: the bytes did not survive; prints the layout and a tensor.
    """
    num_pages = min(len(tensor) for tensor in tensors)
    # not in order, and no neighbours where there are enough pages
    pages = list(dict.fromkeys([num_pages - 1, 0, num_pages // 2]))
    with torch.inference_mode():
        test = _SelfTest(connector, tensors, pages, num_pages)
        try:
            test.run()
        except (RuntimeError, ValueError) as error:
            raise LayoutError(
                f"the KV caches did not survive the self-test: {error}; declared: "
                f"{connector.layout}; first tensor: {describe(tensors[0])}"
            ) from error
        finally:
            test.restore()


class _SelfTest:
    """One run on some pages, which are used and put back."""

    def __init__(
        self,
        connector: GPUConnectorInterface,
        tensors: Sequence[torch.Tensor],
        pages: list[int],
        num_pages: int,
    ) -> None:
        self._connector = connector
        self._tensors = tensors
        self._pages = pages
        beside = {page + step for page in pages for step in (-1, 1)}
        self._others = sorted(beside.intersection(range(num_pages)).difference(pages))
        self._saved = self._read([*pages, *self._others])

    def run(self) -> None:
        """Raises ValueError, saying which step went wrong."""
        page_size = self._connector.layout.page_size
        shape, dtype, fmt = self._connector.chunk_shape(len(self._pages) * page_size)
        size = int(np.prod(shape)) * dtype.itemsize
        memory = initialize_allocator(2 * (size + 64), chunk_bytes=size, huge_pages=False)
        try:
            made = [memory.allocate(shape, dtype, fmt) for _ in range(2)]
            with References(made) as held:
                stored, wiped = held.objects
                self._run(stored, wiped, np.random.default_rng(7))
        finally:
            memory.close()

    def _run(self, stored: MemoryObj, wiped: MemoryObj, random: np.random.Generator) -> None:
        written = [
            [torch.from_numpy(random.integers(0, 256, len(old), np.uint8)) for old in pages]
            for pages in self._read(self._pages)
        ]
        self._write(self._pages, written)
        self._expect(written, "written through the engine's tensors, where layers or pages overlap")
        self._move(stored, to_engine=False)
        self._write(self._pages, [[torch.zeros_like(new) for new in pages] for pages in written])
        self._move(wiped, to_engine=False)
        if wiped.array.any():
            raise ValueError("the connector reads other bytes than the engine's pages")
        self._move(stored, to_engine=True)
        self._expect(written, "stored, wiped and loaded")
        others = [saved[len(self._pages) :] for saved in self._saved]
        if not _equal(self._read(self._others), others):
            raise ValueError("loading pages changed the pages beside them")

    def restore(self) -> None:
        """Put the bytes back that were there before."""
        self._write([*self._pages, *self._others], self._saved)

    def _move(self, obj: MemoryObj, *, to_engine: bool) -> None:
        size = self._connector.layout.page_size
        slots = torch.tensor(self._pages)[:, None] * size + torch.arange(size)
        copy = self._connector.to_gpu if to_engine else self._connector.from_gpu
        copy(obj, 0, slots.numel(), kvcaches=None, slot_mapping=slots.reshape(-1))

    def _expect(self, wanted: list[list[torch.Tensor]], how: str) -> None:
        if not _equal(self._read(self._pages), wanted):
            raise ValueError(f"pages changed that were {how}")

    def _read(self, pages: list[int]) -> list[list[torch.Tensor]]:
        """Bytes on the CPU of each page of each tensor, in the tensor's logical order."""
        return [
            [tensor[page].clone().reshape(-1).view(torch.uint8).cpu() for page in pages]
            for tensor in self._tensors
        ]

    def _write(self, pages: list[int], values: list[list[torch.Tensor]]) -> None:
        for tensor, contents in zip(self._tensors, values, strict=True):
            for page, content in zip(pages, contents, strict=True):
                target = tensor[page]
                target.copy_(content.view(tensor.dtype).reshape(target.shape))


def _equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(
        torch.equal(one, other)
        for ones, others in pairs
        for one, other in zip(ones, others, strict=True)
    )
