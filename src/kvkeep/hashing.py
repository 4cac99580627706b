"""Chunk keys: a chained cryptographic hash over token ids (docs/formats.md, section 1).

Pure functions on bytes, callable from any thread. The same input gives the same key in every
process, on every machine, whatever PYTHONHASHSEED is.

Token ids as bytes: every form in which engines hand them over, checked and made one.

The form is that of docs/formats.md 1.2: little-endian uint32. Pure functions, callable from any
thread; torch tensors are read without importing torch.

PrefixHashCache: keys of recent prompts; a prompt that grew is not hashed again from its start.

What was hashed is found again by comparing token ids, never a hash of them. Callable from any
thread.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, cast

import numpy as np
import numpy.typing as npt

from kvkeep.errors import TokenError

#: Name of a chunk: 32 bytes, the hash of its identity, its predecessors and its tokens.
ChunkKey = NewType("ChunkKey", bytes)

KEY_BYTES = 32
TOKEN_BYTES = 4


class LayerKey(NamedTuple):
    """Name of one layer of a chunk. Chunks are stored whole; a layer is a range of one."""

    chunk: ChunkKey
    layer: int


class Extra(NamedTuple):
    """A non-text input (an image, say) that is part of the prompt.

    Attributes:
        position: index of the token at which it starts.
        content: the full hash of its content, as text. Never a shortened one.
    """

    position: int
    content: str


def split_layers(key: ChunkKey, num_layers: int) -> list[LayerKey]:
    """The names of the layers of a chunk, in order."""
    return [LayerKey(key, layer) for layer in range(num_layers)]


def chain_full_chunks(parent: bytes, data: bytes, chunk_size: int) -> list[ChunkKey]:
    """Keys of all full chunks of ``data`` without extras, each hashed after its predecessor.

    Args:
        parent: 32 bytes, the root or the key of the preceding chunk.
        data: token ids as little-endian uint32.
        chunk_size: tokens in a full chunk.
    """
    sha256 = hashlib.sha256
    step = chunk_size * TOKEN_BYTES
    view = memoryview(data)  # its slices copy nothing, and neither does update()
    keys: list[bytes] = []
    append = keys.append
    for start in range(0, len(data) - step + 1, step):
        digest = sha256(parent)
        digest.update(view[start : start + step])
        parent = digest.digest()
        append(parent)
    return cast("list[ChunkKey]", keys)


def chunk_key(parent: bytes, data: bytes, extras: Sequence[Extra], *, full: bool) -> ChunkKey:
    """Key of one chunk, which may be unfull or hold extras.

    A full chunk without extras is hashed as parent and tokens alone. Any other chunk gets a tail of
    33 bytes (docs/formats.md 1.3), so that no two different inputs have the same preimage.

    Args:
        parent: 32 bytes, the root or the key of the preceding chunk.
        data: the chunk's token ids as little-endian uint32.
        extras: non-text inputs with positions relative to the chunk's start.
        full: the chunk has ``chunk_size`` tokens.
    """
    if full and not extras:
        return ChunkKey(hashlib.sha256(parent + data).digest())
    tail = hashlib.sha256(b"kvkeep tail\0")
    tail.update(len(data).to_bytes(8, "little"))
    for extra in extras:
        content = extra.content.encode("utf-8", "surrogatepass")
        tail.update(extra.position.to_bytes(8, "little"))
        tail.update(len(content).to_bytes(8, "little"))
        tail.update(content)
    return ChunkKey(hashlib.sha256(parent + data + b"\x01" + tail.digest()).digest())


def segment_root(root: bytes) -> bytes:
    """Parent of every segment key: segments have no predecessors and never equal a chunk's key."""
    return hashlib.sha256(b"kvkeep segment\0" + root).digest()


#: The largest token id.
MAX_TOKEN_ID = 2**32 - 1

#: Ids that are narrowed in memory which a thread keeps; longer prompts get memory of their own.
_SCRATCH_IDS = 1 << 20


class _Scratch(threading.local):
    """Memory of one thread, where ids are narrowed. A fresh block costs more than the work does."""

    ids = np.empty(0, "<u4")

    def take(self, count: int) -> npt.NDArray[np.uint32]:
        """Room for ``count`` ids, until this thread asks again."""
        if count > _SCRATCH_IDS:
            return np.empty(count, "<u4")
        if count > len(self.ids):
            self.ids = np.empty(count, "<u4")
        return self.ids[:count]


_scratch = _Scratch()


def as_token_bytes(tokens: object) -> bytes:
    """Token ids as little-endian uint32 bytes.

    Args:
        tokens: a sequence of ints, a one-dimensional integer numpy array or torch tensor (any
            device), or an ``array('I')``.

    Raises:
        TokenError: an id is negative or does not fit 32 bits, or the input is no flat sequence of
            integers.
    """
    if isinstance(tokens, array) and tokens.typecode == "I" and tokens.itemsize == TOKEN_BYTES:
        return tokens.tobytes() if sys.byteorder == "little" else _swapped(tokens)
    if isinstance(tokens, (list, tuple)):
        try:
            return as_token_bytes(array("I", tokens))
        except (OverflowError, TypeError) as error:
            raise TokenError(f"token ids must be integers from 0 to 2**32-1: {error}") from error
    if hasattr(tokens, "detach"):
        try:
            tokens = tokens.detach().cpu().numpy()
        except TypeError as error:  # an element type that numpy does not have is no integer
            raise TokenError(f"token ids must be integers: {error}") from error
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray)):
        return as_token_bytes(list(tokens))
    raise TokenError(f"cannot read token ids from {type(tokens).__name__}")


def _swapped(tokens: array[int]) -> bytes:
    """The bytes of ``tokens`` in little-endian order on a big-endian machine."""
    copy = array("I", tokens)
    copy.byteswap()
    return copy.tobytes()


def _array_bytes(tokens: npt.NDArray[np.generic]) -> bytes:
    """Check a numpy array of ids and narrow it to uint32."""
    if tokens.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, got shape {tokens.shape}")
    if tokens.size == 0:
        return b""
    if tokens.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers, got {tokens.dtype}")
    if tokens.dtype.newbyteorder("=") == np.uint32:
        return tokens.astype("<u4", copy=False).tobytes()
    _check_range(tokens)
    narrow = _scratch.take(len(tokens))
    np.copyto(narrow, tokens, casting="unsafe")
    return narrow.tobytes()


def _check_range(tokens: npt.NDArray[np.generic]) -> None:
    """Refuse ids that do not fit: seen as unsigned numbers, negative ids are the largest ones."""
    kind, width = tokens.dtype.kind, tokens.dtype.itemsize
    limit = min(MAX_TOKEN_ID, 2 ** (8 * width - 1) - 1 if kind == "i" else MAX_TOKEN_ID)
    if int(tokens.view(f"{tokens.dtype.str[0]}u{width}").max()) > limit:
        low, high = int(tokens.min()), int(tokens.max())
        raise TokenError(f"token ids must lie in 0..2**32-1, got {low}..{high}")


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


class PrefixHashCache:
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
