"""Trace: a recorded workload, read from the JSON lines of the Mooncake traces.

Pure values, callable from any thread. One line is one request:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` is in milliseconds; ``hash_ids`` names the blocks of the prompt (512 tokens each in
the published traces, the last one may be shorter), where equal numbers mean equal tokens with equal
predecessors. (https://github.com/kvcache-ai/Mooncake, Apache-2.0)

read_workload: a recorded workload from a file of any known form, which is told by its content.

Two forms have token ids, which are cut and named as the engine cuts and names them:

- the log of a vLLM server that runs with ``--enable-log-requests`` and
  ``VLLM_LOGGING_LEVEL=DEBUG``, as it is, other lines included;
- JSON lines with ``prompt_token_ids``, or with token ids in ``prompt`` as in requests to the
  completions endpoint of OpenAI's API.

The third is that of :mod:`kvkeep.replay.trace`. Pure but for reading the file, one thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from kvkeep.errors import TraceError
from kvkeep.hashing import KEY_BYTES, ChunkKey, chain_full_chunks

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


#: Tokens in a chunk where the file does not say: kvkeep's own default.
TOKENS_CHUNK = 256
#: Largest number that is a token id for an engine: what 4 bytes hold.
_LARGEST_ID = (1 << 32) - 1
#: vLLM 0.32, vllm/entrypoints/serve/utils/request_logger.py. The prompt's text before may hold
#: anything, so the last match of a line counts.
_VLLM_DETAILS = re.compile(
    rb"Request \S+ details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds shape: "
)
_VLLM_RECEIVED = re.compile(rb"Received request \S+: params: ")
_UNKNOWN = (
    "no line is a request; known are JSON lines with hash_ids or prompt_token_ids, and logs of "
    "vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG"
)
_VLLM_HOW = (
    "the log has requests, but not their token ids; start vLLM with --enable-log-requests, with "
    "VLLM_LOGGING_LEVEL=DEBUG and without --max-log-len"
)


def read_workload(path: Path, *, chunk_tokens: int | None = None) -> Trace:
    """A workload from a file.

    Args:
        path: of the file.
        chunk_tokens: tokens in a chunk (a block of the recording); None takes 512 for Mooncake's
            form, which its published traces have, and 256 for token ids.

    Raises:
        TraceError: it is of no known form, or a line is malformed; names the line.
        OSError: it cannot be read.
    """
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
        lines.seek(0)
        if not first.lstrip().startswith(b"{"):
            return _of_prompts(_from_log(lines), chunk_tokens or TOKENS_CHUNK)
        if b'"hash_ids"' in first:
            return parse_trace(lines, chunk_tokens=chunk_tokens or MOONCAKE_BLOCK_TOKENS)
        return _of_prompts(_from_json(lines), chunk_tokens or TOKENS_CHUNK)


def _of_prompts(prompts: Iterable[tuple[int, list[int]]], chunk_tokens: int) -> Trace:
    """A trace of prompts (time in milliseconds, token ids) whose chunks are named by their hash."""
    root = bytes(KEY_BYTES)
    interned: dict[ChunkKey, ChunkKey] = {}
    requests = []
    for timestamp_ms, ids in prompts:
        data = np.asarray(ids, "<u4").tobytes()
        keys = chain_full_chunks(root, data, chunk_tokens)
        same = tuple(interned.setdefault(key, key) for key in keys)
        requests.append(TraceRequest(timestamp_ms, len(ids), same))
    return Trace(tuple(requests), chunk_tokens)


def _from_log(lines: Iterable[bytes]) -> Iterator[tuple[int, list[int]]]:
    """Prompts of a vLLM log, one millisecond apart: its times are too coarse to order them."""
    count = received = 0
    for number, line in enumerate(lines, start=1):
        match = _VLLM_DETAILS.search(line)
        if match is None:
            received += _VLLM_RECEIVED.search(line) is not None
            continue
        if match[1] != b"None":
            yield count, _checked(_listed(match[1], number), number)
            count += 1
    if not count:
        raise TraceError(_VLLM_HOW if received else _UNKNOWN)


def _listed(text: bytes, number: int) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TraceError(f"line {number} has no list of token ids: {error}") from error


def _from_json(lines: Iterable[bytes]) -> Iterator[tuple[int, list[int]]]:
    """Prompts of JSON lines."""
    count = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"line {number} is no JSON: {error}") from error
        for ids in _prompts_of(record, number):
            yield count, _checked(ids, number)
            count += 1


def _prompts_of(record: object, number: int) -> list[object]:
    """The prompts of one record; the completions endpoint takes several at once."""
    if isinstance(record, dict):
        body = record.get("body")  # OpenAI's batch files have the request there
        fields = record if not isinstance(body, dict) else {**record, **body}
        found = fields.get("prompt_token_ids", fields.get("prompt"))
        if isinstance(found, list):
            return found if found and isinstance(found[0], list) else [found]
    raise TraceError(
        f"line {number} has neither hash_ids nor prompt_token_ids, nor token ids in prompt; texts "
        "must be tokenised first, since the cache names tokens"
    )


def _checked(ids: object, number: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise TraceError(f"line {number}: token ids are no list of whole numbers")
    if any(not 0 <= one <= _LARGEST_ID for one in chain((0,), ids)):
        raise TraceError(f"line {number}: a token id is negative or larger than {_LARGEST_ID}")
    return ids
