"""Keys: golden vectors, a second reading of docs/formats.md, the same in every process."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.hashing import (
    ChunkKey,
    Extra,
    LayerKey,
    chain_full_chunks,
    chunk_key,
    segment_root,
    split_layers,
)
from kvkeep.identity import CacheIdentity
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat
from kvkeep.tokens import ChunkedTokenDatabase, RequestScope, SegmentTokenDatabase, make_scope

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"
ROOT = bytes(range(32))


def golden_cases() -> list[dict]:
    return json.loads(GOLDEN.read_text())["cases"]


def identity_of(fields: dict) -> CacheIdentity:
    layout = dict(fields["layout"])
    groups = tuple(GroupLayout(**group) for group in layout.pop("groups"))
    layout["fmt"] = MemoryFormat(layout["fmt"])
    rest = {name: value for name, value in fields.items() if name != "layout"}
    rest["tags"] = tuple((name, value) for name, value in rest.get("tags", []))
    return CacheIdentity(layout=KVLayout(groups=groups, **layout), **rest)


def scope_of(fields: dict) -> RequestScope:
    return make_scope(
        salt=fields.get("salt", ""),
        lora=fields.get("lora", ""),
        request_configs=fields.get("request_configs"),
        extras=[Extra(*extra) for extra in fields.get("extras", [])],
    )


def compute(case: dict) -> dict:
    """What the code makes of a golden case."""
    identity = identity_of(case["identity"])
    scope = scope_of(case.get("scope", {}))
    if "separator" in case:
        chunks = SegmentTokenDatabase(identity, separator=case["separator"]).process_tokens(
            case["tokens"], None, scope
        )
    else:
        chunks = ChunkedTokenDatabase(
            identity, save_unfull_chunk=case.get("save_unfull_chunk", False)
        ).process_tokens(case["tokens"], None, scope)
    return {
        "encoded": identity.encode().decode(),
        "root": identity.root().hex(),
        "digest": identity.digest().hex(),
        "ends": list(chunks.ends),
        "keys": [key.hex() for key in chunks.keys],
    }


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_golden_vectors(case):
    assert compute(case) == case["expect"]


def test_no_two_golden_cases_share_a_key():
    """Fault 9: every case differs from every other in one thing that must keep KV apart."""
    keys = [key for case in golden_cases() for key in case["expect"]["keys"]]
    assert len(set(keys)) == len(keys)
    assert len(keys) > 10


@pytest.mark.parametrize("seed", ["0", "1", "4294967295", "random"])
def test_keys_are_equal_in_every_process(seed):
    """Fault 10: keys do not depend on Python's hash(), so PYTHONHASHSEED changes nothing."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import test_keys; "
        "print(json.dumps([test_keys.compute(case) for case in test_keys.golden_cases()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert json.loads(done.stdout) == [case["expect"] for case in golden_cases()]


def by_the_book(root: bytes, tokens: list[int], chunk_size: int) -> list[bytes]:
    """docs/formats.md 1.3 for full chunks, written a second time without kvkeep's code."""
    keys, parent = [], root
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        ids = b"".join(struct.pack("<I", token) for token in tokens[start : start + chunk_size])
        parent = hashlib.sha256(parent + ids).digest()
        keys.append(parent)
    return keys


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=60)


@given(tokens=token_lists, chunk_size=st.integers(1, 9))
def test_chain_is_what_the_format_says(tokens, chunk_size):
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    assert chain_full_chunks(ROOT, data, chunk_size) == by_the_book(ROOT, tokens, chunk_size)


@given(
    tokens=token_lists,
    extras=st.lists(st.tuples(st.integers(0, 100), st.text(max_size=8)), max_size=4),
    full=st.booleans(),
)
def test_tail_is_what_the_format_says(tokens, extras, full):
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    preimage = ROOT + data
    if extras or not full:
        tail = b"kvkeep tail\0" + struct.pack("<Q", len(data))
        for position, content in extras:
            text = content.encode("utf-8", "surrogatepass")
            tail += struct.pack("<QQ", position, len(text)) + text
        preimage += b"\x01" + hashlib.sha256(tail).digest()
    expected = hashlib.sha256(preimage).digest()
    assert chunk_key(ROOT, data, [Extra(*extra) for extra in extras], full=full) == expected


@given(
    first=st.tuples(st.binary(max_size=16), st.booleans()),
    second=st.tuples(st.binary(max_size=16), st.booleans()),
)
def test_full_and_unfull_chunks_never_share_a_key(first, second):
    data_1, data_2 = (data[: len(data) // 4 * 4] for data, _ in (first, second))
    same = (data_1, first[1]) == (data_2, second[1])
    key_1 = chunk_key(ROOT, data_1, [], full=first[1])
    key_2 = chunk_key(ROOT, data_2, [], full=second[1])
    assert (key_1 == key_2) == same


def test_two_images_whose_hashes_share_their_start():
    """Fault 9: the full content hash goes into the chain, never its first 16 bits."""
    one, two = "ab12" + "0" * 60, "ab12" + "1" * 60
    data = struct.pack("<4I", 7, 7, 7, 7)
    keys = {
        chunk_key(ROOT, data, [Extra(position, content)], full=True)
        for content in (one, two)
        for position in (0, 1)
    }
    assert len(keys) == 4


def test_an_image_in_the_first_chunk_names_every_later_chunk():
    """Fault 9: chunks after the image depend on it, too."""
    database = ChunkedTokenDatabase(identity_of(golden_cases()[0]["identity"]))
    tokens = list(range(12))
    plain, one, two = (
        database.process_tokens(tokens, None, RequestScope(extras=extras)).keys
        for extras in ((), (Extra(1, "one"),), (Extra(1, "two"),))
    )
    assert len({*plain, *one, *two}) == 9


def test_fp8_types_never_share_a_key_and_keys_survive_their_text_form():
    """Fault 11: e4m3fn and e5m2 are told apart, and a key that went through hex is itself."""
    fields = golden_cases()[0]["identity"]
    keys = {}
    for dtype in DTYPE_SIZES:
        identity = identity_of({**fields, "layout": {**fields["layout"], "dtype": dtype}})
        keys[dtype] = ChunkedTokenDatabase(identity).process_tokens(list(range(8))).keys
    flat = [key for chain in keys.values() for key in chain]
    assert len(set(flat)) == len(flat)
    assert [bytes.fromhex(key.hex()) for key in flat] == flat


def test_names_with_path_separators_and_long_names():
    """Fault 16: "a/b", "a-b" and a name of 10,000 letters have 32-byte keys of their own."""
    fields = golden_cases()[0]["identity"]
    names = ["a/b", "a-b", "a\\b", "../a", "a" * 10_000, "a" * 10_001]
    keys = [
        ChunkedTokenDatabase(identity_of({**fields, "model": name}))
        .process_tokens(range(4))
        .keys[0]
        for name in names
    ]
    assert len(set(keys)) == len(names)
    for key in keys:
        assert len(key) == 32
        assert key.hex().isalnum()
        assert len(key.hex()) == 64


def test_split_layers_names_each_layer_once():
    key = ChunkKey(ROOT)
    layers = split_layers(key, 3)
    assert layers == [LayerKey(key, 0), LayerKey(key, 1), LayerKey(key, 2)]
    assert split_layers(key, 0) == []


def test_segments_have_another_root():
    assert segment_root(ROOT) == hashlib.sha256(b"kvkeep segment\0" + ROOT).digest()
