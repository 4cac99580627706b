"""DenseGPUConnector: engines whose K and V are known, as one tensor each per layer.

Tokens are copied in token-major order, so what is stored does not depend on the strides of the
engine's tensors: a chunk is KV_2LTD [2, layers, tokens, heads * head size] (KV_MLA_FMT [1, layers,
tokens, latent]), each layer of it KV_2TD. Called from the engine's threads; calls share nothing
that changes.

DenseTransfer: the copies of one call between dense caches and chunks.

Made by :class:`~kvkeep.gpu.dense.DenseGPUConnector`, once per call; its parts may be copied from
several threads at once. On the CPU tokens move as rows of bytes (``host.py``), at the speed of
``memcpy`` where torch's copies reach a half of it; torch moves them on every other device, and
where the elements of a head are not neighbours.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvkeep.errors import LayoutError
from kvkeep.gpu.base import GPUConnectorInterface, KVCaches
from kvkeep.gpu.host_copy import ByteArray, HostLayers, HostTask, HostTransfer, plan_transfer
from kvkeep.gpu.pages import Int64Array, describe, slots_as_array, slots_of
from kvkeep.gpu.selftest import run_self_test
from kvkeep.gpu.threads import CopyThreads, Job
from kvkeep.layout import KVLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj

#: K and V of each layer (the latent alone for KV_MLA_FMT), [slots, heads, head size] each.
Layers = list[tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tokens of a chunk are, for torch.

    Attributes:
        chunk: [2 or 1, layers, tokens, heads, head size], a view of pool memory.
        rows: tokens of the chunk that move, None for all.
        slots: their slots, a slice where they are neighbours.
    """

    chunk: torch.Tensor
    rows: torch.Tensor | None
    slots: torch.Tensor | slice


class DenseTransfer:
    """Which tokens of which caches belong to which part of which chunk."""

    def __init__(
        self,
        layers: Layers,
        objs: Sequence[MemoryObj],
        slots: Sequence[Int64Array],
        *,
        to_engine: bool,
        native: bool,
    ) -> None:
        """Plan the copies.

        Args:
            layers: the caches.
            objs: the chunks, of as many layers and tokens.
            slots: of each chunk's tokens; negative where a token does not move.
            to_engine: the direction.
            native: copy with compiled code where that can be done.
        """
        self._layers = layers
        self._to_engine = to_engine
        self._places: list[_Place] = []
        self._host: HostTransfer | None = None
        seen = as_bytes(layers)
        if seen is None:
            first = layers[0][0]
            self._places = [
                _place(obj, found, first) for obj, found in zip(objs, slots, strict=True)
            ]
            return
        chunks: list[ByteArray] = []
        for obj, found in zip(objs, slots, strict=True):
            # in memory: layers, 2 or 1, tokens, hidden (docs/adr/0002)
            shape = (len(layers), len(layers[0]), len(found), *seen[0][0].shape[1:])
            chunks.append(obj.array.reshape(shape))
        self._host = plan_transfer(HostTask(seen, 1, slots, chunks, to_engine), native=native)

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._places) if self._host is None else len(self._host)

    def copy(self, layers: range, chunks: range) -> None:
        """Copy some layers of some chunks; complete on return.

        On CUDA in the order of the caller's stream, which is waited for once at the end.
        """
        if self._host is not None:
            self._host.copy(layers, chunks)
            return
        move = _copy_in if self._to_engine else _copy_out
        with torch.inference_mode():  # the mode belongs to the thread; caches may be made in it
            for layer in layers:
                for place in self._places[chunks.start : chunks.stop]:
                    move(self._layers[layer], place, layer)
            device = self._layers[0][0].device
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def as_bytes(layers: Layers) -> HostLayers | None:
    """The caches as bytes, or None where numpy cannot see them so.

    [slots, bytes of a token] where heads are neighbours, else [slots, heads, bytes of a head].
    """
    result: list[tuple[ByteArray, ...]] = []
    for layer in layers:
        if any(tensor.device.type != "cpu" or tensor.stride(-1) != 1 for tensor in layer):
            return None
        result.append(tuple(tensor.detach().view(torch.uint8).numpy() for tensor in layer))
    size = result[0][0].shape[-1]
    arrays = [array for layer in result for array in layer]
    if all(array.shape[1] == 1 or array.strides[1] == size for array in arrays):
        return [tuple(array.reshape(len(array), -1) for array in layer) for layer in result]
    return result


def _place(obj: MemoryObj, slots: Int64Array, like: torch.Tensor) -> _Place:
    kept = np.flatnonzero(slots >= 0)
    rows = None if len(kept) == len(slots) else torch.from_numpy(kept)
    chunk = obj.tensor
    index = _as_index(slots[kept], like.device)
    return _Place(chunk.view(*chunk.shape[:-1], *like.shape[1:]), rows, index)


def _as_index(slots: Int64Array, device: torch.device) -> torch.Tensor | slice:
    """A slice where slots are neighbours, else their numbers on the device."""
    if len(slots) and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots).to(device)


def _copy_out(tensors: tuple[torch.Tensor, ...], place: _Place, layer: int) -> None:
    """Copy one layer of a chunk out of the engine."""
    for part, tensor in enumerate(tensors):
        place.chunk[part, layer].copy_(tensor[place.slots], non_blocking=True)


def _copy_in(tensors: tuple[torch.Tensor, ...], place: _Place, layer: int) -> None:
    """Copy one layer of a chunk into the engine."""
    for part, tensor in enumerate(tensors):
        source = place.chunk[part, layer]
        if place.rows is not None:
            source = source[place.rows]
        if isinstance(place.slots, slice):
            tensor[place.slots].copy_(source, non_blocking=True)
        else:
            tensor.index_copy_(0, place.slots, source.to(tensor.device, non_blocking=True))


class DenseGPUConnector(GPUConnectorInterface):
    """For caches that are one (K, V) pair per layer, each [slots, heads, head size].

    Any strides will do. With KV_MLA_FMT each layer is one tensor [slots, 1, latent].
    """

    def __init__(self, layout: KVLayout, *, copy_threads: int = 1, native: bool = True) -> None:
        """Nothing is allocated and no thread started.

        Args:
            layout: the declared layout: KV_2LTD or KV_MLA_FMT, page size 1, one group of layers.
            copy_threads: threads that copy, the caller's included.
            native: copy with compiled code on the CPU, where the installation has it; else with
                numpy.

        Raises:
            LayoutError: the layout is of another kind or contradicts itself.
        """
        self._parts = 1 if layout.fmt is MemoryFormat.KV_MLA_FMT else 2
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        hidden = layout.num_kv_heads * layout.head_size
        layer_bytes = self._parts * hidden * self._dtype.itemsize
        if (
            layout.fmt is MemoryFormat.OPAQUE_PAGES
            or layout.page_size != 1
            or [group.layer_page_bytes for group in layout.groups] != [layer_bytes]
        ):
            raise LayoutError(
                "dense tensors need KV_2LTD or KV_MLA_FMT, a page size of 1 and one group of "
                f"{layer_bytes} bytes per token and layer, declared are {layout}"
            )
        self.layout = layout
        self._hidden = hidden
        self._native = native
        self._threads = CopyThreads(copy_threads)
        self._registered: KVCaches | None = None

    def chunk_shape(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, MemoryFormat]:
        """[2 or 1, layers, tokens, heads * head size] in the engine's dtype."""
        shape = (self._parts, self.layout.num_layers, num_tokens, self._hidden)
        return shape, self._dtype, self.layout.fmt

    def register_kv_caches(self, kvcaches: KVCaches) -> None:
        """See :meth:`GPUConnectorInterface.register_kv_caches`."""
        layers = self._see(kvcaches)
        self._registered = kvcaches
        try:
            run_self_test(self, [tensor for layer in layers for tensor in layer])
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
        where = (kvcaches, slot_mapping, offset)
        self._copy_all(self._transfer(memory_objs, starts, ends, where, to_engine=False))

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
        where = (kvcaches, slot_mapping, offset)
        self._copy_all(self._transfer(memory_objs, starts, ends, where, to_engine=True))

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
        where = (kvcaches, slot_mapping, offset)
        transfer = self._transfer(memory_objs, starts, ends, where, to_engine=False)

        def copy_layers() -> Generator[None, None, None]:
            for layer in range(self.layout.num_layers):
                self._threads.run(self._layer_jobs(transfer, layer))
                yield

        return copy_layers()

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
        where = (kvcaches, slot_mapping, offset)
        transfer = self._transfer(memory_objs, starts, ends, where, to_engine=True)
        return self._threads.ahead(
            self.layout.num_layers, lambda layer: self._layer_jobs(transfer, layer)
        )

    def close(self) -> None:
        """End the copy thread and let go of the caches."""
        self._threads.close()
        self._registered = None

    def _see(self, kvcaches: KVCaches | None) -> Layers:
        """The tensors of each layer, checked against the declared layout."""
        caches = kvcaches if kvcaches is not None else self._registered
        if caches is None:
            raise ValueError("no KV caches were given and none are registered")
        if len(caches) != self.layout.num_layers:
            raise LayoutError(f"{len(caches)} KV caches for the layers of {self.layout}")
        layers: Layers = []
        content = (self.layout.num_kv_heads, self.layout.head_size)
        for number, entry in enumerate(caches):
            layer = (entry,) if isinstance(entry, torch.Tensor) else tuple(entry)
            if len(layer) != self._parts:
                raise LayoutError(f"layer {number} has {len(layer)} tensors: {self.layout}")
            for tensor in layer:
                if tuple(tensor.shape[1:]) != content or tensor.dtype != self._dtype:
                    raise LayoutError(f"layer {number} has {describe(tensor)}: {self.layout}")
            layers.append(layer)
        sizes = {len(tensor) for layer in layers for tensor in layer}
        if len(sizes) != 1:
            raise LayoutError(f"layers have different lengths {sorted(sizes)}: {self.layout}")
        return layers

    def _slots(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        slot_mapping: torch.Tensor | None,
        offset: int,
    ) -> list[tuple[int, Int64Array]]:
        """(first token, slots) of each chunk."""
        pairs = list(zip(starts, ends, strict=True))
        if slot_mapping is None:
            return [(start, np.arange(start, end, dtype=np.int64)) for start, end in pairs]
        slots = slots_as_array(slot_mapping)
        return [(start, slots_of(slots, start, end, offset)) for start, end in pairs]

    def _transfer(
        self,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        where: tuple[KVCaches | None, torch.Tensor | None, int],
        *,
        to_engine: bool,
    ) -> DenseTransfer:
        """Check the arguments and plan the copies; ``where`` is caches, slot mapping, offset."""
        kvcaches, slot_mapping, offset = where
        layers = self._see(kvcaches)
        num_slots = len(layers[0][0])
        slots = self._slots(starts, ends, slot_mapping, offset)
        for obj, (start, found) in zip(memory_objs, slots, strict=True):
            wrong = (found >= num_slots) | (found < (-1 if to_engine else 0))
            if wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"token {start + at} has slot {int(found[at])}, slots are 0 to {num_slots - 1}"
                )
            if tuple(obj.metadata.shape) != self.chunk_shape(len(found))[0]:
                raise ValueError(f"{len(found)} tokens do not fill an object of {obj.metadata}")
        numbers = [found for _, found in slots]
        return DenseTransfer(layers, memory_objs, numbers, to_engine=to_engine, native=self._native)

    def _copy_all(self, transfer: DenseTransfer) -> None:
        chunks = range(len(transfer))
        parts = self._threads.split(self.layout.num_layers)
        self._threads.run([_job(transfer, layers, chunks) for layers in parts])

    def _layer_jobs(self, transfer: DenseTransfer, layer: int) -> list[Job]:
        """One layer in as many jobs as there are threads."""
        one = range(layer, layer + 1)
        return [_job(transfer, one, part) for part in self._threads.split(len(transfer))]


def _job(transfer: DenseTransfer, layers: range, chunks: range) -> Job:
    return lambda: transfer.copy(layers, chunks)
