"""Frozen: what every group of settings is; and types that several groups have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


def lower(value: object) -> object:
    """A text in small letters, anything else as it is."""
    return value.lower() if isinstance(value, str) else value


def _no_empty_path(value: object) -> object:
    """A path as it is given; an empty text would be the current directory."""
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("write a path, or leave the setting out")
    return value


def _from_home(path: Path) -> Path:
    """A path in which ``~`` is the user's home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError("~ stands for no home that is known; write the whole path") from error


#: A path as people write it.
OwnPath = Annotated[Path, BeforeValidator(_no_empty_path), AfterValidator(_from_home)]
_CODEC_NAMES = ["raw", "zstd", "fp8", "int8"]
CodecName = Annotated[
    Literal["raw", "zstd", "fp8", "int8"],
    BeforeValidator(lower),
    WithJsonSchema({"enum": [*_CODEC_NAMES, *(name.upper() for name in _CODEC_NAMES)]}),
]


class Frozen(BaseModel):
    """Immutable, exact about types, and closed: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)
