"""PagedEngine: the memory of a paged engine whose KV is a function of the tokens.

For tests and benchmarks that need to know which bytes are right: the page of layer ``l`` that ends
a prefix holds bytes derived from ``l`` and from every token of that prefix, so a page of another
prompt, another position or another layer is never equal. Use one from one thread at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat

_WIPED = 0xEE


class PagedEngine:
    """KV caches of opaque pages."""

    def __init__(
        self, *, num_pages: int, num_layers: int = 3, page_size: int = 4, page_bytes: int = 64
    ) -> None:
        """Wiped caches.

        Args:
            num_pages: pages in each layer.
            num_layers: layers.
            page_size: tokens in a page.
            page_bytes: bytes of a page in one layer.
        """
        self.layout = KVLayout(
            MemoryFormat.OPAQUE_PAGES,
            "uint8",
            page_size,
            (GroupLayout("full", num_layers, page_bytes),),
            0,
            0,
            "kvkeep.testing",
        )
        self.page_size = page_size
        self.caches = [
            torch.full((num_pages, page_bytes), _WIPED, dtype=torch.uint8)
            for _ in range(num_layers)
        ]

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.page_size)

    def slots(self, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
        """The slot mapping of ``num_tokens`` tokens that lie in ``pages``, int64."""
        table = torch.tensor(list(pages), dtype=torch.int64)[:, None] * self.page_size
        return (table + torch.arange(self.page_size)).reshape(-1)[:num_tokens].contiguous()

    def kv_of(self, tokens: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The right bytes: uint8 [layers, pages, page bytes]; a last page may be filled in part."""
        page_bytes = self.layout.groups[0].layer_page_bytes
        count = self.num_pages_for(len(tokens))
        result = np.empty((len(self.caches), count, page_bytes), np.uint8)
        data = np.asarray(tokens, np.int64)
        prefix = hashlib.sha256()
        for page in range(count):
            prefix.update(data[page * self.page_size : (page + 1) * self.page_size].tobytes())
            for layer in range(len(self.caches)):
                seed = hashlib.sha256(prefix.digest() + layer.to_bytes(4, "little")).digest()
                row = np.frombuffer(seed, np.uint8)
                result[layer, page] = np.resize(row, page_bytes)
        return result

    def prefill(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Compute the KV of ``tokens`` into ``pages``."""
        kv = self.kv_of(tokens)
        for layer, cache in enumerate(self.caches):
            cache.numpy()[list(pages)[: kv.shape[1]]] = kv[layer]

    def wipe(self, pages: Sequence[int]) -> None:
        """Overwrite pages with bytes that are nobody's KV."""
        for cache in self.caches:
            cache[list(pages)] = _WIPED

    def right_pages(self, tokens: Sequence[int], pages: Sequence[int]) -> list[bool]:
        """For each page of the prompt: all layers hold exactly the KV of these tokens."""
        kv = self.kv_of(tokens)
        held = np.stack([cache.numpy()[list(pages)[: kv.shape[1]]] for cache in self.caches])
        return [bool(same) for same in (held == kv).all(axis=(0, 2))]

    def wiped_pages(self, pages: Sequence[int]) -> list[bool]:
        """For each page: no layer of it was written since it was wiped."""
        held = np.stack([cache.numpy()[list(pages)] for cache in self.caches])
        return [bool(same) for same in (held == _WIPED).all(axis=(0, 2))]
