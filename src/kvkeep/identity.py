"""CacheIdentity: everything that must match before KV bytes are interchangeable.

It is hashed into the root of every key chain (docs/formats.md), so no call site can forget the
LoRA, the salt or the layout. Level 0: no torch.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from kvkeep.errors import IdentityError
from kvkeep.layout import GroupLayout, KVLayout

#: Name of the key derivation; a change of docs/formats.md section 1 changes it.
HASH_SCHEME = "kvkeep-sha256-v1"

#: Prefix of the request_configs entries that are part of the identity (spec 2.6).
TAG_PREFIX = "kvkeep.tag."


def _encode(value: object) -> bytes:
    """One unambiguous binary form: a type letter, a length, the content (docs/formats.md 1.1)."""
    if isinstance(value, tuple):
        return b"l%d:" % len(value) + b"".join(_encode(item) for item in value)
    if type(value) in _RECORDS:
        # Every field, found by introspection: a new one cannot be forgotten.
        items = tuple((f.name, getattr(value, f.name)) for f in fields(value))  # type: ignore[arg-type]
        return _encode((_RECORDS[type(value)], items))
    if isinstance(value, str):
        letter, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, int) and not isinstance(value, bool):
        letter, content = b"i", str(value).encode()
    else:
        raise IdentityError(f"cannot encode {type(value).__name__} {value!r} into an identity")
    return letter + b"%d:" % len(content) + content


def _byte_order() -> bytes:
    """What tells big-endian machines, whose KV bytes are in another order, from all others."""
    return b"" if sys.byteorder == "little" else b"big-endian\0"


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What produced the KV bytes, besides the tokens.

    Attributes:
        model: name of the model, as the engine was given it.
        revision: revision, or a fingerprint of weights and config. Never empty: two revisions of
            one name have different KV.
        layout: the declared layout, with page size, KV dtype and what opaque page bytes depend on.
        chunk_size: tokens in a full chunk.
        rank: this worker's rank; 0 where the KV is the same on every rank.
        world_size: number of ranks that share the KV of one token; 1 likewise.
        lora: name and fingerprint of the LoRA adapter, empty for none.
        salt: cache salt of the tenant, empty for none.
        tags: (name, value) pairs, sorted by name.
        scheme: name of the hash scheme.
    """

    model: str
    revision: str
    layout: KVLayout
    chunk_size: int = 256
    rank: int = 0
    world_size: int = 1
    lora: str = ""
    salt: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    scheme: str = field(default=HASH_SCHEME)

    def __post_init__(self) -> None:
        if not self.model or not self.revision:
            raise IdentityError("an identity needs a model name and a revision or fingerprint")
        if self.chunk_size < 1:
            raise IdentityError(f"chunk_size must be at least 1, got {self.chunk_size}")
        if not 0 <= self.rank < self.world_size:
            raise IdentityError(f"rank {self.rank} is outside of 0..{self.world_size - 1}")
        names = [name for name, _ in self.tags]
        if names != sorted(set(names)):
            raise IdentityError(f"tags must be sorted by name and unique, got {names}")

    def encode(self) -> bytes:
        """The canonical bytes that are hashed into the root of a key chain."""
        return _encode(self)

    def root(self) -> bytes:
        """The 32-byte root of every key chain of this identity."""
        return hashlib.sha256(b"kvkeep root\0" + _byte_order() + self.encode()).digest()

    def digest(self) -> bytes:
        """32 bytes that stand for this identity in headers of stored chunks."""
        return hashlib.sha256(b"kvkeep identity\0" + _byte_order() + self.encode()).digest()

    def for_request(
        self,
        *,
        salt: str = "",
        lora: str = "",
        request_configs: Mapping[str, object] | None = None,
    ) -> CacheIdentity:
        """This identity with what one request adds: its salt, its adapter and its tags.

        Args:
            salt: the request's cache salt; empty for none.
            lora: the request's adapter; empty for none.
            request_configs: entries named ``kvkeep.tag.NAME`` become tags; others are ignored.

        Raises:
            IdentityError: this identity has a salt, an adapter or a tag of that name already and
                the request brings another one, which would hide it.
        """
        own = dict(self.tags)
        tags = own | {
            name[len(TAG_PREFIX) :]: str(value)
            for name, value in (request_configs or {}).items()
            if name.startswith(TAG_PREFIX)
        }
        hidden = [name for name, value in own.items() if tags[name] != value]
        if hidden:
            raise IdentityError(f"a request cannot change the identity's own tags {hidden}")
        if (salt and self.salt) or (lora and self.lora):
            raise IdentityError(f"the identity names a salt or adapter already, got {self}")
        if not salt and not lora and tags == own:
            return self
        return replace(
            self,
            salt=salt or self.salt,
            lora=lora or self.lora,
            tags=tuple(sorted(tags.items())),
        )


#: Names of the records inside an encoded identity.
_RECORDS: dict[type, str] = {
    CacheIdentity: "kvkeep.identity",
    KVLayout: "kvkeep.layout",
    GroupLayout: "kvkeep.group",
}
