"""Token databases: every form of ids, masks, tails, inputs that are no text, segments, the memo."""

from __future__ import annotations

import gc
import threading
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvkeep import hashing as chain_memo
from kvkeep import hashing as token_ids
from kvkeep.errors import IdentityError, MaskError, TokenError
from kvkeep.hashing import Extra, PrefixHashCache, chain_full_chunks, chunk_key
from kvkeep.identity import CacheIdentity
from kvkeep.layout import GroupLayout, KVLayout, MemoryFormat
from kvkeep.tokens import (
    ChunkedTokenDatabase,
    RequestScope,
    SegmentTokenDatabase,
    as_token_bytes,
    make_scope,
)

LAYOUT = KVLayout(
    fmt=MemoryFormat.OPAQUE_PAGES,
    dtype="uint8",
    page_size=4,
    groups=(GroupLayout("full", 2, 64),),
    num_kv_heads=0,
    head_size=0,
    engine="engine",
)
IDENTITY = CacheIdentity("model", "revision", LAYOUT, chunk_size=4)
ids = st.integers(0, 2**32 - 1)


class OwnSequence(Sequence):
    """A read-only sequence such as engines wrap their token lists in."""

    def __init__(self, values):
        self._values = values

    def __getitem__(self, index):
        return self._values[index]

    def __len__(self):
        return len(self._values)


def plain_bytes(tokens) -> bytes:
    return b"".join(int(token).to_bytes(4, "little") for token in tokens)


# --- forms of token ids


@given(st.lists(ids, max_size=40))
def test_every_form_gives_the_same_bytes(tokens):
    expected = plain_bytes(tokens)
    forms = [
        tokens,
        tuple(tokens),
        array("I", tokens),
        array("Q", tokens),
        OwnSequence(tokens),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=np.uint64),
        np.array(tokens, dtype=">u4"),
        np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2],
    ]
    for form in forms:
        assert as_token_bytes(form) == expected, type(form)


def test_ids_of_one_prompt_never_show_through_in_another(monkeypatch):
    """Ids are narrowed in memory that is used again, up to a length; results are their own."""
    monkeypatch.setattr(token_ids, "_SCRATCH_IDS", 8)
    prompts = [np.arange(length, dtype=np.int64) * 3 for length in (4, 8, 9, 3, 8, 20, 1)]
    results = [as_token_bytes(prompt) for prompt in prompts]
    assert results == [plain_bytes(prompt.tolist()) for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_narrow_tensors(dtype):
    assert as_token_bytes(torch.tensor([1, 2, 100], dtype=dtype)) == plain_bytes([1, 2, 100])


@pytest.mark.parametrize("empty", [[], (), array("I"), np.array([]), torch.tensor([]), range(0)])
def test_no_tokens_is_a_miss_and_no_error(empty):
    assert as_token_bytes(empty) == b""
    chunks = ChunkedTokenDatabase(IDENTITY, save_unfull_chunk=True).process_tokens(empty, empty)
    assert (chunks.num_tokens, list(chunks), chunks.keys, len(chunks)) == (0, [], [], 0)
    assert chunks.end_of(0) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        [None],
        [[1, 2]],
        array("q", [-1]),
        np.array([-1]),
        np.array([2**32]),
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(5),
        torch.tensor([-1]),
        torch.tensor([2**32]),
        torch.tensor([[1, 2]]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor(5),
        "123",
        b"1234",
        {1, 2},
        {1: 2},
        None,
        7,
        pytest.param(iter([1]), id="an iterator"),
    ],
    ids=repr,
)
def test_wrong_token_ids_are_refused(wrong):
    with pytest.raises(TokenError):
        as_token_bytes(wrong)


# --- chunks, masks, tails


@given(
    tokens=st.lists(ids, max_size=40),
    chunk_size=st.integers(1, 7),
    masked_chunks=st.integers(0, 4),
    save_unfull=st.booleans(),
)
def test_chunks_tile_what_is_not_masked(tokens, chunk_size, masked_chunks, save_unfull):
    identity = replace(IDENTITY, chunk_size=chunk_size)
    database = ChunkedTokenDatabase(identity, save_unfull_chunk=save_unfull)
    num_masked = min(masked_chunks, len(tokens) // chunk_size) * chunk_size
    mask = [False] * num_masked + [True] * (len(tokens) - num_masked)
    chunks = database.process_tokens(tokens, mask)

    covered = len(tokens) if save_unfull else len(tokens) // chunk_size * chunk_size
    whole = database.process_tokens(tokens)
    found = list(chunks)
    assert len(found) == len(chunks)
    position = num_masked
    for start, end, key in found:
        assert start == position < end
        assert end - start == chunk_size or (end == len(tokens) and save_unfull)
        assert key == whole.keys[start // chunk_size]
        position = end
    assert position == max(covered, num_masked)
    assert chunks.keys == whole.keys
    assert [chunks.end_of(n) for n in range(len(chunks.keys) + 1)] == [0, *whole.ends]


@given(st.lists(ids, min_size=1, max_size=40), st.lists(ids, min_size=1, max_size=40))
def test_two_prompts_share_exactly_their_common_chunks(one, two):
    database = ChunkedTokenDatabase(IDENTITY)
    keys_1, keys_2 = database.process_tokens(one).keys, database.process_tokens(two).keys
    common = 0
    while one[: (common + 1) * 4] == two[: (common + 1) * 4] and (common + 1) * 4 <= len(one):
        common += 1
    assert keys_1[:common] == keys_2[:common]
    assert not set(keys_1[common:]) & set(keys_2[common:])


def test_an_unfull_tail_has_its_own_key_and_never_that_of_a_full_chunk():
    database = ChunkedTokenDatabase(IDENTITY, save_unfull_chunk=True)
    six, eight = database.process_tokens(range(6)), database.process_tokens(range(8))
    assert list(six.ends) == [4, 6]
    assert six.keys[0] == eight.keys[0]
    assert six.keys[1] != eight.keys[1]
    assert list(database.process_tokens(range(3)).ends) == [3]
    assert ChunkedTokenDatabase(IDENTITY).process_tokens(range(3)).keys == []


def test_masks_are_checked_against_the_chunk_size():
    database = ChunkedTokenDatabase(IDENTITY)
    for mask in ([False, True] * 4, [False] * 3 + [True] * 5, [True] * 7, [True] * 4 + [False] * 4):
        with pytest.raises(MaskError):
            database.process_tokens(range(8), mask)


def test_known_keys_give_the_same_plan_as_their_tokens():
    database = ChunkedTokenDatabase(IDENTITY)
    chunks = database.process_tokens(range(12), [False] * 4 + [True] * 8)
    assert list(database.process_hashes(chunks.keys, 4)) == list(chunks)
    assert list(database.process_hashes([], 0)) == []
    with pytest.raises(MaskError):
        database.process_hashes(chunks.keys, 3)
    with pytest.raises(TokenError, match="32 bytes"):
        database.process_hashes([b"short"])


# --- scopes and inputs that are no text


def test_scopes_are_part_of_the_identity():
    database = ChunkedTokenDatabase(IDENTITY)
    scope = make_scope(salt="s", lora="l", request_configs={"kvkeep.tag.b": 1, "kvkeep.tag.a": 2})
    own = replace(IDENTITY, salt="s", lora="l", tags=(("a", "2"), ("b", "1")))
    keys = database.process_tokens(range(8), None, scope).keys
    assert keys == ChunkedTokenDatabase(own).process_tokens(range(8)).keys
    with pytest.raises(IdentityError):
        ChunkedTokenDatabase(own).process_tokens(range(8), None, RequestScope(salt="t"))


def test_many_tenants_do_not_grow_without_end():
    database = ChunkedTokenDatabase(IDENTITY)
    roots = {database.root_of(RequestScope(salt=str(number))) for number in range(1500)}
    assert len(roots) == 1500
    assert len(database._roots) == 1024
    assert database.root_of(RequestScope(salt="0")) in roots


@given(
    tokens=st.lists(ids, max_size=30),
    extras=st.lists(st.tuples(st.integers(0, 35), st.sampled_from("abc")), max_size=5),
    save_unfull=st.booleans(),
)
def test_inputs_go_into_the_chunk_where_they_start(tokens, extras, save_unfull):
    database = ChunkedTokenDatabase(IDENTITY, save_unfull_chunk=save_unfull)
    scope = RequestScope(extras=tuple(Extra(*extra) for extra in extras))
    data, parent, keys = plain_bytes(tokens), IDENTITY.root(), []
    for start in range(0, len(tokens), 4):
        full = start + 4 <= len(tokens)
        if not full and not save_unfull:
            break
        here = [Extra(p - start, c) for p, c in sorted(extras) if start <= p < start + 4]
        if not full:
            here = [extra for extra in here if extra.position < len(tokens) - start]
        parent = chunk_key(parent, data[start * 4 : start * 4 + 16], here, full=full)
        keys.append(parent)
    assert database.process_tokens(tokens, None, scope).keys == keys
    backwards = RequestScope(extras=tuple(reversed(scope.extras)))
    assert database.process_tokens(tokens, None, backwards).keys == keys


@pytest.mark.parametrize("extra", [Extra(-1, "a"), Extra(0, "")])
def test_an_input_that_would_be_dropped_is_refused(extra):
    """Fault 9: an image that got lost on the way to the key would share KV with every other."""
    with pytest.raises(TokenError, match="position"):
        RequestScope(extras=(extra,))


# --- segments


@given(st.lists(st.integers(0, 3), max_size=30))
def test_segments_tile_the_prompt_and_end_with_separators(tokens):
    database = SegmentTokenDatabase(IDENTITY, separator=[0, 0])
    chunks = database.process_tokens(tokens)
    pieces = [tokens[start:end] for start, end, _ in chunks]
    assert [token for piece in pieces for token in piece] == tokens
    for piece in pieces[:-1]:
        assert piece[-2:] == [0, 0]
    for piece in pieces:
        assert not any(piece[i : i + 2] == [0, 0] for i in range(len(piece) - 2))
    keys = {}
    for piece, key in zip(pieces, chunks.keys, strict=True):
        assert keys.setdefault(tuple(piece), key) == key
    assert len(set(keys.values())) == len(keys)


def test_a_segment_has_the_same_key_wherever_it_stands():
    database = SegmentTokenDatabase(IDENTITY, separator=[9])
    one = database.process_tokens([1, 2, 9, 3, 9])
    two = database.process_tokens([3, 9, 1, 2, 9])
    assert one.keys == list(reversed(two.keys))
    chunked = ChunkedTokenDatabase(IDENTITY, save_unfull_chunk=True).process_tokens([1, 2, 9])
    assert not set(chunked.keys) & set(one.keys)


def test_a_separator_is_found_at_token_borders_only():
    separator = [0x01000000]
    tokens = [0x00000100, 0x00000001, 5, 0x01000000, 6]
    ends = SegmentTokenDatabase(IDENTITY, separator=separator).process_tokens(tokens).ends
    assert list(ends) == [4, 5]


def test_masks_of_segments_end_at_segments():
    database = SegmentTokenDatabase(IDENTITY, separator=[9])
    chunks = database.process_tokens([1, 9, 2, 9, 3], [False] * 2 + [True] * 3)
    assert [(start, end) for start, end, _ in chunks] == [(2, 4), (4, 5)]
    with pytest.raises(MaskError, match="inside a segment"):
        database.process_tokens([1, 9, 2, 9, 3], [False] * 3 + [True] * 2)
    with pytest.raises(TokenError, match="separator"):
        SegmentTokenDatabase(IDENTITY, separator=[])


def test_an_image_belongs_to_its_segment():
    database = SegmentTokenDatabase(IDENTITY, separator=[9])
    plain = database.process_tokens([1, 9, 2, 9])
    image = database.process_tokens([1, 9, 2, 9], None, RequestScope(extras=(Extra(2, "i"),)))
    assert plain.keys[0] == image.keys[0]
    assert plain.keys[1] != image.keys[1]


# --- the memo


prompts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.lists(st.integers(0, 2), max_size=12)),
    max_size=25,
)


@given(prompts, st.integers(1, 5))
def test_the_memo_changes_nothing(history, chunk_size):
    """Whatever was asked before, the keys are those of the plain chain."""
    memo = PrefixHashCache(chunk_size)
    seen: list[list[int]] = [[]]
    for root_number, length, tail in history:
        tokens = seen[length % len(seen)][:length] + tail
        seen.append(tokens)
        root = bytes([root_number]) * 32
        data = plain_bytes(tokens)
        assert memo.chain(root, data) == chain_full_chunks(root, data, chunk_size)


class CountedHashing:
    """Counts the bytes that are really hashed."""

    def __init__(self, monkeypatch):
        self.num_bytes = 0
        monkeypatch.setattr(chain_memo, "chain_full_chunks", self)

    def __call__(self, parent, data, chunk_size):
        keys = chain_full_chunks(parent, data, chunk_size)
        self.num_bytes += len(keys) * chunk_size * 4
        return keys

    def taken(self) -> int:
        num_bytes, self.num_bytes = self.num_bytes, 0
        return num_bytes


def test_a_prompt_that_grew_is_not_hashed_again(monkeypatch):
    hashing = CountedHashing(monkeypatch)
    database = ChunkedTokenDatabase(IDENTITY)
    tokens = list(range(400))
    database.process_tokens(tokens)
    assert hashing.taken() == 1600
    database.process_tokens(tokens)
    database.process_tokens(tokens[:200])
    assert hashing.taken() == 0
    for length in range(401, 481):
        database.process_tokens(list(range(length)))
    assert hashing.taken() == 80 * 4
    database.process_tokens([*range(202), *range(500, 700)])
    assert hashing.taken() == (402 // 4 - 50) * 16


def test_conversations_with_one_beginning_are_remembered_side_by_side(monkeypatch):
    hashing = CountedHashing(monkeypatch)
    database = ChunkedTokenDatabase(IDENTITY)
    system = list(range(40))
    talks = [system + [1000 + number] * 40 for number in range(chain_memo.MEMO_SIBLINGS)]
    for talk in talks:
        database.process_tokens(talk)
    assert hashing.taken() == 320 + 160 * (len(talks) - 1)
    for talk in talks:
        database.process_tokens(talk + [5] * 4)
    assert hashing.taken() == 16 * len(talks)


def test_another_tenant_does_not_get_remembered_keys():
    """Fault 9: the memo is asked by root, so a salt never finds another salt's keys."""
    database = ChunkedTokenDatabase(IDENTITY)
    tokens = list(range(40))
    plain = database.process_tokens(tokens).keys
    salted = database.process_tokens(tokens, None, RequestScope(salt="a")).keys
    assert not set(plain) & set(salted)


def test_the_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(chain_memo, "MEMO_BYTES", 10_000)
    memo = PrefixHashCache(4)
    for number in range(500):
        memo.chain(b"r" * 32, plain_bytes([number] * 40))
    held = [prompt for siblings in memo._entries.values() for prompt in siblings]
    assert memo._held_bytes == sum(prompt.cost_bytes for prompt in held) <= 10_000
    assert held[-1].ids == plain_bytes([499] * 40)
    for number in range(100):
        memo.chain(b"r" * 32, plain_bytes([7] * 4 + [number] * 4))
    assert all(len(siblings) <= chain_memo.MEMO_SIBLINGS for siblings in memo._entries.values())
    held = [prompt for siblings in memo._entries.values() for prompt in siblings]
    assert memo._held_bytes == sum(prompt.cost_bytes for prompt in held)


def test_threads_that_share_a_database_get_the_right_keys():
    database = ChunkedTokenDatabase(IDENTITY)
    expected = chain_full_chunks(IDENTITY.root(), plain_bytes(range(400)), 4)
    wrong: list[int] = []

    def ask(seed: int) -> None:
        order = np.random.default_rng(seed).integers(1, 400, 200)
        for length in order.tolist():
            if database.process_tokens(range(length)).keys != expected[: length // 4]:
                wrong.append(length)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_returned_keys_belong_to_the_caller():
    database = ChunkedTokenDatabase(IDENTITY)
    first = database.process_tokens(range(8))
    first.keys.clear()
    gc.collect()
    assert len(database.process_tokens(range(8)).keys) == 2
