"""RawCodec: the bytes as they are in memory, without a copy."""

from __future__ import annotations

from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CODEC_RAW, Buffer, ChunkMeta
from kvkeep.errors import CodecError


class RawCodec(Codec):
    """No encoding."""

    name = "raw"
    code = CODEC_RAW

    def encode(self, payload: Buffer, meta: ChunkMeta) -> Buffer:
        """``payload`` itself."""
        return payload

    def decode(self, encoded: Buffer, out: memoryview, meta: ChunkMeta) -> None:
        """One copy."""
        source, target = memoryview(encoded).cast("B"), out.cast("B")
        if source.nbytes != target.nbytes:
            raise CodecError(f"{source.nbytes} raw bytes for a chunk of {target.nbytes}")
        target[:] = source
