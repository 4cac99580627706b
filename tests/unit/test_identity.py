"""CacheIdentity: whatever differs in it, in any one field, keeps KV apart."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import IdentityError, LayoutError
from kvkeep.identity import HASH_SCHEME, CacheIdentity
from kvkeep.layout import DTYPE_SIZES, GroupLayout, KVLayout, MemoryFormat
from kvkeep.tokens import ChunkedTokenDatabase, RequestScope

texts = st.text(min_size=1, max_size=12)
small = st.integers(1, 64)
groups = st.builds(GroupLayout, name=texts, num_layers=small, layer_page_bytes=small)
layouts = st.builds(
    KVLayout,
    fmt=st.sampled_from([MemoryFormat.OPAQUE_PAGES, MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT]),
    dtype=st.sampled_from(sorted(DTYPE_SIZES)),
    page_size=small,
    groups=st.lists(groups, min_size=1, max_size=3).map(tuple),
    num_kv_heads=st.integers(0, 8),
    head_size=st.integers(0, 128),
    engine=texts,
)
tag_lists = st.dictionaries(texts, texts, max_size=3).map(lambda tags: tuple(sorted(tags.items())))
#: Ranks stay below world sizes, so that each can be changed alone.
identities = st.builds(
    CacheIdentity,
    model=texts,
    revision=texts,
    layout=layouts,
    chunk_size=st.integers(1, 8),
    rank=st.integers(0, 3),
    world_size=st.integers(4, 8),
    lora=st.text(max_size=5),
    salt=st.text(max_size=5),
    tags=tag_lists,
    scheme=st.just(HASH_SCHEME),
)

#: One strategy of other values per field. A field without one fails the first test below.
OTHER_VALUES: dict[str, st.SearchStrategy] = {
    "model": texts,
    "revision": texts,
    "layout.fmt": st.sampled_from(
        [MemoryFormat.OPAQUE_PAGES, MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT]
    ),
    "layout.dtype": st.sampled_from(sorted(DTYPE_SIZES)),
    "layout.page_size": small,
    "layout.groups": st.lists(groups, min_size=1, max_size=3).map(tuple),
    "layout.groups.name": texts,
    "layout.groups.num_layers": small,
    "layout.groups.layer_page_bytes": small,
    "layout.num_kv_heads": st.integers(0, 8),
    "layout.head_size": st.integers(0, 128),
    "layout.engine": texts,
    "chunk_size": st.integers(1, 8),
    "rank": st.integers(0, 3),
    "world_size": st.integers(4, 8),
    "lora": st.text(max_size=5),
    "salt": st.text(max_size=5),
    "tags": tag_lists,
    "scheme": texts,
}


def paths(value: object, prefix: str = "") -> set[str]:
    """Every field below ``value``, found by introspection."""
    found: set[str] = set()
    for field in fields(value):
        child = getattr(value, field.name)
        path = f"{prefix}{field.name}"
        if is_dataclass(child):
            found |= paths(child, f"{path}.")
            continue
        found.add(path)
        if isinstance(child, tuple):
            for item in child:
                if is_dataclass(item):
                    found |= paths(item, f"{path}.")
    return found


def get(value: object, path: str) -> object:
    for name in path.split("."):
        value = value[0] if isinstance(value, tuple) else value
        value = getattr(value, name)
    return value


def put(value: object, path: str, new: object) -> object:
    """``value`` with one field replaced; in a tuple of records, in its first one."""
    if isinstance(value, tuple):
        return (put(value[0], path, new), *value[1:])
    name, _, rest = path.partition(".")
    return replace(value, **{name: put(getattr(value, name), rest, new) if rest else new})


@given(identities)
def test_every_field_is_covered(identity):
    assert paths(identity) == set(OTHER_VALUES)


@given(identities, st.lists(st.integers(0, 99), min_size=16, max_size=40), st.data())
@pytest.mark.parametrize("path", sorted(OTHER_VALUES))
def test_identities_that_differ_in_one_field_share_nothing(path, identity, tokens, data):
    """Fault 9: LoRA, salt, revision, tags, layout... whichever differs, no key is shared."""
    old = get(identity, path)
    new = data.draw(OTHER_VALUES[path].filter(lambda value: value != old))
    other = put(identity, path, new)
    assert identity.encode() != other.encode()
    assert identity.digest() != other.digest()
    keys, other_keys = (
        set(ChunkedTokenDatabase(each, save_unfull_chunk=True).process_tokens(tokens).keys)
        for each in (identity, other)
    )
    assert keys
    assert other_keys
    assert not keys & other_keys


@given(identities, identities)
def test_encoding_is_unambiguous(one, two):
    assert (one.encode() == two.encode()) == (one == two)
    assert one.root() != one.digest()


@given(identities)
def test_equal_identities_have_equal_roots(identity):
    copy = replace(identity)
    assert copy.root() == identity.root()
    assert copy.digest() == identity.digest()


#: What one request can add, in two different forms each.
DIFFERENT_SCOPES = [
    RequestScope(),
    RequestScope(salt="a"),
    RequestScope(salt="b"),
    RequestScope(lora="a"),
    RequestScope(lora="adapter:00"),
    RequestScope(lora="adapter:01"),
    RequestScope(tags=(("a", ""),)),
    RequestScope(tags=(("a", "b"),)),
    RequestScope(tags=(("a", "b"), ("c", "d"))),
]


def base(**changes: object) -> CacheIdentity:
    layout = KVLayout(
        fmt=MemoryFormat.OPAQUE_PAGES,
        dtype="uint8",
        page_size=4,
        groups=(GroupLayout("full", 2, 64),),
        num_kv_heads=0,
        head_size=0,
        engine="engine",
    )
    return replace(CacheIdentity("model", "revision", layout, chunk_size=4), **changes)


def test_requests_of_different_tenants_and_adapters_share_nothing():
    """Fault 9: two LoRA adapters or two cache salts never share a key, nor with none at all."""
    database = ChunkedTokenDatabase(base())
    keys = [database.process_tokens(range(8), None, scope).keys for scope in DIFFERENT_SCOPES]
    assert len({key for chain in keys for key in chain}) == 2 * len(DIFFERENT_SCOPES)


def test_revisions_and_rope_settings_are_told_apart():
    """Fault 9: the revision carries the fingerprint of weights and config, RoPE included."""
    revisions = ["main", "config:1 rope_theta=10000", "config:1 rope_theta=100000"]
    keys = [
        ChunkedTokenDatabase(base(revision=revision)).process_tokens(range(4)).keys[0]
        for revision in revisions
    ]
    assert len(set(keys)) == 3


def test_instruction_sets_are_told_apart():
    """Fault 8: pages packed with and without AMX have the same size and other bytes."""
    keys = [
        ChunkedTokenDatabase(base(layout=replace(base().layout, engine=engine)))
        .process_tokens(range(4))
        .keys[0]
        for engine in ("engine 1 cpu isa=amx", "engine 1 cpu isa=vec")
    ]
    assert keys[0] != keys[1]


def test_tags_come_in_any_order():
    one = base().for_request(request_configs={"kvkeep.tag.a": 1, "kvkeep.tag.b": 2, "other": 3})
    two = base().for_request(request_configs={"kvkeep.tag.b": "2", "kvkeep.tag.a": "1"})
    assert one == two
    assert one.tags == (("a", "1"), ("b", "2"))


def test_a_request_that_adds_nothing_is_the_same_identity():
    identity = base(tags=(("a", "1"),))
    assert identity.for_request() is identity
    assert identity.for_request(request_configs={"kvkeep.tag.a": "1"}) is identity
    assert identity.for_request(request_configs={"max_tokens": 1}) is identity


def test_a_request_cannot_hide_the_salt_or_adapter_of_the_identity():
    with pytest.raises(IdentityError, match="already"):
        base(salt="a").for_request(salt="b")
    with pytest.raises(IdentityError, match="already"):
        base(lora="a").for_request(lora="b")


def test_a_request_cannot_leave_the_tags_of_the_identity():
    """Fault 9: the tags of a deployment keep its cache apart, whatever a request asks for."""
    identity = base(tags=(("env", "prod"),))
    with pytest.raises(IdentityError, match="own tags"):
        identity.for_request(request_configs={"kvkeep.tag.env": "dev"})
    assert identity.for_request(request_configs={"kvkeep.tag.env": "prod"}) == identity
    both = identity.for_request(request_configs={"kvkeep.tag.user": "a"})
    assert both.tags == (("env", "prod"), ("user", "a"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model name"),
        ({"revision": ""}, "revision"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"rank": -1}, "rank"),
        ({"rank": 1}, "rank"),
        ({"tags": (("b", "1"), ("a", "1"))}, "sorted"),
        ({"tags": (("a", "1"), ("a", "2"))}, "unique"),
    ],
)
def test_incomplete_identities_are_refused(changes, message):
    with pytest.raises(IdentityError, match=message):
        base(**changes)


def test_fault_9_machines_of_another_byte_order_share_nothing(monkeypatch):
    """Fault 9: KV is stored as it lies in memory."""
    here = base().root(), base().digest()
    monkeypatch.setattr("kvkeep.identity.sys.byteorder", "big")
    assert len({*here, base().root(), base().digest()}) == 4


def test_a_value_that_has_no_encoding_is_refused():
    with pytest.raises(IdentityError, match="cannot encode"):
        base(salt=None).encode()
    with pytest.raises(IdentityError, match="cannot encode"):
        base(tags=(("a", 1.5),)).encode()


def test_identity_needs_a_layout_that_is_whole():
    with pytest.raises(LayoutError):
        base(layout=replace(base().layout, engine=""))
