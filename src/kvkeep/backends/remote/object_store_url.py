"""What a URL of an object store means to ``obstore``. Opens the client; sends nothing yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.config.store_url import RemoteURL
from kvkeep.errors import ConfigError

#: Schemes whose URL may hold the keys in place of user and password.
_S3 = ("s3", "s3a")
#: Options of the URL that are the HTTP client's, not the store's.
_CLIENT_OPTIONS = frozenset(
    {"allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes", "pool_idle_timeout"}
)
#: The option that names a file with certificates in PEM form to trust.
_CA_FILE = "ca_file"
#: No request runs longer, whatever a deadline says.
_LONGEST_REQUEST_S = 600


def open_object_store(url: RemoteURL, options: ConnectorOptions) -> ObjectStore:
    """The client for a URL like ``s3://bucket/prefix?endpoint=...&region=...``.

    What the URL does not say comes from the environment, as with every client of the store
    (``AWS_ACCESS_KEY_ID``, ``AWS_REGION``, ``AZURE_STORAGE_...``, ``GOOGLE_...``), and from the
    machine's own role.

    Raises:
        ConfigError: the URL has an option that the store does not know, or lacks one. The message
            shows no secret.
    """
    config, client = _split(url)
    if url.scheme in _S3:
        # the frame has its own checksum, and signing a payload means hashing it once more
        config.setdefault("unsigned_payload", "true")
    try:
        # its stubs know one form for each kind of store; which one this is, the URL says
        make = cast("Callable[..., ObjectStore]", from_url)
        return make(
            f"{url.scheme}://{url.hosts}{url.path.rstrip('/')}",
            config=config or None,
            client_options={
                **client,
                "connect_timeout": timedelta(seconds=options.connect_timeout_s),
                "timeout": timedelta(seconds=_LONGEST_REQUEST_S),
            },
            # RemoteBackend retries, with the deadline in mind
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"{url.masked}: {first_line(error)}") from None


def _split(url: RemoteURL) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the store, and of its HTTP client."""
    config: dict[str, Any] = dict(url.options)
    client: dict[str, Any] = {name: config.pop(name) for name in _CLIENT_OPTIONS & config.keys()}
    if url.user or url.password:
        if url.scheme not in _S3:
            raise ConfigError(f"{url.scheme}:// takes no user and password; give them as options")
        config |= {"access_key_id": url.user or "", "secret_access_key": url.password or ""}
    for name, value in config.items():
        if (
            "@" in str(value).partition("://")[2].partition("/")[0]
        ):  # the client's errors would show it
            raise ConfigError(f"{name} takes no user and password; give them as options")
    if _speaks_plainly(url.scheme, config):
        client.setdefault("allow_http", "true")
    client = {name: _as_bool(value) for name, value in client.items()}
    if (ca_file := config.pop(_CA_FILE, None)) is not None:
        try:
            client["root_certificate"] = Path(ca_file).read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read the certificates {ca_file}: {error}") from None
    return config, client


def _speaks_plainly(scheme: str, config: Mapping[str, Any]) -> bool:
    """The user has named an endpoint without TLS."""
    return scheme == "http" or str(config.get("endpoint", "")).startswith("http://")


def _as_bool(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value.lower(), value)


def first_line(error: BaseException) -> str:
    """An error of the client in one line, without the dump that follows."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
