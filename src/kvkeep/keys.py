"""Chunk keys: a chained cryptographic hash over token ids (docs/formats.md, section 1).

Pure functions on bytes, callable from any thread. The same input gives the same key in every
process, on every machine, whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, NewType, cast

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
