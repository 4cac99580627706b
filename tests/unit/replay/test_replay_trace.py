"""Traces: the published format, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvkeep.errors import TraceError
from kvkeep.replay.trace import parse_trace, read_trace, trace_of

LINE = {"timestamp": 27482, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 2353]}


def line(**changes):
    return json.dumps({**LINE, **changes}).encode()


def test_a_line_is_a_request():
    trace = parse_trace([line(), b"\n", line(timestamp=27483, hash_ids=[46, 1, 2])])
    first, second = trace.requests
    assert (first.timestamp_ms, first.num_tokens, len(first.keys)) == (27482, 1200, 3)
    assert first.keys[0] is second.keys[0]
    assert len({*first.keys, *second.keys}) == trace.footprint() == 5
    assert trace.chunk_tokens == 512


def test_a_file_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n" + line())
    assert len(read_trace(path).requests) == 2


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[]",
        b'"x"',
        b"{}",
        b"\xff\xfe",
        line(hash_ids=None),
        line(hash_ids=["a", "b", "c"]),
        line(hash_ids=[True, 1, 2]),
        line(hash_ids=[-1, 1, 2]),
        line(hash_ids=[1 << 300, 1, 2]),
        line(hash_ids=[1, 1, 2]),
        line(hash_ids=[]),
        line(input_length=1024),
        line(input_length=1537),
        line(input_length="1200"),
        line(timestamp=None),
    ],
)
def test_a_malformed_line_is_named(bad):
    with pytest.raises(TraceError, match="line 2"):
        parse_trace([line(), bad])


def test_parts_in_time():
    trace = trace_of([[n] for n in range(10)])
    halves = trace.part(0, 0.5), trace.part(0.5, 1)
    assert [len(half.requests) for half in halves] == [5, 5]
    assert halves[0].requests + halves[1].requests == trace.requests
