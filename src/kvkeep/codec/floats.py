"""Floats of 16 and 32 bits as numpy arrays: numpy knows no bfloat16, and lossy codecs need it.

Pure functions over pieces of a chunk, small enough to stay in the processor's cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

#: Element types that lossy codecs take, by the code that a frame's header has for them.
FLOAT_CODES = {"float32": 2, "float16": 3, "bfloat16": 4}
FLOAT_NAMES = {code: name for name, code in FLOAT_CODES.items()}
#: Elements of one piece.
PIECE_ELEMENTS = 1 << 18


def bits_of(data: npt.NDArray[np.uint8], dtype: str) -> Bits:
    """The bit patterns of elements; a view, writable if ``data`` is."""
    return data.view(np.uint32) if dtype == "float32" else data.view(np.uint16)


def to_float32(bits: Bits, dtype: str) -> Floats:
    """Elements of ``dtype`` as float32, exact. ``bits`` has their bit patterns, any shape."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: Floats, dtype: str, out: Bits) -> None:
    """Write float32 as elements of ``dtype``, rounded to nearest even.

    Args:
        values: any shape; may be changed.
        dtype: of ``out``. What is too large for a float16 becomes the largest one.
        out: bit patterns, the same shape.
    """
    if dtype == "float32":
        np.copyto(out.view(np.float32), values)
    elif dtype == "float16":
        np.clip(values, -65504.0, 65504.0, out=values)
        np.copyto(out.view(np.float16), values, casting="same_kind")
    else:
        bits = values.view(np.uint32)
        bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        bits >>= np.uint32(16)
        np.copyto(out, bits, casting="unsafe")
