"""Settings of the tier in a store that machines share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from kvkeep.config.base import CodecName, Frozen
from kvkeep.config.store_url import RemoteURL
from kvkeep.config.units import DurationSeconds, SizeBytes, Threads


def _check_url(text: str) -> str:
    RemoteURL.parse(text)
    return text


#: May hold a password; shown by :attr:`RemoteURL.masked` alone.
StoreURL = Annotated[str, AfterValidator(_check_url), WithJsonSchema({"type": "string"})]


class RemoteSettings(Frozen):
    """The tier in a store that machines share, see docs/remote.md."""

    url: StoreURL | None = Field(
        None,
        repr=False,
        description="The store: redis://, valkey://, s3://, mooncake://, file:// and others, with "
        "its address and options. May hold a password. Unset: there is no remote tier.",
    )
    codec: CodecName = Field(
        "raw",
        description="How chunks are stored: raw, zstd (smaller, the same KV), or at the price of "
        "exactness fp8 or int8. See docs/codecs.md.",
    )
    threads: Threads = Field(
        4,
        ge=2,
        le=256,
        description="Threads, and so connections, for calls to the store; one of them serves loads "
        "only.",
    )
    queue: SizeBytes = Field(
        1 << 30,
        description="Memory that stores which wait for the store may hold, and at most a quarter "
        "of the pool. Stores beyond it are dropped.",
    )
    load_timeout: DurationSeconds = Field(
        10.0, description="A load from the store that takes longer is a miss."
    )
    store_timeout: DurationSeconds = Field(
        10.0, description="A chunk that takes longer to store is dropped."
    )
    connect_timeout: DurationSeconds = Field(
        1.0,
        description="For a new connection, and for the answer to a probe of a store that failed.",
    )
    lookup_share: float = Field(
        0.7,
        gt=0,
        le=0.9,
        description="Of `lookup.timeout`, what a lookup may take up to the answer of the store; "
        "the rest is for keys and the way back.",
    )
    ttl: DurationSeconds | None = Field(
        None,
        description="The store forgets a chunk so long after it was put there. Unset: when it "
        "wants to. Not every store can.",
    )

    @property
    def is_on(self) -> bool:
        """There is a remote tier."""
        return self.url is not None

    @model_validator(mode="after")
    def _check_together(self) -> RemoteSettings:
        others = sorted(self.model_fields_set - {"url"})
        if self.url is None and others:
            raise ValueError(f"remote.{others[0]} has no effect without remote.url")
        longest = min(self.load_timeout, self.store_timeout)
        if self.connect_timeout > longest:
            raise ValueError(
                f"remote.connect_timeout ({self.connect_timeout:g} s) is part of the time of every "
                f"call, so it cannot be longer than {longest:g} s"
            )
        return self
