"""Does kvkeep move KV of a GPU rightly, and how fast? Less than three minutes on one GPU.

    python benchmarks/cuda_check.py                 on the first GPU
    python benchmarks/cuda_check.py --device cpu    the same steps and code paths on the CPU

Stores and loads random KV, whole and layer by layer, of paged engines (page 16, 32 and 128, bf16
and fp8) and of dense caches, in shuffled pages; compares every bit, and that no page beside them
changed; and does so with kernels still queued on the caller's stream, which a copy must wait for.
Then it prints rates beside a pinned ``cudaMemcpy`` of as many bytes in both directions.

Exit codes: 0 all is right; 1 something is not, and is named; 3 there is no CUDA device here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from kvkeep.bench.rig import Made, engine_over
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat

OK, WRONG, NO_CUDA = 0, 1, 3
HEADS, HEAD_SIZE = 8, 128
CHUNK = 256
ROUNDS = 7


class WrongBytesError(Exception):
    """What came back is not what was stored; the message says where."""


@dataclass(frozen=True)
class Shape:
    """What is moved.

    Attributes:
        page_size: tokens in a page; 0 for dense caches.
        dtype: of the KV.
        layers: layers of the engine.
        tokens: of the prompt.
    """

    page_size: int
    dtype: torch.dtype
    layers: int
    tokens: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * HEADS * HEAD_SIZE * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Of the whole prompt."""
        return self.tokens * self.layers * self.token_bytes

    def __str__(self) -> str:
        form = f"page {self.page_size}" if self.page_size else "dense"
        return f"{self.tokens:,} tokens, {self.layers} layers, {form}, {self.dtype}"


class Check:
    """An engine over caches on one device, and what must be in them."""

    def __init__(self, made: Made, tensors: Sequence[torch.Tensor], shape: Shape) -> None:
        """Of ``tensors`` dimension 0 is the page (dense: the slot)."""
        self._made, self._tensors, self._shape = made, tensors, shape
        self._ids = [(number * 7919) % 50_000 for number in range(shape.tokens)]
        size = max(shape.page_size, 1)
        used = made.order[: shape.tokens // size]
        self._slots = (used[:, None] * size + torch.arange(size)).reshape(-1)
        self._used = used.to(tensors[0].device)

    def all(self) -> None:
        """Both ways, and mixed.

        Raises:
            WrongBytesError: bytes differ.
        """
        for store, load in (
            (self.store, self.load),
            (self.store_layers, self.load_layers),
            (self.store, self.load_layers),
            (self.store_layers, self.load),
        ):
            self._made.engine.clear()
            kept = self._fill()
            store()
            self._wipe()
            before = [tensor.clone() for tensor in self._tensors]
            load()
            self._compare(before, kept, f"{store.__name__}, {load.__name__}")

    def _fill(self) -> list[torch.Tensor]:
        """New KV, written by kernels that are only queued when this returns."""
        kept = []
        for tensor in self._tensors:
            values = _bytes(tensor)
            for _ in range(4):  # on a GPU this is still under way when the store begins
                values.random_(0, 256)
            kept.append(tensor[self._used].clone())
        return kept

    def _wipe(self) -> None:
        for tensor in self._tensors:
            _bytes(tensor).fill_(0x55)

    def _compare(self, before: list[torch.Tensor], kept: list[torch.Tensor], how: str) -> None:
        for number, (tensor, old, wanted) in enumerate(
            zip(self._tensors, before, kept, strict=True)
        ):
            expected = _bytes(old).clone()
            expected[self._used] = _bytes(wanted)
            if not torch.equal(_bytes(tensor), expected):
                wrong = (_bytes(tensor) != expected).flatten(1).any(1).nonzero().flatten()
                raise WrongBytesError(
                    f"{self._shape}: {how}: tensor {number} differs in {len(wrong)} pages, the "
                    f"first one is {int(wrong[0])}"
                )

    def store(self) -> None:
        """In one transfer."""
        done = self._made.engine.store(self._ids, kvcaches=None, slot_mapping=self._slots)
        if done.num_copied_tokens != self._shape.tokens:
            raise WrongBytesError(f"{self._shape}: stored {done}")

    def load(self) -> None:
        """In one transfer."""
        mask = self._made.engine.retrieve(self._ids, kvcaches=None, slot_mapping=self._slots)
        if not bool(mask.all()):
            raise WrongBytesError(f"{self._shape}: loaded {int(mask.sum())} tokens")

    def store_layers(self) -> None:
        """Layer by layer."""
        for _ in self._made.engine.store_layer(self._ids, kvcaches=None, slot_mapping=self._slots):
            pass

    def load_layers(self) -> None:
        """Layer by layer."""
        for _ in self._made.engine.retrieve_layer(
            self._ids, kvcaches=None, slot_mapping=self._slots
        ):
            pass

    def rates(self, out_s: float, in_s: float) -> Iterator[str]:
        """Lines: GB/s of each verb, and its share of the plain copy's rate."""
        clear = self._made.engine.clear
        for name, call, before, limit_s in (
            ("store", self.store, clear, out_s),
            ("load", self.load, None, in_s),
            ("store layerwise", self.store_layers, clear, out_s),
            ("load layerwise", self.load_layers, None, in_s),
        ):
            taken = timed(call, before=before)
            rate = self._shape.num_bytes / taken / 1e9
            yield f"  {name:<16} {rate:7.2f} GB/s  {limit_s / taken:5.2f} of the plain copy"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor), -1).view(torch.uint8)


@contextmanager
def opened(shape: Shape, device: torch.device) -> Iterator[Check]:
    """Caches with half as many pages again, and an engine over them."""
    size = max(shape.page_size, 1)
    pages = shape.tokens // size * 3 // 2
    num_chunks = shape.tokens // CHUNK
    if shape.page_size:
        layout = KVLayout(
            MemoryFormat.OPAQUE_PAGES,
            "uint8",
            size,
            (GroupLayout("full", shape.layers, size * shape.token_bytes),),
            0,
            0,
            "check",
        )
        caches = [
            torch.zeros((pages, 2, size, HEADS * HEAD_SIZE), dtype=shape.dtype, device=device)
            for _ in range(shape.layers)
        ]
        # use_torch: on the CPU, too, by the way that a GPU goes
        paged = PagedGPUConnector(layout, use_torch=True)
        paged.register_kv_caches(caches)
        with engine_over(layout, paged, caches, num_chunks) as made:
            yield Check(made, caches, shape)
        return
    name = str(shape.dtype).removeprefix("torch.")
    group = GroupLayout("full", shape.layers, shape.token_bytes)
    layout = KVLayout(MemoryFormat.KV_2LTD, name, 1, (group,), HEADS, HEAD_SIZE, "check")
    made_pairs = [
        (
            torch.zeros((pages, HEADS, HEAD_SIZE), dtype=shape.dtype, device=device),
            torch.zeros((pages, HEADS, HEAD_SIZE), dtype=shape.dtype, device=device),
        )
        for _ in range(shape.layers)
    ]
    dense = DenseGPUConnector(layout)
    dense.register_kv_caches(made_pairs)
    with engine_over(layout, dense, made_pairs, num_chunks) as made:
        yield Check(made, [tensor for pair in made_pairs for tensor in pair], shape)


def timed(call: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Median seconds of a call that is complete on return."""
    taken = []
    for number in range(ROUNDS + 1):
        if before is not None:
            before()
        begun = time.perf_counter()
        call()
        if number:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def plain_copy(num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Seconds of one plain copy between pinned memory and the device: out of it, and into it."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def run(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    return timed(lambda: run(host, there)), timed(lambda: run(there, host))


def shapes(layers: int, tokens: int) -> list[Shape]:
    """All that is checked."""
    kinds = [(page, dtype) for page in (16, 32, 128) for dtype in (torch.bfloat16,)]
    kinds += [(16, torch.float8_e4m3fn), (0, torch.bfloat16)]
    return [Shape(page, dtype, layers, tokens) for page, dtype in kinds]


def run(device: torch.device, *, layers: int, tokens: int) -> int:
    """Check, measure and print; the exit code."""
    try:
        for shape in shapes(layers, tokens):
            out_s, in_s = plain_copy(shape.num_bytes, device)
            print(
                f"{shape}: plain copy {shape.num_bytes / out_s / 1e9:.2f} GB/s out, "
                f"{shape.num_bytes / in_s / 1e9:.2f} GB/s in"
            )
            with opened(shape, device) as check:
                check.all()
                print("  every bit is right")
                for line in check.rates(out_s, in_s):
                    print(line, flush=True)
    except WrongBytesError as error:
        print(f"WRONG: {error}")
        return WRONG
    return OK


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ..., or cpu.")] = "cuda",
    layers: Annotated[int, typer.Option(help="Layers of the engine.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens, a multiple of 256.")] = 4096,
) -> None:
    """Check the copies of a GPU, and measure them."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu runs the same steps on the CPU")
        raise typer.Exit(NO_CUDA)
    if chosen.type == "cuda":
        print(f"{torch.cuda.get_device_name(chosen)}, torch {torch.__version__}")
    raise typer.Exit(run(chosen, layers=layers, tokens=tokens))


if __name__ == "__main__":
    typer.run(main)
