"""GPUConnector: moves KV between an engine's memory and memory objects.

Works on any torch device, the CPU included. One connector belongs to one worker; calls come from
the engine's thread, one at a time. Positions are token indices of the prompt: chunk ``i`` of a call
holds tokens ``starts[i]`` to ``ends[i]``, and ``slot_mapping[t - offset]`` is the slot of token
``t``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any

import torch

from kvkeep.layout import KVLayout, MemoryFormat
from kvkeep.memory.base import MemoryObj

#: Slot of a token whose page must not be written (already valid, or shared with other requests).
SKIP_SLOT = -1

#: One tensor per layer for paged engines, one (K, V) pair per layer for dense ones.
KVCaches = Sequence[Any]


class GPUConnectorInterface(ABC):
    """Copies chunks in and out of an engine's KV caches.

    Attributes:
        layout: the declared layout.
    """

    layout: KVLayout

    @property
    def element_dtype(self) -> str | None:
        """Element type of the registered caches, also where the layout takes pages as bytes.

        None if it is unknown. Codecs need it.
        """
        return None if self.layout.dtype == "uint8" else self.layout.dtype

    @abstractmethod
    def chunk_shape(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, MemoryFormat]:
        """(shape, dtype, format) to allocate for a chunk of ``num_tokens`` tokens."""

    @abstractmethod
    def register_kv_caches(self, kvcaches: KVCaches) -> None:
        """Declare the caches that later calls use when they pass ``kvcaches=None``.

        Checks them and runs the self-test, which stores, wipes, loads and compares pages.

        Raises:
            LayoutError: they do not match the declared layout, or do not survive the self-test.
        """

    @abstractmethod
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
        """Copy chunks out of the engine; complete on return.

        Args:
            memory_objs: one per chunk, allocated as :meth:`chunk_shape` says.
            starts: first token of each chunk.
            ends: token after the last of each chunk.
            kvcaches: the caches, or None for the registered ones.
            slot_mapping: int64 [tokens - offset], the slot of each token; None for dense caches in
                token order (slot t holds token t).
            offset: leading tokens that ``slot_mapping`` leaves out.

        Raises:
            ValueError: a slot is missing or negative, or tokens of a page are not neighbours in it.
        """

    @abstractmethod
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
        """Copy chunks into the engine; complete on return.

        Pages whose slots are SKIP_SLOT are not written. Otherwise as :meth:`batched_from_gpu`.
        """

    @abstractmethod
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
        """Copy out layer by layer: each ``next()`` completes one more layer, in order.

        Yields exactly ``layout.num_layers`` times. Closing it early is allowed.
        """

    @abstractmethod
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
        """Copy in layer by layer: each ``next()`` completes one more layer, in order.

        The next layer is fetched meanwhile. Yields exactly ``layout.num_layers`` times. Closing it
        early waits for what is in flight.
        """

    def from_gpu(
        self,
        memory_obj: MemoryObj,
        start: int,
        end: int,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> None:
        """One chunk; see :meth:`batched_from_gpu`."""
        self.batched_from_gpu(
            [memory_obj],
            [start],
            [end],
            kvcaches=kvcaches,
            slot_mapping=slot_mapping,
            offset=offset,
        )

    def to_gpu(
        self,
        memory_obj: MemoryObj,
        start: int,
        end: int,
        *,
        kvcaches: KVCaches | None,
        slot_mapping: torch.Tensor | None,
        offset: int = 0,
    ) -> None:
        """One chunk; see :meth:`batched_to_gpu`."""
        self.batched_to_gpu(
            [memory_obj],
            [start],
            [end],
            kvcaches=kvcaches,
            slot_mapping=slot_mapping,
            offset=offset,
        )

    @abstractmethod
    def close(self) -> None:
        """Wait for copies in flight and let go of the caches."""
