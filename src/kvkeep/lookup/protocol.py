"""The lookup service's wire: one msgpack array per message (docs/formats.md, section 4).

A message is one frame: a msgpack array whose first item is the message's tag, then its fields in
the order below. Every length is bounded; nothing is executed or unpickled. Pure data, usable from
any thread.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kvkeep.errors import LookupServiceError
from kvkeep.hashing import Extra
from kvkeep.tokens import RequestScope

#: Version of the messages; both sides must speak the same one.
PROTOCOL = 2

#: A longer frame is refused by the socket itself, and its sender is disconnected.
MAX_MESSAGE_BYTES = 64 << 20

#: Characters of an error text that travel.
MAX_ERROR_CHARS = 2000

_Seq = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Sums = Annotated[tuple[tuple[_Name, _Count], ...], msgspec.Meta(max_length=65536)]
_Tokens = Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE_BYTES)]


class WireScope(msgspec.Struct, array_like=True, frozen=True):
    """A RequestScope: salt, adapter, tags as (name, value), extras as (position, content)."""

    salt: _Text = ""
    lora: _Text = ""
    tags: Annotated[tuple[tuple[_Text, _Text], ...], msgspec.Meta(max_length=256)] = ()
    extras: Annotated[tuple[tuple[_Count, _Text], ...], msgspec.Meta(max_length=65536)] = ()

    @classmethod
    def of(cls, scope: RequestScope) -> WireScope:
        """The wire form of ``scope``."""
        extras = tuple((extra.position, extra.content) for extra in scope.extras)
        return cls(scope.salt, scope.lora, scope.tags, extras)

    def scope(self) -> RequestScope:
        """The RequestScope again."""
        return RequestScope(
            self.salt, self.lora, self.tags, tuple(Extra(*extra) for extra in self.extras)
        )


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Every message starts with its tag and the number that ties an answer to its question."""

    seq: _Seq


class Hello(_Message, tag="hello", frozen=True):
    """Who are you?"""

    protocol: _Count


class Lookup(_Message, tag="lookup", frozen=True):
    """How long is the longest stored prefix of ``tokens``, little-endian uint32?"""

    lookup_id: _Name
    tokens: _Tokens
    scope: WireScope
    pin: bool


class Start(_Message, tag="start", frozen=True):
    """The same, pinned, answered once everything found is in memory.

    The answer is a :class:`LookupReply` at once, or :class:`Started` and a LookupReply later.
    """

    lookup_id: _Name
    tokens: _Tokens
    scope: WireScope


class Keep(_Message, tag="keep", frozen=True):
    """End what a lookup's lease holds beyond the chunks of the first tokens. Not answered."""

    lookup_id: _Name
    num_tokens: _Count


class Counted(_Message, tag="counted", frozen=True):
    """What lookups came to, for the hit rate. Not answered.

    Tokens of answered lookups, tokens found by tier, and tokens of failed lookups by cause.
    """

    asked: _Count
    found: _Sums
    failed: _Sums


class Unpin(_Message, tag="unpin", frozen=True):
    """End the leases of these lookups. Not answered."""

    lookup_ids: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=65536)]


class Check(_Message, tag="check", frozen=True):
    """What is held and counted?"""


class Numbers(_Message, tag="numbers", frozen=True):
    """What is counted? Nothing is proved for it, unlike ``check``: it may be asked often."""


class Clear(_Message, tag="clear", frozen=True):
    """Remove every chunk, from all tiers or from those named."""

    locations: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=64)] = ()


class HelloReply(_Message, tag="hello_reply", frozen=True):
    """This worker: its place, its chunk size and the digest of its CacheIdentity."""

    protocol: _Count
    rank: _Count
    world_size: _Count
    chunk_size: _Count
    identity: bytes


class LookupReply(_Message, tag="lookup_reply", frozen=True):
    """Tokens found, and (tier, tokens) of the runs in which they were, from the first on."""

    found: _Count
    tiers: _Sums = ()


class Started(_Message, tag="started", frozen=True):
    """Not yet: chunks are on their way into memory. The answer follows."""


class CheckReply(_Message, tag="check_reply", frozen=True):
    """Leases, bytes and chunks of the worker, and its metrics by name."""

    open_leases: _Count
    used_bytes: _Count
    free_bytes: _Count
    capacity_bytes: _Count
    num_chunks: _Count
    metrics: dict[str, float]


class NumbersReply(_Message, tag="numbers_reply", frozen=True):
    """The worker's metrics by name."""

    metrics: dict[str, float]


class ClearReply(_Message, tag="clear_reply", frozen=True):
    """Chunks removed."""

    num_chunks: _Count


class ErrorReply(_Message, tag="error_reply", frozen=True):
    """The question could not be answered; ``seq`` is 0 if it could not be read either."""

    message: str


Request = Hello | Lookup | Start | Keep | Counted | Unpin | Check | Numbers | Clear
Reply = HelloReply | LookupReply | Started | CheckReply | NumbersReply | ClearReply | ErrorReply

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """A question from its bytes.

    Raises:
        LookupServiceError: they are no question of this protocol.
    """
    return _decode(_request_decoder, data)


def number_of(data: bytes) -> int:
    """The number of a question the rest of which cannot be read; 0 if it has none."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0
    number = fields[1] if isinstance(fields, list) and len(fields) > 1 else 0
    return number if type(number) is int and 0 < number < 1 << 63 else 0


def decode_reply(data: bytes) -> Reply:
    """An answer from its bytes.

    Raises:
        LookupServiceError: they are no answer of this protocol.
    """
    return _decode(_reply_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LookupServiceError(f"malformed message of {len(data)} bytes: {error}") from error
