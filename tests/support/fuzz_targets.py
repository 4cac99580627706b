"""Every parser of bytes from outside, as a function of bytes that must not fail.

A target takes any bytes, hands them to a parser and checks what it promises: it answers, or raises
one of its documented errors; what it accepts is what was written; it takes no more memory than it
says. Whatever else happens is an exception, which is a finding. ``make fuzz`` feeds them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

from kvkeep.backends.disk import ledger
from kvkeep.backends.disk.directory import chunk_name, key_of, owner_of
from kvkeep.backends.remote import base as remote_base
from kvkeep.backends.remote.base import RemoteReports
from kvkeep.backends.remote.redis_wire import PieceReader, RedisWire
from kvkeep.backends.remote.values import ChunkLoad, LoadRules
from kvkeep.codec.frame import (
    HEADER_BYTES,
    ChunkMeta,
    FrameFault,
    FrameHeader,
    check_payload,
    checksum,
    parse_header,
)
from kvkeep.codec.names import decode_chunk
from kvkeep.config import load_settings
from kvkeep.config.base import RemoteURL
from kvkeep.config.lmcache import translate
from kvkeep.config.load import read_yaml
from kvkeep.errors import CodecError, ConfigError, LookupServiceError, RankError, TraceError
from kvkeep.hashing import KEY_BYTES, ChunkKey
from kvkeep.layout import MemoryFormat
from kvkeep.lookup import protocol
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.shared import MappedPool
from kvkeep.metrics import Metrics
from kvkeep.ranks import base as ranks_base
from kvkeep.ranks.base import Channel
from kvkeep.replay.trace import parse_trace, read_workload
from kvkeep.testing.remote_stores import TestingSink

Target = Callable[[bytes], None]

#: A chunk of two layers as an engine has it, for what carries a whole frame.
FULL = ChunkMeta(MemoryFormat.KV_2LTD, "bfloat16", (2, 2, 8, 16))
KEY, IDENTITY = ChunkKey(bytes(range(KEY_BYTES))), bytes(32)
#: Bytes beyond an output buffer that a decoder must not touch.
_GUARD = 64
_CHECK_BYTES = 8


def frame_header(data: bytes) -> None:
    """A header that is accepted packs to the very bytes that were read."""
    for header in (data, _resealed(data)):
        parsed = parse_header(header)
        if isinstance(parsed, FrameHeader):
            assert parsed.pack() == bytes(header[:HEADER_BYTES])
            assert check_payload(parsed, b"") is not None


def _resealed(data: bytes) -> bytes:
    """The bytes as a header whose checksum is right, as a damaged writer would make it."""
    head = data[: HEADER_BYTES - _CHECK_BYTES].ljust(HEADER_BYTES - _CHECK_BYTES, b"\0")
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(_CHECK_BYTES, "little")


def codec_payload(data: bytes) -> None:
    """A payload of any codec fills its chunk or is refused, and touches nothing else."""
    code, which, payload = data[:1], data[1:2], data[2:]
    shapes: tuple[ChunkMeta, ...] = (
        FULL,
        replace(FULL, dtype="float32"),
        replace(FULL, dtype="float16", shape=(2, 1, 3, 5)),
        ChunkMeta(MemoryFormat.KV_MLA_FMT, "bfloat16", (1, 2, 4, 24)),
        ChunkMeta(MemoryFormat.OPAQUE_PAGES, "uint8", (2, 4, 64)),
    )
    meta = shapes[int.from_bytes(which, "little") % len(shapes)]
    memory = np.full(meta.size_bytes + 2 * _GUARD, 0xA5, np.uint8)
    out = memory[_GUARD:-_GUARD].data
    with contextlib.suppress(CodecError):
        decode_chunk(int.from_bytes(code, "little") % 5, payload, out, meta)
    assert (memory[:_GUARD] == 0xA5).all() and (memory[-_GUARD:] == 0xA5).all()


def remote_value(data: bytes) -> None:
    """A value in a store is a hit only if it is the chunk that was asked for, whole."""
    _offer(data)
    if len(data) > HEADER_BYTES:
        payload = data[HEADER_BYTES:]
        head = bytearray(_resealed(data))
        start = head.find(_template().payload_checksum)
        if start >= 0:
            head[start : start + 16] = checksum(payload)
        _offer(_resealed(bytes(head)) + payload)


@cache
def _template() -> FrameHeader:
    payload = bytes(FULL.size_bytes)
    return FrameHeader(KEY, IDENTITY, FULL, len(payload), checksum(payload))


def _offer(value: bytes) -> None:
    """Let a load read a value, as a connector does."""
    allocator = initialize_allocator(1 << 16, chunk_bytes=FULL.size_bytes, huge_pages=False)

    def allocate(meta: ChunkMeta) -> MemoryObj | None:
        import torch

        return allocator.allocate((meta.size_bytes,), torch.uint8, MemoryFormat.OPAQUE_PAGES)

    obj = allocate(FULL)
    assert obj is not None
    load = ChunkLoad("name", KEY, obj, LoadRules(IDENTITY, FULL, allocate, _reports()))
    target = load.begin(value[:HEADER_BYTES], len(value))
    if target is not None:
        payload = value[HEADER_BYTES:]
        assert len(target) == len(payload)
        target[:] = payload
        load.filled(len(payload))
        load.finish()
    load.end("missing")
    found = load.future.result(0)
    if found is not None:
        header = parse_header(value)
        assert not isinstance(header, FrameFault)
        assert (header.key, header.identity) == (KEY, IDENTITY)
        assert check_payload(header, value[HEADER_BYTES:]) is None
        found.ref_count_down()
    assert allocator.memcheck().num_objects == 0, "memory is still held"
    allocator.close()


@cache
def _reports() -> RemoteReports:
    return RemoteReports(Metrics())


def lookup_message(data: bytes) -> None:
    """A message that is read can be written, and is the same again."""
    for decode in (protocol.decode_request, protocol.decode_reply):
        try:
            message = decode(data)
        except LookupServiceError:
            continue
        assert repr(decode(protocol.encode(message))) == repr(message)
        if isinstance(message, protocol.Lookup):
            message.scope.scope()


def rank_message(data: bytes) -> None:
    """The ranks' messages, one by one and as a stream in pieces."""
    try:
        message = ranks_base.decode(data)
        assert ranks_base.decode(ranks_base.encode(message)[4:]) == message
    except RankError:
        pass
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    try:
        theirs.setblocking(False)
        sent = 0
        while sent < min(len(data), 1 << 16):
            sent += theirs.send(data[sent : sent + 1 + sent % 977])
            while channel.receive(0.0) is not None:
                pass
        theirs.close()
        while channel.receive(0.0) is not None:
            pass
        raise AssertionError("the end of the stream was not noticed")
    except (RankError, BlockingIOError):
        pass
    finally:
        theirs.close()
        channel.close()


def trace_file(data: bytes) -> None:
    """Recorded workloads in every form: a trace whose numbers fit, or a TraceError."""
    try:
        trace = parse_trace(data.splitlines())
        assert all(0 < request.num_tokens <= 512 * len(request.keys) for request in trace.requests)
    except TraceError:
        pass
    with contextlib.suppress(TraceError):
        read_workload(_file(data))


def settings_file(data: bytes) -> None:
    """A settings file is a tree of settings, or an error that says what is wrong."""
    path = _file(data)
    try:
        given = read_yaml(path)
    except ConfigError:
        return
    for read in (lambda: load_settings(yaml_path=path), lambda: translate(given)):
        try:
            read()
        except ConfigError as error:
            assert str(error)


def settings_text(data: bytes) -> None:
    """Values of environment variables, and URLs of stores."""
    names = ("CPU_SIZE", "LOOKUP_TIMEOUT", "IDENTITY_TAGS", "CPU_NUMA", "PLUGINS", "DISK_PATH")
    text = data[1:].decode("utf-8", "surrogateescape").replace("\0", "")
    name = names[int.from_bytes(data[:1], "little") % len(names)]
    try:
        load_settings(env={f"KVKEEP_{name}": text})
    except ConfigError as error:
        assert str(error)
    try:
        url = RemoteURL.parse(text)
    except ConfigError:
        return
    password = url.password or ""
    if len(password) > 7 and text.count(password) == 1:
        assert password not in str(url)


def disk_names(data: bytes) -> None:
    """Names in a cache directory and in a store: a key names exactly one place."""
    text = data.decode("utf-8", "surrogateescape").replace("\0", "")
    fan, _, name = text.partition("/")
    key = key_of(fan, name)
    if key is not None:
        assert str(chunk_name(key)) == f"{fan}/{name}"
    owner, reserved = owner_of(text)
    assert owner is None or (len(owner) == ledger.MEMBER_ID_BYTES and reserved >= 0)
    prefix = remote_base.name_prefix(IDENTITY)
    named = remote_base.key_of(prefix, text)
    assert named is None or remote_base.value_name(prefix, named) == text


def disk_ledger(data: bytes) -> None:
    """The ledger of a shared directory: what verifies is written as it was read."""
    for body in (data, _sealed_ledger(data)):
        state = ledger.decode(body)
        if state is not None and len(state.members) <= ledger.MAX_MEMBERS:
            again = ledger.decode(ledger.encode(state))
            assert again is not None
            assert again.members == state.members


def _sealed_ledger(data: bytes) -> bytes:
    size = ledger.LEDGER_BYTES - _CHECK_BYTES
    body = data[:size].ljust(size, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECK_BYTES, "little")


def redis_answer(data: bytes) -> None:
    """What a Redis server may say: numbers, errors, values; or the connection is given up."""
    ours, theirs = socket.socketpair()
    theirs.sendall(data[:4096])
    theirs.close()
    wire = RedisWire(ours, time.monotonic() + 5)
    try:
        while True:
            if data[:1] == b":":
                PieceReader(wire, [("name", TestingSink())], 4096).read(0)
            elif data[:1] == b"$":
                size = wire.read_size()
                if isinstance(size, int):
                    wire.read_value(memoryview(bytearray(min(size, 4096))))
                    wire.end_value()
            else:
                wire.read_reply()
    except OSError:
        pass
    finally:
        ours.close()


def mapped_view(data: bytes) -> None:
    """Places that rank 0 names lie inside its pool, or are refused."""
    import torch

    fd = os.memfd_create("fuzz")
    os.ftruncate(fd, 8192)
    pool = MappedPool(fd, 8192)
    numbers = np.frombuffer(data[: len(data) // 8 * 8], "<i8").tolist()
    for offset in numbers:
        try:
            view = pool.view(offset, (4096,), torch.uint8, MemoryFormat.OPAQUE_PAGES)
            assert len(view.array) == 4096 and 0 <= offset <= 4096
            view.ref_count_down()
        except ValueError:
            assert not 0 <= offset <= 4096
    pool.close()


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-")


def _file(data: bytes) -> Path:
    path = Path(_folder().name) / "input"
    path.write_bytes(data)
    return path


#: By name; the folder of a target's corpus has that name.
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        frame_header,
        codec_payload,
        remote_value,
        lookup_message,
        rank_message,
        trace_file,
        settings_file,
        settings_text,
        disk_names,
        disk_ledger,
        redis_answer,
        mapped_view,
    )
}
