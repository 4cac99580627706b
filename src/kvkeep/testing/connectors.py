"""ConnectorContract: what every GPUConnector must do, as a pytest class.

Subclass it, override the fixture ``made``, and pytest runs all of it. The cases use 20 pages
(dense: slots) of a few tokens; what is compared are the bytes of the engine's own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvkeep.gpu.base import SKIP_SLOT, GPUConnectorInterface
from kvkeep.memory.base import MemoryAllocatorInterface, MemoryObj
from kvkeep.memory.factory import initialize_allocator

#: Pages in the caches that ``made`` returns.
NUM_PAGES = 20
#: Pages of the prompt in the cases, and where they are copied to.
SOURCE, TARGET = [7, 3, 19, 0, 12, 13], [1, 2, 18, 5, 6, 14]
#: Pages per chunk.
CHUNK_PAGES = 2


@dataclass(frozen=True)
class Made:
    """A connector and caches for it.

    Attributes:
        connector: not registered.
        kvcaches: as the connector takes them.
        tensors: all tensors in them; dimension 0 has NUM_PAGES pages (dense: slots).
    """

    connector: GPUConnectorInterface
    kvcaches: Sequence[Any]
    tensors: Sequence[torch.Tensor]


class ConnectorContract:
    """Tests that every connector must pass."""

    @pytest.fixture
    def made(self) -> Made:
        """Override it: a new connector with caches, which the contract fills and closes."""
        raise NotImplementedError

    @pytest.fixture
    def filled(self, made: Made) -> Iterator[Made]:
        """Caches with random bytes in every page."""
        generator = torch.Generator().manual_seed(11)
        for tensor in made.tensors:
            for page in tensor:
                size = page.numel() * page.element_size()
                values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
                page.copy_(values.view(page.dtype).reshape(page.shape))
        yield made
        made.connector.close()

    @pytest.fixture
    def chunks(self, made: Made) -> Iterator[list[MemoryObj]]:
        """Memory for the chunks of the prompt; its pool must be whole again at the end."""
        memory = initialize_allocator(1 << 22, chunk_bytes=None, huge_pages=False)
        objs = [self._allocate(memory, made) for _ in _starts(made)]
        yield objs
        for obj in objs:
            obj.ref_count_down()
        assert memory.memcheck().used_bytes == 0
        memory.close()

    @staticmethod
    def _allocate(memory: MemoryAllocatorInterface, made: Made) -> MemoryObj:
        tokens = CHUNK_PAGES * made.connector.layout.page_size
        obj = memory.allocate(*made.connector.chunk_shape(tokens))
        assert obj is not None
        return obj

    @pytest.mark.parametrize("layerwise_in", [False, True])
    @pytest.mark.parametrize("layerwise_out", [False, True])
    def test_pages_arrive_bit_for_bit(
        self, filled: Made, chunks: list[MemoryObj], layerwise_out: bool, layerwise_in: bool
    ) -> None:
        """Out in either form and in in either form; no other page changes."""
        before = [_bytes(tensor) for tensor in filled.tensors]
        _out(filled, chunks, _slots(filled, SOURCE), layerwise=layerwise_out)
        assert all(map(torch.equal, before, map(_bytes, filled.tensors)))
        _in(filled, chunks, _slots(filled, TARGET), layerwise=layerwise_in)
        for old, tensor in zip(before, filled.tensors, strict=True):
            expected = old.clone()
            expected[TARGET] = old[SOURCE]
            assert torch.equal(_bytes(tensor), expected)

    @pytest.mark.parametrize("layerwise", [False, True])
    @pytest.mark.parametrize("skipped", [[0], [0, 1], [3], [1, 2, 4], [0, 1, 2, 3, 4, 5]])
    def test_skipped_pages_keep_their_bytes(
        self, filled: Made, chunks: list[MemoryObj], skipped: list[int], layerwise: bool
    ) -> None:
        """Pages whose slots are SKIP_SLOT are not written."""
        before = [_bytes(tensor) for tensor in filled.tensors]
        _out(filled, chunks, _slots(filled, SOURCE), layerwise=False)
        slots = _slots(filled, TARGET).view(len(TARGET), -1)
        slots[skipped] = SKIP_SLOT
        _in(filled, chunks, slots.reshape(-1), layerwise=layerwise)
        kept = [number for number in range(len(TARGET)) if number not in skipped]
        for old, tensor in zip(before, filled.tensors, strict=True):
            expected = old.clone()
            for number in kept:
                expected[TARGET[number]] = old[SOURCE[number]]
            assert torch.equal(_bytes(tensor), expected)

    def test_offset_names_the_first_token_with_a_slot(
        self, filled: Made, chunks: list[MemoryObj]
    ) -> None:
        """Chunks behind the offset move; a chunk before it is a ValueError."""
        starts, ends = _starts(filled), _ends(filled)
        slots = _slots(filled, SOURCE)[starts[1] :]
        where: dict[str, Any] = {"kvcaches": filled.kvcaches, "offset": starts[1]}
        where["slot_mapping"] = slots
        before = [_bytes(tensor) for tensor in filled.tensors]
        filled.connector.batched_from_gpu(chunks[1:], starts[1:], ends[1:], **where)
        where["slot_mapping"] = _slots(filled, TARGET)[starts[1] :]
        filled.connector.batched_to_gpu(chunks[1:], starts[1:], ends[1:], **where)
        for old, tensor in zip(before, filled.tensors, strict=True):
            moved = slice(CHUNK_PAGES, None)
            assert torch.equal(_bytes(tensor)[TARGET[moved]], old[SOURCE[moved]])
        with pytest.raises(ValueError, match="token 0 has no slot"):
            filled.connector.batched_to_gpu(chunks, starts, ends, **where)

    def test_layerwise_forms_yield_once_per_layer_and_may_be_closed(
        self, filled: Made, chunks: list[MemoryObj]
    ) -> None:
        """Also a generator that is closed after any number of layers ends cleanly."""
        slots = _slots(filled, SOURCE)
        num_layers = filled.connector.layout.num_layers
        for form in (filled.connector.layerwise_from_gpu, filled.connector.layerwise_to_gpu):
            for count in range(num_layers + 1):
                steps = form(
                    chunks,
                    _starts(filled),
                    _ends(filled),
                    kvcaches=filled.kvcaches,
                    slot_mapping=slots,
                )
                for _ in range(count):
                    next(steps)
                if count == num_layers:
                    with pytest.raises(StopIteration):
                        next(steps)
                steps.close()

    def test_wrong_slots_are_named_and_move_nothing(
        self, filled: Made, chunks: list[MemoryObj]
    ) -> None:
        """A missing, negative or too large slot raises before the first byte moves."""
        before = [_bytes(tensor) for tensor in filled.tensors]
        for chunk in chunks:
            chunk.array[:] = 0x5A
        starts, ends = _starts(filled), _ends(filled)
        size = filled.connector.layout.page_size
        good = _slots(filled, SOURCE)
        beyond, negative = good.clone(), good.clone()
        beyond[-size:] = torch.arange(size) + NUM_PAGES * size
        negative[-size:] = SKIP_SLOT
        out, into = filled.connector.batched_from_gpu, filled.connector.batched_to_gpu
        cases: list[tuple[torch.Tensor, list[Callable[..., object]]]]
        cases = [(good[:-1], [out, into]), (beyond, [out, into]), (negative, [out])]
        for slots, forms in cases:
            for form in forms:
                with pytest.raises(ValueError, match=r"token \d+ has"):
                    form(chunks, starts, ends, kvcaches=filled.kvcaches, slot_mapping=slots)
        assert all(map(torch.equal, before, map(_bytes, filled.tensors)))
        assert all((chunk.array == 0x5A).all() for chunk in chunks)

    def test_registered_caches_need_not_be_given(
        self, filled: Made, chunks: list[MemoryObj]
    ) -> None:
        """Registering tests the caches and leaves every byte as it was."""
        before = [_bytes(tensor) for tensor in filled.tensors]
        slots = _slots(filled, SOURCE)
        starts, ends = _starts(filled), _ends(filled)
        with pytest.raises(ValueError, match="none are registered"):
            filled.connector.batched_from_gpu(
                chunks, starts, ends, kvcaches=None, slot_mapping=slots
            )
        filled.connector.register_kv_caches(filled.kvcaches)
        assert all(map(torch.equal, before, map(_bytes, filled.tensors)))
        filled.connector.batched_from_gpu(chunks, starts, ends, kvcaches=None, slot_mapping=slots)
        target = _slots(filled, TARGET)
        filled.connector.batched_to_gpu(chunks, starts, ends, kvcaches=None, slot_mapping=target)
        for old, tensor in zip(before, filled.tensors, strict=True):
            assert torch.equal(_bytes(tensor)[TARGET], old[SOURCE])


def _starts(made: Made) -> list[int]:
    step = CHUNK_PAGES * made.connector.layout.page_size
    return [step * number for number in range(len(SOURCE) // CHUNK_PAGES)]


def _ends(made: Made) -> list[int]:
    return [start + CHUNK_PAGES * made.connector.layout.page_size for start in _starts(made)]


def _slots(made: Made, pages: list[int]) -> torch.Tensor:
    size = made.connector.layout.page_size
    return (torch.tensor(pages)[:, None] * size + torch.arange(size)).reshape(-1)


def _out(made: Made, chunks: list[MemoryObj], slots: torch.Tensor, *, layerwise: bool) -> None:
    form = made.connector.layerwise_from_gpu if layerwise else made.connector.batched_from_gpu
    _move(form, made, chunks, slots)


def _in(made: Made, chunks: list[MemoryObj], slots: torch.Tensor, *, layerwise: bool) -> None:
    form = made.connector.layerwise_to_gpu if layerwise else made.connector.batched_to_gpu
    _move(form, made, chunks, slots)


def _move(
    form: Callable[..., Any], made: Made, chunks: list[MemoryObj], slots: torch.Tensor
) -> None:
    steps = form(chunks, _starts(made), _ends(made), kvcaches=made.kvcaches, slot_mapping=slots)
    if steps is not None:
        assert len(list(steps)) == made.connector.layout.num_layers


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, page bytes]: a copy of all pages, in the tensor's logical order."""
    pages = [page.clone().contiguous().reshape(-1).view(torch.uint8).cpu() for page in tensor]
    return torch.stack(pages)
