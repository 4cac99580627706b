"""DenseTransfer: the copies of one call between dense caches and chunks.

Made by :class:`~kvkeep.gpu.dense.DenseGPUConnector`, once per call; its parts may be copied from
several threads at once. On the CPU tokens move as rows of bytes (``host.py``), at the speed of
``memcpy`` where torch's copies reach a half of it; torch moves them on every other device, and
where the elements of a head are not neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvkeep.gpu.host import ByteArray, HostLayers, HostTask, HostTransfer
from kvkeep.gpu.native_transfer import plan_transfer
from kvkeep.gpu.slots import Int64Array
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
