"""What the KV bytes of a chunk look like: formats, sizes and the declared layout of an engine.

Level 0: names and sizes only, no torch. A layout is declared by the connector that registers KV
caches; nothing here or elsewhere guesses one from a tensor's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvkeep.errors import LayoutError

#: Size in bytes of one element, by the name of its dtype.
DTYPE_SIZES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class MemoryFormat(StrEnum):
    """How the bytes of a memory object are arranged.

    A chunk is one contiguous piece of memory in layer-major order, so that a layer is a byte
    range of it (docs/adr/0002). The names give the logical shape.
    """

    KV_2LTD = "KV_2LTD"
    """[2, layers, tokens, hidden]: K and V of all layers. In memory: layers, 2, tokens, hidden."""
    KV_T2D = "KV_T2D"
    """[tokens, 2, hidden]: one layer, K and V of a token side by side."""
    KV_2TD = "KV_2TD"
    """[2, tokens, hidden]: one layer, all K, then all V."""
    KV_MLA_FMT = "KV_MLA_FMT"
    """[1, layers, tokens, latent]: latent attention. In memory: layers, tokens, latent."""
    BINARY = "BINARY"
    """[bytes]: a plain byte buffer."""
    OPAQUE_PAGES = "OPAQUE_PAGES"
    """[layers, pages, page bytes]: whole pages of a paged engine, never interpreted."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One group of layers whose pages have the same size.

    Attributes:
        name: what the group is, ``"full"`` for ordinary attention.
        num_layers: layers in the group.
        layer_page_bytes: bytes that one layer holds for one page of tokens (K and V together).
    """

    name: str
    num_layers: int
    layer_page_bytes: int

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.layer_page_bytes < 1:
            raise LayoutError(f"a layer group needs layers and bytes, got {self}")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The declared layout of an engine's KV caches.

    Attributes:
        fmt: OPAQUE_PAGES for paged engines, KV_2LTD or KV_MLA_FMT for dense tensors.
        dtype: name of the element type (a key of DTYPE_SIZES); ``"uint8"`` where pages are opaque.
        page_size: tokens in a page of the engine; 1 for dense tensors.
        groups: the layer groups, at least one.
        num_kv_heads: KV heads on this rank; 0 where pages are opaque and the engine does not say.
        head_size: elements of one head; 0 likewise.
        engine: what the page bytes depend on beyond their size, as one stable text: engine and
            version, attention backend, physical order, instruction set. Part of the identity.
    """

    fmt: MemoryFormat
    dtype: str
    page_size: int
    groups: tuple[GroupLayout, ...]
    num_kv_heads: int
    head_size: int
    engine: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_SIZES:
            raise LayoutError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPE_SIZES)}")
        if self.fmt not in (
            MemoryFormat.OPAQUE_PAGES,
            MemoryFormat.KV_2LTD,
            MemoryFormat.KV_MLA_FMT,
        ):
            raise LayoutError(f"an engine layout cannot have the format {self.fmt}")
        if self.page_size < 1 or not self.groups or not self.engine:
            raise LayoutError(f"a layout needs a page size, a group and an engine text, got {self}")

    @property
    def num_layers(self) -> int:
        """Layers over all groups."""
        return sum(group.num_layers for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of all groups."""
        return sum(group.num_layers * group.layer_page_bytes for group in self.groups)

    def chunk_bytes(self, num_tokens: int) -> int:
        """Bytes of a chunk of ``num_tokens`` tokens, all layers.

        Raises:
            LayoutError: ``num_tokens`` is not a whole number of pages.
        """
        if num_tokens % self.page_size:
            raise LayoutError(
                f"{num_tokens} tokens are no whole number of pages of {self.page_size} tokens; "
                "choose a chunk size that is a multiple of the engine's page (block) size"
            )
        return num_tokens // self.page_size * self.page_bytes

    def layer_ranges(self, num_tokens: int) -> list[tuple[int, int]]:
        """Byte range [start, end) of every layer inside a chunk of ``num_tokens`` tokens."""
        pages = self.chunk_bytes(num_tokens) // self.page_bytes
        ranges: list[tuple[int, int]] = []
        position = 0
        for group in self.groups:
            for _ in range(group.num_layers):
                end = position + pages * group.layer_page_bytes
                ranges.append((position, end))
                position = end
        return ranges
