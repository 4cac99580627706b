"""Names of values in a remote store: which chunk of which writer a value is. Pure.

``kvkeep-v1/IDENTITY/KEY``: the first 32 hex digits of the writer's identity digest (the whole of it
is in the header) and the 64 of the chunk's key. Only hex digits, a dash and slashes, so a name is
safe in every store, and never contains anything of a prompt or of a model's name.
"""

from __future__ import annotations

from kvkeep.keys import KEY_BYTES, ChunkKey

#: What all names start with; another form of names or values gets another one.
ROOT = "kvkeep-v1/"
_IDENTITY_DIGITS = 32


def name_prefix(identity_digest: bytes) -> str:
    """What the names of one writer's values start with."""
    return f"{ROOT}{identity_digest.hex()[:_IDENTITY_DIGITS]}/"


def value_name(prefix: str, key: ChunkKey) -> str:
    """The name of a chunk, from :func:`name_prefix` and its key."""
    return prefix + key.hex()


def key_of(prefix: str, name: str) -> ChunkKey | None:
    """The key of the chunk that has this name; None if it is no chunk of this writer."""
    digits = name.removeprefix(prefix)
    if digits == name or len(digits) != 2 * KEY_BYTES:
        return None
    try:
        key = ChunkKey(bytes.fromhex(digits))
    except ValueError:
        return None
    return key if value_name(prefix, key) == name else None
