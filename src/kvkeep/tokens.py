"""TokenDatabase: cuts tokens into chunks and names each chunk.

Callable from any thread. Two kinds: ChunkedTokenDatabase cuts every ``chunk_size`` tokens and names
a chunk by its whole prefix; SegmentTokenDatabase cuts at a separator and names each segment by
itself alone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvkeep.errors import MaskError, TokenError
from kvkeep.hashing import (
    KEY_BYTES,
    TOKEN_BYTES,
    ChunkKey,
    Extra,
    PrefixHashCache,
    as_token_bytes,
    chunk_key,
    segment_root,
)
from kvkeep.identity import TAG_PREFIX, CacheIdentity
from kvkeep.prefix import count_masked

__all__ = [
    "PLAIN",
    "ChunkedTokenDatabase",
    "RequestScope",
    "SegmentTokenDatabase",
    "TokenChunks",
    "TokenDatabase",
    "as_token_bytes",
    "make_scope",
]


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What one request adds to the identity.

    Attributes:
        salt: the tenant's cache salt.
        lora: name and fingerprint of the LoRA adapter.
        tags: (name, value) pairs, sorted by name.
        extras: non-text inputs at their positions.

    Raises:
        TokenError: an input has a negative position or no content hash.
    """

    salt: str = ""
    lora: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    extras: tuple[Extra, ...] = ()

    def __post_init__(self) -> None:
        for extra in self.extras:
            if extra.position < 0 or not extra.content:
                raise TokenError(
                    f"an input needs a position in the prompt and content, got {extra}"
                )


#: A request that adds nothing.
PLAIN = RequestScope()


@dataclass(frozen=True, slots=True)
class TokenChunks:
    """A prompt cut into named chunks; iterates over (start, end, key) of those not masked.

    Attributes:
        num_tokens: length of the prompt.
        num_masked: leading tokens that the mask excludes.
        ends: end of every chunk, the masked ones included, as token indices. The start of a chunk
            is the end of its predecessor.
        keys: key of every chunk, the masked ones included.
        first: index of the first chunk that is not masked.
    """

    num_tokens: int
    num_masked: int
    ends: Sequence[int]
    keys: list[ChunkKey]
    first: int

    def __iter__(self) -> Iterator[tuple[int, int, ChunkKey]]:
        """(start, end, key) of each chunk that is not masked."""
        start = self.num_masked
        for end, key in zip(self.ends[self.first :], self.keys[self.first :], strict=True):
            yield start, end, key
            start = end

    def __len__(self) -> int:
        """Number of chunks that are not masked."""
        return len(self.keys) - self.first

    def end_of(self, num_chunks: int) -> int:
        """Number of tokens covered by the first ``num_chunks`` chunks, the masked ones counted."""
        return self.ends[num_chunks - 1] if num_chunks else 0


class TokenDatabase(ABC):
    """Cuts tokens into chunks and names them under one identity."""

    def __init__(self, identity: CacheIdentity) -> None:
        """Name chunks under ``identity``."""
        self.identity = identity
        self._lock = threading.Lock()
        # (salt, lora, tags) -> root, guarded by _lock
        self._roots: OrderedDict[tuple[str, str, tuple[tuple[str, str], ...]], bytes]
        self._roots = OrderedDict()

    @abstractmethod
    def process_tokens(
        self, tokens: object, mask: object = None, scope: RequestScope = PLAIN
    ) -> TokenChunks:
        """Cut ``tokens`` and name the chunks.

        Args:
            tokens: token ids, see :func:`as_token_bytes`. Empty gives no chunk.
            mask: bools, one per token: a run of False, then a run of True. False tokens are hashed
                (they are part of the prefix) and their chunks are not iterated.
            scope: what the request adds to the identity.

        Raises:
            TokenError, MaskError: the input is malformed.
        """

    def root_of(self, scope: RequestScope) -> bytes:
        """The 32-byte root of the key chain for a request."""
        name = (scope.salt, scope.lora, scope.tags)
        with self._lock:
            root = self._roots.get(name)
            if root is None:
                configs = {TAG_PREFIX + tag: value for tag, value in scope.tags}
                identity = self.identity.for_request(
                    salt=scope.salt, lora=scope.lora, request_configs=configs
                )
                root = identity.root()
                self._roots[name] = root
                if len(self._roots) > 1024:
                    self._roots.popitem(last=False)
            return root


class ChunkedTokenDatabase(TokenDatabase):
    """Chunks of ``identity.chunk_size`` tokens, each named by its whole prefix.

    A prompt that grew since it was last seen is not hashed again from its start: the keys of recent
    prompts are kept with their token ids, and the ids are compared (never a hash of them).
    """

    def __init__(self, identity: CacheIdentity, *, save_unfull_chunk: bool = False) -> None:
        """Cut every ``identity.chunk_size`` tokens.

        Args:
            identity: what the chunks belong to.
            save_unfull_chunk: name the tail that fills no chunk, too.
        """
        super().__init__(identity)
        self.chunk_size = identity.chunk_size
        self.save_unfull_chunk = save_unfull_chunk
        self._memo = PrefixHashCache(self.chunk_size)

    def process_tokens(
        self, tokens: object, mask: object = None, scope: RequestScope = PLAIN
    ) -> TokenChunks:
        """See :meth:`TokenDatabase.process_tokens`."""
        data = as_token_bytes(tokens)
        num_tokens = len(data) // TOKEN_BYTES
        num_masked = count_masked(mask, num_tokens, self.chunk_size)
        root = self.root_of(scope)
        if scope.extras:
            keys = self._chain_with_extras(root, data, scope.extras)
        else:
            keys = self._memo.chain(root, data)
        return self._plan(root, data, keys, num_masked, scope)

    def process_hashes(self, hashes: Sequence[bytes], num_masked: int = 0) -> TokenChunks:
        """The plan for full chunks whose keys are known already.

        Args:
            hashes: 32-byte keys of consecutive full chunks from the prompt's start.
            num_masked: leading tokens to exclude, a multiple of the chunk size.

        Raises:
            TokenError: a key is not 32 bytes long.
            MaskError: ``num_masked`` is no multiple of the chunk size.
        """
        if any(len(value) != KEY_BYTES for value in hashes):
            raise TokenError(f"chunk keys are {KEY_BYTES} bytes long")
        if num_masked % self.chunk_size or num_masked < 0:
            raise MaskError(f"{num_masked} tokens are no multiple of chunk size {self.chunk_size}")
        keys = [ChunkKey(value) for value in hashes]
        num_tokens = len(keys) * self.chunk_size
        ends = range(self.chunk_size, num_tokens + 1, self.chunk_size)
        first = min(num_masked // self.chunk_size, len(keys))
        return TokenChunks(num_tokens, num_masked, ends, keys, first)

    def forget(self) -> None:
        """Let go of all remembered prompts."""
        self._memo = PrefixHashCache(self.chunk_size)

    def _plan(
        self,
        root: bytes,
        data: bytes,
        keys: list[ChunkKey],
        num_masked: int,
        scope: RequestScope,
    ) -> TokenChunks:
        """Add the unfull tail where it is wanted, and the mask."""
        num_tokens = len(data) // TOKEN_BYTES
        full = num_tokens // self.chunk_size
        covered = full * self.chunk_size
        ends: Sequence[int] = range(self.chunk_size, covered + 1, self.chunk_size)
        if self.save_unfull_chunk and covered < num_tokens:
            extras = _extras_within(scope.extras, covered, num_tokens)
            parent = keys[-1] if keys else root
            tail = chunk_key(parent, data[covered * TOKEN_BYTES :], extras, full=False)
            keys = [*keys, tail]
            ends = [*ends, num_tokens]
        first = min(-(-num_masked // self.chunk_size), len(keys))
        return TokenChunks(num_tokens, num_masked, ends, keys, first)

    def _chain_with_extras(
        self, root: bytes, data: bytes, extras: Sequence[Extra]
    ) -> list[ChunkKey]:
        """Keys of the full chunks of a prompt with non-text inputs."""
        size = self.chunk_size
        parent = root
        keys: list[ChunkKey] = []
        for start in range(0, len(data) // TOKEN_BYTES - size + 1, size):
            ids = data[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES]
            here = _extras_within(extras, start, start + size)
            keys.append(chunk_key(parent, ids, here, full=True))
            parent = keys[-1]
        return keys


class SegmentTokenDatabase(TokenDatabase):
    """Segments between separators, each named without its prefix (for non-prefix reuse)."""

    def __init__(self, identity: CacheIdentity, *, separator: Sequence[int]) -> None:
        """Cut after every occurrence of ``separator``.

        Raises:
            TokenError: the separator is empty or malformed.
        """
        super().__init__(identity)
        self._separator = as_token_bytes(list(separator))
        if not self._separator:
            raise TokenError("the separator of a SegmentTokenDatabase must have a token")

    def process_tokens(
        self, tokens: object, mask: object = None, scope: RequestScope = PLAIN
    ) -> TokenChunks:
        """Segments as chunks, each with the separator after it, so that chunks leave no gap.

        The key of a chunk is made of the chunk's tokens alone, the separator's included: a segment
        that ends the prompt without one holds other KV than one that does not.

        Raises:
            MaskError: the False run ends inside a segment.
        """
        data = as_token_bytes(tokens)
        num_tokens = len(data) // TOKEN_BYTES
        num_masked = count_masked(mask, num_tokens, 1)
        parent = segment_root(self.root_of(scope))
        ends: list[int] = []
        keys: list[ChunkKey] = []
        for start, end in self._segments(data):
            extras = _extras_within(scope.extras, start, end)
            ids = data[start * TOKEN_BYTES : end * TOKEN_BYTES]
            keys.append(chunk_key(parent, ids, extras, full=False))
            ends.append(end)
        if num_masked and num_masked not in ends:
            raise MaskError(f"the mask excludes {num_masked} tokens, which ends inside a segment")
        first = ends.index(num_masked) + 1 if num_masked else 0
        return TokenChunks(num_tokens, num_masked, ends, keys, first)

    def _segments(self, data: bytes) -> Iterator[tuple[int, int]]:
        """(start, end) of each segment with its separator, in tokens."""
        width = len(self._separator)
        start = position = 0
        while (found := data.find(self._separator, position)) >= 0:
            if found % TOKEN_BYTES:
                position = found + 1  # bytes of two neighbouring ids that look like the separator
                continue
            position = found + width
            yield start // TOKEN_BYTES, position // TOKEN_BYTES
            start = position
        if start < len(data):
            yield start // TOKEN_BYTES, len(data) // TOKEN_BYTES


def _extras_within(extras: Sequence[Extra], start: int, end: int) -> list[Extra]:
    """The inputs that start in tokens [start, end), in order, with positions relative to start."""
    return [
        Extra(extra.position - start, extra.content)
        for extra in sorted(extras)
        if start <= extra.position < end
    ]


def make_scope(
    *,
    salt: str = "",
    lora: str = "",
    request_configs: Mapping[str, object] | None = None,
    extras: Sequence[Extra] = (),
) -> RequestScope:
    """A RequestScope from what an engine knows about a request.

    Args:
        salt: the tenant's cache salt.
        lora: name and fingerprint of the adapter.
        request_configs: entries named ``kvkeep.tag.NAME`` become tags, in any order.
        extras: non-text inputs.
    """
    tags = sorted(
        (name[len(TAG_PREFIX) :], str(value))
        for name, value in (request_configs or {}).items()
        if name.startswith(TAG_PREFIX)
    )
    return RequestScope(salt, lora, tuple(tags), tuple(extras))
