"""What a codec promises. Start here to write one, or to use one.

    Codec                  encode, decode, and whether it suits an engine's chunks
    ├── RawCodec    0      the bytes as they are in memory
    ├── ZstdCodec   1      the same bytes, compressed
    ├── Fp8Codec    2      lossy: 8-bit floats with a scale per block of elements
    └── Int8Codec   3      lossy: 8-bit integers with a scale per channel

A codec turns the bytes of a chunk in memory into the payload of a frame and back. The frame says
which codec it was, how long the payload is and its checksum, so a payload is decoded only after its
checksum was found right; a codec still takes it for hostile. Codecs are stateless: every method may
be called from any thread, several at once, and lets go of the interpreter's lock while it works.
Tiers call ``encode_chunk`` and ``decode_chunk`` of :mod:`kvkeep.codec.names`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from kvkeep.codec.frame import Buffer, ChunkMeta
from kvkeep.layout import KVLayout


class Codec(ABC):
    """One way to write the bytes of a chunk."""

    #: Name in the settings.
    name: ClassVar[str]
    #: Byte 14 of a frame's header; never given to another codec.
    code: ClassVar[int]
    #: What comes back may differ from what was given. Then the name is part of the identity.
    lossy: ClassVar[bool] = False

    def why_not(self, layout: KVLayout) -> str | None:
        """Why it cannot encode chunks of this layout, as one sentence for people; None: it can."""
        return None

    @abstractmethod
    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer | None:
        """The payload of a frame.

        Args:
            payload: all bytes of the chunk in memory; not changed, and not kept.
            meta: what they are.

        Returns:
            The encoded bytes, which may be ``payload`` itself. None if the chunk is to be kept raw:
            encoding would save nothing, or lose more than the codec promises.
        """

    @abstractmethod
    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """Fill ``out`` with the chunk.

        Whatever ``encoded`` is, nothing outside of ``out`` is written, and no more memory is taken
        than a small multiple of ``meta.size_bytes``. After an error ``out`` means nothing.

        Args:
            encoded: the payload of a frame with this codec.
            out: writable bytes, ``meta.size_bytes`` long.
            meta: what the chunk is in memory.

        Raises:
            CodecError: these bytes are no such payload.
        """
