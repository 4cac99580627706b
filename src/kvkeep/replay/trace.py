"""Trace: a recorded workload, read from the JSON lines of the Mooncake traces.

Pure values, callable from any thread. One line is one request:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds; ``hash_ids`` names the blocks of the prompt (512 tokens each in
the published traces, the last one may be shorter), where equal numbers mean equal tokens with equal
predecessors. (https://github.com/kvcache-ai/Mooncake, Apache-2.0)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvkeep.errors import TraceError
from kvkeep.keys import KEY_BYTES, ChunkKey

#: Tokens in a block of the published traces.
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        timestamp_ms: when it came, in milliseconds after the start of the recording.
        num_tokens: tokens of its prompt.
        keys: its chunks in order. Where they hold more tokens than the prompt has, the last one is
            shorter than a chunk; where they hold fewer, the tail fills no chunk and is never kept.
    """

    timestamp_ms: int
    num_tokens: int
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload.

    Attributes:
        requests: in order of time.
        chunk_tokens: tokens in a chunk.
    """

    requests: tuple[TraceRequest, ...]
    chunk_tokens: int

    def footprint(self) -> int:
        """Number of different chunks."""
        return len({key for request in self.requests for key in request.keys})

    def part(self, start: float, end: float) -> Trace:
        """The requests from one share of the trace to another, 0 to 1."""
        count = len(self.requests)
        chosen = self.requests[int(start * count) : int(end * count)]
        return Trace(chosen, self.chunk_tokens)


def read_trace(path: Path, *, chunk_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """A trace from a file; see :func:`parse_trace`.

    Raises:
        TraceError: it is not a trace.
        OSError: it cannot be read.
    """
    with path.open("rb") as lines:
        return parse_trace(lines, chunk_tokens=chunk_tokens)


def parse_trace(lines: Iterable[bytes], *, chunk_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    """A trace from its lines; empty ones are skipped.

    Args:
        lines: JSON objects in UTF-8; see the module.
        chunk_tokens: tokens in a block.

    Raises:
        TraceError: a line is malformed, or its length contradicts its blocks.
    """
    interned: dict[int, ChunkKey] = {}
    requests = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                requests.append(_parse_line(line, chunk_tokens, interned))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise TraceError(f"line {number}: {type(error).__name__}: {error}") from error
    return Trace(tuple(requests), chunk_tokens)


def trace_of(prompts: Iterable[Sequence[int]], *, chunk_tokens: int = 256) -> Trace:
    """A trace of prompts that are given as numbers of full chunks, one per second."""
    interned: dict[int, ChunkKey] = {}
    requests = (
        TraceRequest(1000 * second, len(ids) * chunk_tokens, _keys(ids, interned))
        for second, ids in enumerate(prompts)
    )
    return Trace(tuple(requests), chunk_tokens)


def _parse_line(line: bytes, chunk_tokens: int, interned: dict[int, ChunkKey]) -> TraceRequest:
    record = json.loads(line)
    ids = record["hash_ids"]
    num_tokens = record["input_length"]
    timestamp = record["timestamp"]
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    if type(num_tokens) is not int or not isinstance(timestamp, int | float):
        raise ValueError("input_length and timestamp must be numbers")
    if len(set(ids)) != len(ids):
        raise ValueError("a block occurs twice in one prompt")
    if not (len(ids) - 1) * chunk_tokens < num_tokens <= len(ids) * chunk_tokens:
        raise ValueError(
            f"{num_tokens} tokens do not fill {len(ids)} blocks of {chunk_tokens} tokens"
        )
    return TraceRequest(int(timestamp), num_tokens, _keys(ids, interned))


def _keys(ids: Sequence[int], interned: dict[int, ChunkKey]) -> tuple[ChunkKey, ...]:
    for number in ids:
        if number not in interned:
            interned[number] = ChunkKey(number.to_bytes(KEY_BYTES, "big"))
    return tuple(interned[number] for number in ids)
