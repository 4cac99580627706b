"""PagedGPUConnector: whole pages of a paged engine, moved as opaque bytes.

A chunk is ``[layers, pages, page bytes]``, so a layer of it is a byte range. Called from the
engine's threads; calls share nothing that changes, so several may run at once on different pages.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.gpu.device import CopyPlan, DeviceCopier
from kvkeep.gpu.host_copy import ByteArray, HostTask, HostTransfer, plan_transfer
from kvkeep.gpu.pages import (
    Int64Array,
    PageRules,
    PageViews,
    chunk_pages,
    segments_of,
    slots_as_array,
    view_pages,
)
from kvkeep.gpu.selftest import run_self_test
from kvkeep.gpu.threads import CopyThreads, Job
from kvkeep.layout import KVLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj, dtype_name
from kvkeep.memory.placement import advise_huge_pages


class _Pages:
    """Caches as pages, and the same as numpy arrays where they are on the CPU."""

    def __init__(self, views: PageViews, copier: DeviceCopier | None) -> None:
        self.views = views
        self.copier = copier
        self.layers: list[tuple[ByteArray]] = []
        if copier is None:
            self.layers = [(rows.numpy(),) for rows in views.rows]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One call: which pages of which caches belong to which part of which chunk.

    Attributes:
        pages: the caches.
        host: the copies in CPU memory; None where a device copies.
        plan: what the device copies; None where the caches are on the CPU.
        stream: the caller's.
        to_engine: the direction.
        parts: the chunks in as many parts as may be copied at once, layer by layer.
    """

    pages: _Pages
    host: HostTransfer | None
    plan: CopyPlan | None
    stream: torch.cuda.Stream | None
    to_engine: bool
    parts: Sequence[range]

    @property
    def num_chunks(self) -> int:
        """Chunks in the call."""
        if self.host is not None:
            return len(self.host)
        return len(self.plan.chunks) if self.plan is not None else 0

    def copy(self, layers: range, chunks: range) -> None:
        """Copy some layers of some chunks; all of them where the device copies."""
        copier = self.pages.copier
        if copier is not None and self.plan is not None:
            move = copier.scatter if self.to_engine else copier.gather
            move(self.pages.views.rows, layers, self.plan, self.stream)
        elif self.host is not None:
            self.host.copy(layers, chunks)


class PagedGPUConnector(GPUConnectorInterface):
    """For engines whose KV caches are one tensor per layer with the page as dimension 0."""

    def __init__(
        self,
        layout: KVLayout,
        *,
        copy_threads: int = 1,
        huge_pages: bool = False,
        use_torch: bool = False,
        native: bool = True,
    ) -> None:
        """Nothing is allocated and no thread started.

        Args:
            layout: the declared layout: opaque pages, one group of layers.
            copy_threads: threads that copy, the caller's included, where the caches are on the CPU.
            huge_pages: ask for huge pages for registered caches that are on the CPU: an engine
                that has not touched them yet then pays less for the first touch, and copies for the
                translation of addresses.
            use_torch: copy with torch on the CPU, too, as on any other device.
            native: copy with compiled code on the CPU, where the installation has it; else with
                numpy.

        Raises:
            LayoutError: the layout is of another kind.
        """
        if layout.fmt is not MemoryFormat.OPAQUE_PAGES or len(layout.groups) != 1:
            raise LayoutError(f"pages of one layer group are needed, declared are {layout}")
        self.layout = layout
        self._use_torch = use_torch
        self._native = native
        self._huge_pages = huge_pages
        self._threads = CopyThreads(copy_threads)
        self._lock = threading.Lock()
        self._copiers: dict[torch.device, DeviceCopier] = {}  # guarded by _lock
        self._registered: tuple[KVCaches, _Pages] | None = None

    @property
    def element_dtype(self) -> str | None:
        """See :attr:`GPUConnectorInterface.element_dtype`; that of all layers, if it is one."""
        if self._registered is None:
            return None
        dtypes = {dtype_name(cache.dtype) for cache in self._registered[0]}
        return dtypes.pop() if len(dtypes) == 1 else None

    def chunk_shape(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, MemoryFormat]:
        """[layers, pages, page bytes] as uint8; the last page may hold fewer tokens."""
        group = self.layout.groups[0]
        pages = -(-num_tokens // self.layout.page_size)
        shape = (group.num_layers, pages, group.layer_page_bytes)
        return shape, torch.uint8, MemoryFormat.OPAQUE_PAGES

    def register_kv_caches(self, kvcaches: KVCaches) -> None:
        """See :meth:`GPUConnectorInterface.register_kv_caches`."""
        pages = self._see(kvcaches)
        if self._huge_pages and pages.views.device.type == "cpu":
            storages = [rows.untyped_storage() for rows in pages.views.rows]
            advise_huge_pages({storage.data_ptr(): storage.nbytes() for storage in storages})
        self._registered = (kvcaches, pages)
        try:
            run_self_test(self, list(kvcaches))
        except BaseException:
            self._registered = None
            raise

    def batched_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> None:
        """See :meth:`GPUConnectorInterface.batched_from_gpu`."""
        pages, places = self._place(starts, ends, kvcaches, slot_mapping, offset, skip=False)
        self._copy_all(self._transfer(pages, places, memory_objs, to_engine=False))

    def batched_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> None:
        """See :meth:`GPUConnectorInterface.batched_to_gpu`."""
        pages, places = self._place(starts, ends, kvcaches, slot_mapping, offset, skip=True)
        self._copy_all(self._transfer(pages, places, memory_objs, to_engine=True))

    def layerwise_from_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> Generator[None, None, None]:
        """See :meth:`GPUConnectorInterface.layerwise_from_gpu`; wrong arguments raise at once."""
        pages, places = self._place(starts, ends, kvcaches, slot_mapping, offset, skip=False)
        return self._copy_layers(self._transfer(pages, places, memory_objs, to_engine=False))

    def layerwise_to_gpu(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> Generator[None, None, None]:
        """See :meth:`GPUConnectorInterface.layerwise_to_gpu`; wrong arguments raise at once."""
        pages, places = self._place(starts, ends, kvcaches, slot_mapping, offset, skip=True)
        transfer = self._transfer(pages, places, memory_objs, to_engine=True)
        return self._threads.ahead(
            self.layout.num_layers, lambda layer: self._layer_jobs(transfer, layer)
        )

    def close(self) -> None:
        """End the copy threads and let go of the caches."""
        self._threads.close()
        self._registered = None
        with self._lock:
            self._copiers.clear()

    def _see(self, kvcaches: KVCaches) -> _Pages:
        """The pages of caches that were not registered, or are just being registered."""
        views = view_pages(self.layout, kvcaches)
        if views.device.type == "cpu" and not self._use_torch:
            return _Pages(views, None)
        with self._lock:
            copier = self._copiers.get(views.device)
            if copier is None:
                copier = self._copiers[views.device] = DeviceCopier(views.device)
        return _Pages(views, copier)

    def _pages_of(self, kvcaches: KVCaches | None) -> _Pages:
        registered = self._registered
        if registered is not None and (kvcaches is None or kvcaches is registered[0]):
            return registered[1]
        if kvcaches is None:
            raise ValueError("no KV caches were given and none are registered")
        return self._see(kvcaches)

    def _place(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int,
        *,
        skip: bool,
    ) -> tuple[_Pages, list[Int64Array]]:
        """The caches, and the numbers of each chunk's pages in them."""
        pages = self._pages_of(kvcaches)
        if slot_mapping is None:
            raise ValueError("a paged engine's tokens need a slot mapping")
        rules = PageRules(self.layout.page_size, pages.views.num_pages, allow_skip=skip)
        slots = slots_as_array(slot_mapping)
        return pages, chunk_pages(starts, ends, slots, offset, rules)

    def _transfer(
        self,
        pages: _Pages,
        places: list[Int64Array],
        memory_objs: Sequence[MemoryObj],
        *,
        to_engine: bool,
    ) -> _Transfer:
        group = self.layout.groups[0]
        form = (group.num_layers, 1, -1, group.layer_page_bytes)
        chunks: list[ByteArray] = []
        for obj, numbers in zip(memory_objs, places, strict=True):
            chunk = obj.array.reshape(form)
            if chunk.shape[2] != len(numbers):
                raise ValueError(f"{len(numbers)} pages do not fill an object of {chunk.shape[2]}")
            chunks.append(chunk)
        step, copier = pages.views.step, pages.copier
        if copier is not None:
            segments = [segments_of(numbers) for numbers in places]
            plan = copier.plan(segments, [chunk[:, 0] for chunk in chunks], step)
            one = [range(len(plan.chunks))]  # the device copies one thing after the other
            return _Transfer(pages, None, plan, copier.caller_stream(), to_engine, one)
        task = HostTask(pages.layers, step, places, chunks, to_engine)
        host = plan_transfer(task, native=self._native)
        return _Transfer(pages, host, None, None, to_engine, self._host_parts(host, to_engine))

    def _host_parts(self, host: HostTransfer, to_engine: bool) -> list[range]:
        """Layers of a load are queued ahead; each of a store begins and ends with the caller."""
        if to_engine:
            return self._threads.split(len(host))
        return self._threads.split_after(len(host), host.layer_bytes // max(1, len(host)))

    def _copy_all(self, transfer: _Transfer) -> None:
        layers = [range(self.layout.num_layers)]  # all in one: the host waits once for a device
        if transfer.host is not None:
            layers = self._threads.split(self.layout.num_layers)
        chunks = range(transfer.num_chunks)
        self._threads.run([_job(transfer, part, chunks) for part in layers])

    def _copy_layers(self, transfer: _Transfer) -> Generator[None, None, None]:
        for layer in range(self.layout.num_layers):
            self._threads.run(self._layer_jobs(transfer, layer))
            yield

    def _layer_jobs(self, transfer: _Transfer, layer: int) -> list[Job]:
        """One layer in as many jobs as there are threads."""
        one = range(layer, layer + 1)
        return [_job(transfer, one, part) for part in transfer.parts]


def _job(transfer: _Transfer, layers: range, chunks: range) -> Job:
    return lambda: transfer.copy(layers, chunks)
