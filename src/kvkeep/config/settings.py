"""The tree of settings: what can be set, its unit, its default and what it is checked against.

Settings stop at the door: whoever builds a component reads them and passes plain values on.
Immutable, so any thread may read them. ``docs/configuration.md`` shows the descriptions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvkeep.config.units import DurationSeconds, SizeBytes


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _sorted_pairs(value: object) -> object:
    """A mapping of texts as pairs sorted by name, the form that CacheIdentity takes."""
    if isinstance(value, tuple):
        return tuple(sorted(value))
    if not isinstance(value, Mapping):
        raise ValueError("write tags as a mapping of texts, like {team: search}")
    return tuple(sorted(value.items()))


PolicyName = Annotated[Literal["fifo", "lru", "lfu", "mru"], BeforeValidator(_lower)]
Tags = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_sorted_pairs)]


class _Frozen(BaseModel):
    """Immutable, exact about types, and closed: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


class CpuSettings(_Frozen):
    """The pool of CPU memory and the tier that lives in it."""

    size: SizeBytes | None = Field(
        None,
        description="Size of the pool. Unset: 5 GB or half of the available memory, whichever is "
        "less.",
    )
    policy: PolicyName = Field(
        "lru", description="Order of eviction: fifo, lru, lfu or mru, in any case."
    )
    alloc_timeout: DurationSeconds = Field(
        5.0, description="How long a load waits for memory to be released before it is a miss."
    )
    huge_pages: bool = Field(True, description="Ask the system for huge pages where it has them.")
    copy_threads: int = Field(
        1,
        ge=1,
        le=256,
        description="Threads that copy between a paged engine's memory and the pool.",
    )


class LookupSettings(_Frozen):
    """How the scheduler asks the workers what is stored."""

    timeout: DurationSeconds = Field(
        1.0, description="A lookup that is not answered by then is a miss."
    )
    lease: DurationSeconds = Field(
        300.0,
        description="How long a lookup protects what it found from eviction if nothing ends it "
        "earlier.",
    )
    socket_dir: Path | None = Field(
        None,
        strict=False,
        description="Where the lookup sockets are made, in a private directory. Unset: "
        "$XDG_RUNTIME_DIR, or else the directory for temporary files.",
    )


class IdentitySettings(_Frozen):
    """What names the model, where the engine's own answer is not the right one."""

    model: str | None = Field(
        None, min_length=1, description="Name of the model. Unset: as the engine was given it."
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="Revision of the weights. Unset: the engine's, or a fingerprint of config and "
        "weights. Who sets it promises that equal texts mean equal weights.",
    )
    tags: Tags = Field((), description="Names and values that keep this cache apart from others.")


class Settings(_Frozen):
    """All settings of kvkeep."""

    chunk_size: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="Tokens in a chunk; a multiple of the engine's page (block) size.",
    )
    save_unfull_chunk: bool = Field(
        False, description="Store the tail of a prompt that fills no chunk, too."
    )
    store_decode: bool = Field(
        False, description="Store generated tokens, too, once they fill a chunk."
    )
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    lookup: LookupSettings = Field(default_factory=LookupSettings)
    identity: IdentitySettings = Field(default_factory=IdentitySettings)

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.lookup.lease <= self.lookup.timeout:
            raise ValueError(
                f"lookup.lease ({self.lookup.lease:g} s) must be longer than lookup.timeout "
                f"({self.lookup.timeout:g} s), or what a lookup found is given up before its answer"
            )
        names = [name for name, _ in self.identity.tags]
        if len(set(names)) != len(names):
            raise ValueError(f"identity.tags names a tag twice: {names}")
        return self
