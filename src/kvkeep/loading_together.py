"""What a load needs of the other ranks: its name among them, and the chunks that rank 0 lends.

Pure but for the views of rank 0's memory; used by ``loading.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvkeep.gpu.base import GPUConnectorInterface
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj
from kvkeep.ranks.base import Round

#: The tier of a chunk that a rank copied out of rank 0's memory.
FIRST_RANK = "FirstRank"


def load_tag(
    req_id: str | None, wanted: Sequence[tuple[int, int, ChunkKey]], *, has_same_keys: bool
) -> bytes:
    """32 bytes that every rank computes alike for one load.

    Args:
        req_id: the request.
        wanted: (start, end, key) of the chunks to load.
        has_same_keys: the chunks have one key on every rank, so that it can name them.
    """
    digest = hashlib.sha256(f"kvkeep load\0{req_id}\0".encode())
    for start, end, key in wanted:
        digest.update(b"%d,%d;" % (start, end))
        if has_same_keys:
            digest.update(key)
    return digest.digest()


def borrow_all(
    round_: Round | None,
    wanted: Sequence[tuple[int, int, ChunkKey]],
    connector: GPUConnectorInterface,
) -> list[MemoryObj]:
    """Views of the chunks that rank 0 offers, from the first on, until one does not fit."""
    objs: list[MemoryObj] = []
    if round_ is None:
        return objs
    for index, (start, end, _) in enumerate(wanted[: round_.num_offered]):
        obj = round_.borrow(index, *connector.chunk_shape(end - start))
        if obj is None:
            break
        objs.append(obj)
    return objs
