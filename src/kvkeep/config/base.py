"""Frozen: what every group of settings is; and types that several groups have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


def lower(value: object) -> object:
    """A text in small letters, anything else as it is."""
    return value.lower() if isinstance(value, str) else value


_CODEC_NAMES = ["raw", "zstd", "fp8", "int8"]
CodecName = Annotated[
    Literal["raw", "zstd", "fp8", "int8"],
    BeforeValidator(lower),
    WithJsonSchema({"enum": [*_CODEC_NAMES, *(name.upper() for name in _CODEC_NAMES)]}),
]


class Frozen(BaseModel):
    """Immutable, exact about types, and closed: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)
