"""TokenDatabase: cuts tokens into chunks and names each chunk.

Callable from any thread. Two kinds: ChunkedTokenDatabase cuts every ``chunk_size`` tokens and names a chunk by its
whole prefix; SegmentTokenDatabase cuts at a separator and names each segment by itself alone.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvkeep.errors import MaskError, TokenError
from kvkeep.identity import TAG_PREFIX, CacheIdentity
from kvkeep.keys import (
    TOKEN_BYTES,
    ChunkKey,
    Extra,
    chain_full_chunks,
    chunk_key,
    segment_root,
)
from kvkeep.prefix import count_masked

#: Bytes of token ids that the memo of recent prompts may hold.
MEMO_BYTES = 64 << 20
#: Prompts remembered per first chunk: conversations that share a system prompt.
MEMO_SIBLINGS = 8


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What one request adds to the identity.

    Attributes:
        salt: the tenant's cache salt.
        lora: name and fingerprint of the LoRA adapter.
        tags: (name, value) pairs, sorted by name.
        extras: non-text inputs at their positions.
    """

    salt: str = ""
    lora: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    extras: tuple[Extra, ...] = ()


#: A request that adds nothing.
PLAIN = RequestScope()


@dataclass(frozen=True, slots=True)
class TokenChunks:
    """A prompt cut into named chunks; iterates over (start, end, key) of those not masked.

    Attributes:
        num_tokens: length of the prompt.
        num_masked: leading tokens that the mask excludes.
        ends: end of every chunk, the masked ones included, as token indices. The start of a chunk is the
            end of its predecessor.
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


def as_token_bytes(tokens: object) -> bytes:
    """Token ids as little-endian uint32 bytes.

    Args:
        tokens: a sequence of ints, a one-dimensional integer numpy array or torch tensor (any
            device), or an ``array('I')``.

    Raises:
        TokenError: an id is negative or does not fit 32 bits, or the input is no flat sequence of
            integers.
    """
    if isinstance(tokens, array) and tokens.typecode == "I" and tokens.itemsize == TOKEN_BYTES:
        return tokens.tobytes() if sys.byteorder == "little" else _swapped(tokens)
    if isinstance(tokens, (list, tuple)):
        try:
            return as_token_bytes(array("I", tokens))
        except (OverflowError, TypeError) as error:
            raise TokenError(f"token ids must be integers from 0 to 2**32-1: {error}") from error
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray)):
        return as_token_bytes(list(tokens))
    raise TokenError(f"cannot read token ids from {type(tokens).__name__}")


def _swapped(tokens: array[int]) -> bytes:
    """The bytes of ``tokens`` in little-endian order on a big-endian machine."""
    copy = array("I", tokens)
    copy.byteswap()
    return copy.tobytes()


def _array_bytes(tokens: npt.NDArray[np.generic]) -> bytes:
    """Check a numpy array of ids and narrow it to uint32."""
    if tokens.ndim != 1:
        raise TokenError(f"token ids must be one-dimensional, got shape {tokens.shape}")
    if tokens.size == 0:
        return b""
    if tokens.dtype.kind not in "iu":
        raise TokenError(f"token ids must be integers, got {tokens.dtype}")
    if tokens.dtype != np.uint32:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > 0xFFFFFFFF:
            raise TokenError(f"token ids must lie in 0..2**32-1, got {low}..{high}")
    return tokens.astype("<u4", copy=False).tobytes()


class TokenDatabase(ABC):
    """Cuts tokens into chunks and names them under one identity."""

    def __init__(self, identity: CacheIdentity) -> None:
        """Name chunks under ``identity``."""
        self.identity = identity
        self._roots: OrderedDict[tuple[str, str, tuple[tuple[str, str], ...]], bytes] = OrderedDict()
        self._lock = threading.Lock()  # guards _roots

    @abstractmethod
    def process_tokens(
        self, tokens: object, mask: object = None, scope: RequestScope = PLAIN
    ) -> TokenChunks:
        """Cut ``tokens`` and name the chunks.

        Args:
            tokens: token ids, see :func:`as_token_bytes`. Empty gives no chunk.
            mask: bools, one per token: a run of False, then a run of True. False tokens are hashed (they are
                part of the prefix) and their chunks are not iterated.
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
        self._memo = _ChainMemo(self.chunk_size)

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
            MaskError: ``num_masked`` is no multiple of the chunk size.
        """
        if num_masked % self.chunk_size or num_masked < 0:
            raise MaskError(f"{num_masked} tokens are no multiple of chunk size {self.chunk_size}")
        keys = [ChunkKey(value) for value in hashes]
        num_tokens = len(keys) * self.chunk_size
        ends = range(self.chunk_size, num_tokens + 1, self.chunk_size)
        first = min(num_masked // self.chunk_size, len(keys))
        return TokenChunks(num_tokens, num_masked, ends, keys, first)

    def forget(self) -> None:
        """Let go of all remembered prompts."""
        self._memo = _ChainMemo(self.chunk_size)

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
            extras = [
                Extra(extra.position - covered, extra.content)
                for extra in scope.extras
                if extra.position >= covered
            ]
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
        step = self.chunk_size * TOKEN_BYTES
        by_chunk: dict[int, list[Extra]] = {}
        for extra in sorted(extras):
            index, offset = divmod(extra.position, self.chunk_size)
            by_chunk.setdefault(index, []).append(Extra(offset, extra.content))
        parent = root
        keys: list[ChunkKey] = []
        for index in range(len(data) // step):
            here = by_chunk.get(index, [])
            parent = chunk_key(parent, data[index * step : (index + 1) * step], here, full=True)
            keys.append(ChunkKey(parent))
        return keys


class _ChainMemo:
    """Keys of recent prompts, found again by comparing token ids. Callable from any thread."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._step = chunk_size * TOKEN_BYTES
        self._lock = threading.Lock()
        # (root, first chunk's ids) -> [(ids of the full chunks, keys)], guarded by _lock
        self._entries: OrderedDict[tuple[bytes, bytes], list[tuple[bytes, list[ChunkKey]]]]
        self._entries = OrderedDict()
        self._held_bytes = 0  # guarded by _lock

    def chain(self, root: bytes, data: bytes) -> list[ChunkKey]:
        """Keys of the full chunks of ``data``; what was hashed lately is not hashed again."""
        length = len(data) // self._step * self._step
        if length == 0:
            return []
        name = (root, data[: self._step])
        with self._lock:
            siblings = list(self._entries.get(name, ()))
        best, known = None, 0
        for sibling in siblings:
            common = self._common(data, length, sibling[0])
            if common > known:
                best, known = sibling, common
                if common == length:
                    break
        count = known // self._step
        keys = best[1][:count] if best is not None else []
        if known < length:
            parent = keys[-1] if keys else root
            keys += chain_full_chunks(parent, data[known:length], self._chunk_size)
            replaces = best if best is not None and known == len(best[0]) else None
            self._remember(name, (data[:length], keys.copy()), replaces)
        return keys

    def _common(self, data: bytes, length: int, other: bytes) -> int:
        """Bytes of whole equal chunks at the start of ``data[:length]`` and ``other``."""
        shorter = min(length, len(other))
        if data[:shorter] == other[:shorter]:
            return shorter
        left = np.frombuffer(data, np.uint32, shorter // TOKEN_BYTES)
        right = np.frombuffer(other, np.uint32, shorter // TOKEN_BYTES)
        differs = int(np.argmax(left != right)) * TOKEN_BYTES
        return differs // self._step * self._step

    def _remember(
        self,
        name: tuple[bytes, bytes],
        entry: tuple[bytes, list[ChunkKey]],
        replaces: tuple[bytes, list[ChunkKey]] | None,
    ) -> None:
        with self._lock:
            siblings = self._entries.setdefault(name, [])
            if replaces is not None and replaces in siblings:
                siblings.remove(replaces)
                self._held_bytes -= len(replaces[0])
            siblings.append(entry)
            self._held_bytes += len(entry[0])
            if len(siblings) > MEMO_SIBLINGS:
                self._held_bytes -= len(siblings.pop(0)[0])
            self._entries.move_to_end(name)
            while self._held_bytes > MEMO_BYTES and len(self._entries) > 1:
                _, dropped = self._entries.popitem(last=False)
                self._held_bytes -= sum(len(ids) for ids, _ in dropped)


class SegmentTokenDatabase(TokenDatabase):
    """Segments between separators, each named without its prefix (for non-prefix reuse)."""

    def __init__(self, identity: CacheIdentity, *, separator: Sequence[int]) -> None:
        """Cut at every occurrence of ``separator``, which belongs to no segment.

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
        """Segments as chunks, each followed by its separator inside the same chunk.

        The chunk of a segment spans the segment and the separator after it, so that chunks leave no gap;
        its key is made of the segment's tokens alone.

        Raises:
            MaskError: the False run ends inside a segment.
        """
        data = as_token_bytes(tokens)
        num_tokens = len(data) // TOKEN_BYTES
        num_masked = count_masked(mask, num_tokens, 1)
        parent = segment_root(self.root_of(scope))
        ends: list[int] = []
        keys: list[ChunkKey] = []
        for start, stop, end in self._segments(data):
            extras = [
                Extra(e.position - start, e.content)
                for e in sorted(scope.extras)
                if start <= e.position < end
            ]
            text = data[start * TOKEN_BYTES : stop * TOKEN_BYTES]
            keys.append(chunk_key(parent, text, extras, full=False))
            ends.append(end)
        if num_masked and num_masked not in ends:
            raise MaskError(f"the mask excludes {num_masked} tokens, which ends inside a segment")
        first = ends.index(num_masked) + 1 if num_masked else 0
        return TokenChunks(num_tokens, num_masked, ends, keys, first)

    def _segments(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """(start, end of the text, end with its separator) of each segment, in tokens."""
        width = len(self._separator)
        start = position = 0
        while True:
            found = data.find(self._separator, position)
            while found >= 0 and found % TOKEN_BYTES:
                found = data.find(self._separator, found + 1)
            if found < 0:
                break
            end = found + width
            yield start // TOKEN_BYTES, found // TOKEN_BYTES, end // TOKEN_BYTES
            start = position = end
        if start < len(data):
            yield start // TOKEN_BYTES, len(data) // TOKEN_BYTES, len(data) // TOKEN_BYTES


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
