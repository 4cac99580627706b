"""Frozen: what every group of settings is; and types that several groups have.

Sizes and durations as people write them: ``20GiB``, ``500ms``.

Used by the settings tree as pydantic field types. Pure functions, callable from any thread.

RemoteURL: the URL of a store, taken apart, and shown without its secrets. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    WithJsonSchema,
)

from kvkeep.errors import ConfigError


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


#: Stands for a secret in what people are shown.
HIDDEN = "***"
#: Words in the name of a query's option whose value is hidden.
_SECRET_WORDS = ("pass", "secret", "token", "key", "credential", "auth", "sig")
_SHOWN = frozenset({"ssl_keyfile"})
#: The password of a URL, from what stands before it.
_PASSWORD = re.compile(r"(://[^/?#@:]*:)[^/?#]*@")


@dataclass(frozen=True, slots=True, repr=False)
class RemoteURL:
    """A URL. Its ``repr`` and ``str`` show no secret.

    Attributes:
        text: the whole of it, secrets included: for the client library only.
        scheme: in small letters.
        user: before the host; None if there is none.
        password: likewise.
        hosts: ``host``, ``host:port`` or several with commas between; empty if there is none.
        path: decoded, with its leading slash.
        options: what stands after the question mark.
    """

    text: str
    scheme: str
    user: str | None
    password: str | None
    hosts: str
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> RemoteURL:
        """Take a URL apart.

        Raises:
            ConfigError: it is none; the message does not show it.
        """
        try:
            parts = urlsplit(text.strip())
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise ConfigError("the URL of the remote store cannot be read") from None
        if not parts.scheme or "://" not in text:
            raise ConfigError("the URL of a remote store starts with its kind, like redis://")
        login, at, hosts = parts.netloc.rpartition("@")
        user, colon, password = login.partition(":")
        if len(dict(pairs)) != len(pairs):
            raise ConfigError("the URL of the remote store gives an option twice")
        return cls(
            text=text.strip(),
            scheme=parts.scheme.lower(),
            user=unquote(user) if at and user else None,
            password=unquote(password) if colon else None,
            hosts=hosts,
            path=unquote(parts.path),
            options=MappingProxyType(dict(pairs)),
        )

    @property
    def masked(self) -> str:
        """The URL with every secret replaced."""
        parts = urlsplit(self.text)
        login, at, hosts = parts.netloc.rpartition("@")
        user, colon, _ = login.partition(":")
        login = f"{user}:{HIDDEN}" if colon else user
        query = "&".join(
            f"{name}={HIDDEN if _is_secret(name) else _without_login(value)}"
            for name, value in parse_qsl(parts.query, keep_blank_values=True)
        )
        return urlunsplit(SplitResult(self.scheme, f"{login}{at}{hosts}", parts.path, query, ""))

    def __str__(self) -> str:
        return self.masked

    def __repr__(self) -> str:
        return f"RemoteURL({self.masked!r})"


def _is_secret(name: str) -> bool:
    lowered = name.lower()
    return lowered not in _SHOWN and any(word in lowered for word in _SECRET_WORDS)


def _without_login(value: str) -> str:
    """The value of an option; of a URL in it (an endpoint, a proxy), the password is hidden."""
    return _PASSWORD.sub(rf"\1{HIDDEN}@", value)
