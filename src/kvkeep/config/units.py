"""Sizes and durations as people write them: ``20GiB``, ``500ms``.

Used by the settings tree as pydantic field types. Pure functions, callable from any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, WithJsonSchema

#: A pool below one memory page is always a forgotten unit (``20`` for ``20GiB``).
SMALLEST_SIZE_BYTES = 4096

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h)\s*", re.ASCII)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SIZE = re.compile(r"\s*\d+(?:\.\d+)?\s*(?:[kmgtpe]i?)?b\s*", re.ASCII | re.IGNORECASE)
_BYTE_SIZE: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)


def parse_size(value: object) -> object:
    """Bytes of ``"20GiB"``, ``"5 GB"`` or ``"4096B"``; a whole number is bytes already.

    Raises:
        ValueError: it is a text without a unit, or no size at all.
    """
    if isinstance(value, str):
        if not _SIZE.fullmatch(value):
            raise ValueError("write a size with its unit, like 20GiB, 512MiB or 5GB")
        return int(_BYTE_SIZE.validate_python(value.strip()))
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("write a size with its unit, like 20GiB, or as a whole number of bytes")
    return value


def parse_duration(value: object) -> object:
    """Seconds of ``"500ms"``, ``"5s"``, ``"2min"`` or ``"1h"``; a number is seconds already.

    Raises:
        ValueError: it is a text without a unit, or no duration at all.
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise ValueError("write a duration with its unit, like 500ms, 5s, 2min or 1h")
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("write a duration with its unit, like 5s, or as a number of seconds")
    return float(value)


def format_size(size_bytes: int) -> str:
    """A size as :func:`parse_size` reads it, exact below 8 PiB: ``20GiB``, ``4097B``."""
    for unit, step in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= step and size_bytes % step == 0:
            return f"{size_bytes // step}{unit}"
    return f"{size_bytes}B"


def format_duration(seconds: float) -> str:
    """A duration as :func:`parse_duration` reads it: ``5s``, ``500ms``, ``250us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.15g}{unit}"
    return f"{seconds * 1e6:.9f}".rstrip("0").rstrip(".") + "us"


@dataclass(frozen=True, slots=True)
class Unit:
    """In the annotation of a setting: what its number counts."""

    name: str


_SIZE_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpPeE][iI]?)?[bB]\s*$"}
_DURATION_TEXT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(us|ms|s|min|h)\s*$"}


def _size_schema(smallest: int) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [_SIZE_TEXT, {"type": "integer", "minimum": smallest}]})


#: A number of bytes.
SizeBytes = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=SMALLEST_SIZE_BYTES),
    _size_schema(SMALLEST_SIZE_BYTES),
    Unit("bytes"),
]

#: A number of bytes, or 0 for none.
SizeBytesOrZero = Annotated[
    int, BeforeValidator(parse_size), Field(ge=0), _size_schema(0), Unit("bytes")
]

#: A positive, finite number of seconds.
DurationSeconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    Field(gt=0, allow_inf_nan=False),
    WithJsonSchema({"anyOf": [_DURATION_TEXT, {"type": "number", "exclusiveMinimum": 0}]}),
    Unit("seconds"),
]

#: Counts of tokens and of threads.
Tokens = Annotated[int, Unit("tokens")]
Threads = Annotated[int, Unit("threads")]
