"""ChainMemo: keys of recent prompts, so that a prompt that grew is not hashed again from its start.

What was hashed is found again by comparing token ids, never a hash of them. Callable from any
thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvkeep.keys import TOKEN_BYTES, ChunkKey, chain_full_chunks

#: Bytes that the remembered prompts may hold: their token ids and their keys.
MEMO_BYTES = 64 << 20
#: Prompts remembered per first chunk: conversations that share a system prompt.
MEMO_SIBLINGS = 8
#: What one remembered key takes as a Python object in a list.
_KEY_COST_BYTES = 73


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """The full chunks of a prompt.

    Attributes:
        ids: their token ids as little-endian uint32.
        keys: their keys.
    """

    ids: bytes
    keys: list[ChunkKey]

    @property
    def cost_bytes(self) -> int:
        return len(self.ids) + _KEY_COST_BYTES * len(self.keys)


class ChainMemo:
    """Hashes chains of full chunks and remembers the latest ones."""

    def __init__(self, chunk_size: int) -> None:
        """Remember nothing yet.

        Args:
            chunk_size: tokens in a chunk.
        """
        self._chunk_size = chunk_size
        self._step = chunk_size * TOKEN_BYTES
        self._lock = threading.Lock()
        # (root, ids of the first chunk) -> prompts that start with it, the latest one last
        self._entries: OrderedDict[tuple[bytes, bytes], list[_Prompt]]  # guarded by _lock
        self._entries = OrderedDict()
        self._held_bytes = 0  # guarded by _lock

    def chain(self, root: bytes, data: bytes) -> list[ChunkKey]:
        """Keys of the full chunks of a prompt; what was hashed lately is not hashed again.

        Args:
            root: 32 bytes, the root of the chain.
            data: token ids as little-endian uint32.
        """
        length = len(data) // self._step * self._step
        if length == 0:
            return []
        name = (root, data[: self._step])
        with self._lock:
            siblings = list(self._entries.get(name, ()))
            if siblings:
                self._entries.move_to_end(name)
        best, known = None, 0
        for sibling in reversed(siblings):
            common = self._common(data, length, sibling.ids)
            if common > known:
                best, known = sibling, common
                if common == length:
                    break
        keys = best.keys[: known // self._step] if best is not None else []
        if known < length:
            parent = keys[-1] if keys else root
            keys += chain_full_chunks(parent, data[known:length], self._chunk_size)
            grown = best if best is not None and known == len(best.ids) else None
            self._remember(name, _Prompt(data[:length], keys.copy()), grown)
        return keys

    def _common(self, data: bytes, length: int, other: bytes) -> int:
        """Bytes of whole equal chunks at the start of ``data[:length]`` and ``other``."""
        shorter = min(length, len(other))
        # startswith compares in place; a slice of all of it is the same object
        if data.startswith(other[:shorter]):
            return shorter
        left = np.frombuffer(data, np.uint32, shorter // TOKEN_BYTES)
        right = np.frombuffer(other, np.uint32, shorter // TOKEN_BYTES)
        differs = int(np.argmax(left != right)) * TOKEN_BYTES
        return differs // self._step * self._step

    def _remember(self, name: tuple[bytes, bytes], prompt: _Prompt, grown: _Prompt | None) -> None:
        """Keep ``prompt``, in place of ``grown`` if it continues that one."""
        with self._lock:
            siblings = self._entries.setdefault(name, [])
            if grown is not None and grown in siblings:
                siblings.remove(grown)
                self._held_bytes -= grown.cost_bytes
            siblings.append(prompt)
            self._held_bytes += prompt.cost_bytes
            if len(siblings) > MEMO_SIBLINGS:
                self._held_bytes -= siblings.pop(0).cost_bytes
            self._entries.move_to_end(name)
            while self._held_bytes > MEMO_BYTES and len(self._entries) > 1:
                _, dropped = self._entries.popitem(last=False)
                self._held_bytes -= sum(old.cost_bytes for old in dropped)
