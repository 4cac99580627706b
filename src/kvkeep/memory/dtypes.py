"""Element types by the names that layouts and headers carry. Pure functions."""

from __future__ import annotations

import torch

from kvkeep.errors import LayoutError
from kvkeep.layout import DTYPE_SIZES


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type, without the library's prefix: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The element type of a name that :data:`kvkeep.layout.DTYPE_SIZES` knows.

    Raises:
        LayoutError: it does not know the name.
    """
    if name not in DTYPE_SIZES:
        raise LayoutError(f"unknown KV dtype {name!r}; known: {', '.join(DTYPE_SIZES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
