"""Token ids as bytes: every form in which engines hand them over, checked and made one.

The form is that of docs/formats.md 1.2: little-endian uint32. Pure functions, callable from any
thread; torch tensors are read without importing torch.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvkeep.errors import TokenError
from kvkeep.keys import TOKEN_BYTES

#: The largest token id.
MAX_TOKEN_ID = 2**32 - 1

#: Ids that are narrowed in memory which a thread keeps; longer prompts get memory of their own.
_SCRATCH_IDS = 1 << 20


class _Scratch(threading.local):
    """Memory of one thread, where ids are narrowed. A fresh block costs more than the work does."""

    ids = np.empty(0, "<u4")

    def take(self, count: int) -> npt.NDArray[np.uint32]:
        """Room for ``count`` ids, until this thread asks again."""
        if count > _SCRATCH_IDS:
            return np.empty(count, "<u4")
        if count > len(self.ids):
            self.ids = np.empty(count, "<u4")
        return self.ids[:count]


_scratch = _Scratch()


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
        try:
            tokens = tokens.detach().cpu().numpy()
        except TypeError as error:  # an element type that numpy does not have is no integer
            raise TokenError(f"token ids must be integers: {error}") from error
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
    if tokens.dtype.newbyteorder("=") == np.uint32:
        return tokens.astype("<u4", copy=False).tobytes()
    _check_range(tokens)
    narrow = _scratch.take(len(tokens))
    np.copyto(narrow, tokens, casting="unsafe")
    return narrow.tobytes()


def _check_range(tokens: npt.NDArray[np.generic]) -> None:
    """Refuse ids that do not fit: seen as unsigned numbers, negative ids are the largest ones."""
    kind, width = tokens.dtype.kind, tokens.dtype.itemsize
    limit = min(MAX_TOKEN_ID, 2 ** (8 * width - 1) - 1 if kind == "i" else MAX_TOKEN_ID)
    if int(tokens.view(f"{tokens.dtype.str[0]}u{width}").max()) > limit:
        low, high = int(tokens.min()), int(tokens.max())
        raise TokenError(f"token ids must lie in 0..2**32-1, got {low}..{high}")
