"""RemoteURL: the URL of a store, taken apart, and shown without its secrets. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from kvkeep.errors import ConfigError

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
