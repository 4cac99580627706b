"""What kvkeep shows of itself: the metrics endpoint, spans and the form of its logs.

Nothing listens and nothing is sent unless it is set here. Immutable values for any thread.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvkeep.config.base import Frozen, OwnPath

_TCP = re.compile(r"(\[[0-9a-fA-F:]+\]|[0-9.]+|localhost):([0-9]{1,5})")
_UNIX = "unix:"
#: Bytes of a Unix socket's path that every system takes, with room for ``.RANK``.
_MAX_PATH_BYTES = 100


def parse_listen(text: str) -> tuple[str, int] | Path:
    """Address and port, or the path of a Unix socket.

    Raises:
        ValueError: it is neither; says what is allowed.
    """
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        if not path.startswith("/") or len(path.encode()) > _MAX_PATH_BYTES:
            raise ValueError(
                f"write a Unix socket as unix:/path, absolute, at most {_MAX_PATH_BYTES} bytes"
            )
        return Path(path)
    match = _TCP.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(
            "write 127.0.0.1:PORT, [::1]:PORT, another address and port, or unix:/path"
        )
    host = "127.0.0.1" if match[1] == "localhost" else match[1].strip("[]")
    return str(ipaddress.ip_address(host)), int(match[2])


def is_local(place: tuple[str, int] | Path) -> bool:
    """Only this machine can connect."""
    return isinstance(place, Path) or ipaddress.ip_address(place[0]).is_loopback


class MetricsSettings(Frozen):
    """The Prometheus endpoint, see docs/metrics.md."""

    listen: str | None = Field(
        None,
        description="Where the worker serves /metrics: 127.0.0.1:PORT or unix:/path. With several "
        "ranks, rank R adds R to the port, or .R to the path. An address that other machines reach "
        "needs metrics.token, metrics.tls_cert and metrics.tls_key. Unset: nothing listens.",
    )
    token: str | None = Field(
        None,
        min_length=16,
        repr=False,
        description="What the scraper sends as its bearer token; at least 16 characters. A secret: "
        "better in a file or the environment than on a command line.",
    )
    tls_cert: OwnPath | None = Field(
        None, strict=False, description="Certificate chain of the endpoint, a PEM file."
    )
    tls_key: OwnPath | None = Field(
        None, strict=False, description="Private key of the certificate, a PEM file."
    )

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str | None) -> str | None:
        if value is not None:
            parse_listen(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> MetricsSettings:
        others = sorted(self.model_fields_set - {"listen"})
        if self.listen is None:
            if others:
                raise ValueError(f"metrics.{others[0]} has no effect without metrics.listen")
            return self
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("metrics.tls_cert and metrics.tls_key need each other")
        place = parse_listen(self.listen)
        if isinstance(place, Path) and self.tls_cert is not None:
            raise ValueError("metrics.tls_cert has no effect on a Unix socket")
        if not is_local(place) and (self.token is None or self.tls_cert is None):
            raise ValueError(
                f"metrics.listen {self.listen} can be reached from other machines: it needs "
                "metrics.token, metrics.tls_cert and metrics.tls_key, or 127.0.0.1:PORT instead"
            )
        return self


class TracingSettings(Frozen):
    """OpenTelemetry spans, see docs/metrics.md."""

    spans: bool = Field(
        False,
        description="Make an OpenTelemetry span of each lookup, load and store, with the request's "
        "id. They go where the process's OpenTelemetry sends them; kvkeep itself sends nothing. "
        "Needs pip install 'kvkeep[otel]'.",
    )


class LogSettings(Frozen):
    """The form of kvkeep's log."""

    format: Literal["text", "json"] = Field(
        "text",
        description="text: as the engine or Python's logging has it. json: one JSON object per "
        "line on standard error, with the fields in docs/metrics.md.",
    )
