"""The ranks' wire: length-prefixed msgpack arrays over a Unix stream socket (docs/formats.md).

Every length is bounded; nothing is executed or unpickled. Pure data, usable from any thread.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

from kvkeep.errors import RankError

#: Version of the messages; all ranks must speak the same one.
PROTOCOL = 1
#: A longer message is refused before its body is read.
MAX_MESSAGE_BYTES = 4 << 20
#: In front of each message: the length of its body.
PREFIX = struct.Struct("<I")

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
#: Where a chunk lies in rank 0's pool: offset and size in bytes.
Place = tuple[_Count, _Count]


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Every message starts with its tag."""


class Join(_Message, tag="join", frozen=True):
    """To rank 0: here is rank ``rank`` of an engine with this identity."""

    protocol: _Count
    rank: _Count
    num_ranks: _Count
    identity: _Digest


class Welcome(_Message, tag="welcome", frozen=True):
    """From rank 0, with the descriptor of its pool's memory if that has ``pool_bytes``."""

    session: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
    pool_bytes: _Count


class Plan(_Message, tag="plan", frozen=True):
    """From rank 0: round ``seq`` begins, or (``refused``) does not.

    Attributes:
        seq: number of the round.
        load: the tag of the load.
        refused: it is a miss.
        places: the chunks that rank 0 offers.
    """

    seq: _Count
    load: _Digest
    refused: bool = False
    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=1 << 17)] = ()


class Done(_Message, tag="done", frozen=True):
    """To rank 0: this rank has written so many chunks."""

    seq: _Count
    written: _Count


class Verdict(_Message, tag="verdict", frozen=True):
    """From rank 0: so many chunks count."""

    seq: _Count
    written: _Count


Message = Join | Welcome | Plan | Done | Verdict

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message with its prefix."""
    body = _encoder.encode(message)
    return PREFIX.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """A message from its body.

    Raises:
        RankError: it is none of this protocol.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RankError(f"malformed message of {len(body)} bytes: {error}") from error


def body_size(prefix: bytes | bytearray | memoryview) -> int:
    """The length of the body that comes after this prefix.

    Raises:
        RankError: it is longer than a message may be.
    """
    size: int = PREFIX.unpack(prefix)[0]
    if size > MAX_MESSAGE_BYTES:
        raise RankError(f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return size
