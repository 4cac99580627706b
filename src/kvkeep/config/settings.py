"""The tree of settings: what can be set, its unit, its default and what it is checked against.

Settings stop at the door: whoever builds a component reads them and passes plain values on.
Immutable, so any thread may read them. ``docs/configuration.md`` shows the descriptions below.

Settings of the rule that says whether asking a slow tier pays.

Settings of how chunks come from slow tiers into memory, and from there into the engine.

Settings of an engine that has several ranks.

Settings of the tier in a store that machines share.

What kvkeep shows of itself: the metrics endpoint, spans and the form of its logs.

Nothing listens and nothing is sent unless it is set here. Immutable values for any thread.

Which settings matter under one engine alone. Values and a pure function.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvkeep.config.base import (
    CodecName,
    DurationSeconds,
    Frozen,
    OwnPath,
    RemoteURL,
    SizeBytes,
    SizeBytesOrZero,
    Threads,
    Tokens,
    lower,
)


class CostSettings(Frozen):
    """Whether loading is weighed against computing again, see docs/architecture.md."""

    enabled: bool = Field(
        True,
        description="Ask a tier below the memory only where loading is expected to be quicker than "
        "computing again, as measured. Off: every tier is always asked.",
    )
    retry: DurationSeconds = Field(
        30.0,
        description="A tier that is too slow to pay is tried again after this time.",
    )


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


class PrefetchSettings(Frozen):
    """Lookups that are answered when the chunks are in memory, see docs/vllm.md."""

    enabled: bool | None = Field(
        None,
        description="A vLLM request whose prefix is in a slow tier waits in the queue until its "
        "chunks are in memory, and no step waits for them. Unset: where there is a tier below the "
        "memory.",
    )
    timeout: DurationSeconds = Field(
        10.0,
        description="How long a request waits for its chunks. After that it goes on with those "
        "that have arrived.",
    )
    memory: SizeBytes | None = Field(
        None,
        description="Most memory of the pool that waiting requests may hold, in whole chunks. "
        "Unset: half of it.",
    )

    def check(self, *, has_slow_tier: bool, lease_s: float) -> None:
        """Check against the other settings.

        Args:
            has_slow_tier: there is a tier below the memory.
            lease_s: how long a lookup protects what it found.

        Raises:
            ValueError: a setting has no effect, or contradicts another one.
        """
        given = sorted(self.model_fields_set)
        if given and not has_slow_tier:
            raise ValueError(f"prefetch.{given[0]} has no effect without a tier below the memory")
        others = [name for name in given if name != "enabled"]
        if others and self.enabled is False:
            raise ValueError(f"prefetch.{others[0]} has no effect with prefetch.enabled = false")
        if has_slow_tier and self.enabled is not False and lease_s <= self.timeout:
            raise ValueError(
                f"lookup.lease ({lease_s:g} s) must be longer than prefetch.timeout "
                f"({self.timeout:g} s), or chunks are given up before they are all there"
            )


class LoadSettings(Frozen):
    """How chunks in memory are copied into the engine's pages."""

    asynchronous: bool = Field(
        False,
        description="Copy between vLLM's steps instead of before one: running requests never wait "
        "for another one's copy, and the request itself starts a step later.",
    )


class RanksSettings(Frozen):
    """How the ranks (workers) of one engine load together, see docs/vllm.md."""

    save_only_first_rank: bool | None = Field(
        None,
        description="Rank 0 alone stores and loads, and the other ranks copy what it loaded. "
        "Unset: where the KV is the same on every rank (latent attention) and all ranks are on "
        "one machine. On where that is not so is an error.",
    )
    timeout: DurationSeconds = Field(
        5.0,
        description="How long a load waits for another rank. After that it is a miss on every "
        "rank.",
    )


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


def _sorted_pairs(value: object) -> object:
    """A mapping of texts as pairs sorted by name, the form that CacheIdentity takes."""
    if isinstance(value, tuple):
        return tuple(sorted(value, key=str))
    if not isinstance(value, Mapping):
        raise ValueError("write tags as a mapping of texts, like {team: search}")
    return tuple(sorted(value.items(), key=lambda pair: str(pair[0])))


def _node_map(value: object) -> object:
    """A mapping of GPU to node, whose numbers may be texts as in JSON, as sorted pairs."""
    if value is False:  # YAML reads off without quotes so
        return "off"
    if not isinstance(value, Mapping):
        return value
    numbers = [(str(gpu), str(node)) for gpu, node in value.items()]
    if not all(part.isascii() and part.isdecimal() for pair in numbers for part in pair):
        raise ValueError("write the map as numbers of GPUs and of memory nodes, like {0: 0, 1: 1}")
    return tuple(sorted((int(gpu), int(node)) for gpu, node in numbers))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_POLICY_NAMES = ["fifo", "lru", "lfu", "mru", "reuse"]
PolicyName = Annotated[
    Literal["fifo", "lru", "lfu", "mru", "reuse"],
    BeforeValidator(lower),
    WithJsonSchema({"enum": [*_POLICY_NAMES, *(name.upper() for name in _POLICY_NAMES)]}),
]
Tags = Annotated[
    tuple[tuple[str, str], ...],
    BeforeValidator(_sorted_pairs),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


#: GPU number and memory node.
NodeMap = tuple[tuple[int, int], ...]
_NODE_MAP_SCHEMA = {
    "type": "object",
    "patternProperties": {"^[0-9]+$": {"type": ["integer", "string"], "pattern": "^[0-9]+$"}},
    "additionalProperties": False,
}
Placement = Annotated[
    Literal["auto", "off"] | NodeMap,
    BeforeValidator(_node_map),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "off", False]}, _NODE_MAP_SCHEMA]}),
]


class CpuSettings(Frozen):
    """The pool of CPU memory and the tier that lives in it."""

    size: SizeBytes | None = Field(
        None,
        description="Size of the pool. Unset: 5 GB or half of the available memory (of this "
        "worker's share of it), whichever is less.",
    )
    policy: PolicyName = Field(
        "reuse",
        description="Order of eviction: reuse, lru, lfu, fifo or mru, in any case; see "
        "docs/policies.md.",
    )
    first_rank_size: SizeBytes | None = Field(
        None,
        description="Size of the pool of rank 0 where the KV is the same on every rank "
        "(latent attention). The other ranks need none then, unless "
        "`ranks.save_only_first_rank` is off. Unset: `cpu.size`.",
    )
    reserve: SizeBytes | None = Field(
        None,
        description="Make pools smaller where they would leave less than this of the memory that "
        "is available at the start. Unset: no such limit.",
    )
    buffers: SizeBytesOrZero = Field(
        16 << 20,
        description="Memory for byte buffers of tiers and plugins, beside the pool. 0B: they come "
        "out of the pool.",
    )
    allocator: Literal["mixed", "paged"] = Field(
        "mixed",
        description="mixed: a pool for KV and one for byte buffers. paged: one range of equal "
        "slots on memory pages, which can be registered for transfers between nodes.",
    )
    numa: Placement = Field(
        "auto",
        description="Memory node of the pool: auto takes the one nearest to the worker's GPU, off "
        "leaves it to the system, a map of GPU to node like {0: 0, 1: 1} says it.",
    )
    shared_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,179}$",
        description="Put the pool into shared memory of this name, with `-RANK` behind it where "
        "there are several ranks. Unset: memory of the process alone.",
    )
    prefault: SizeBytesOrZero = Field(
        256 << 20,
        description="So much of the pool is committed ahead of its first use, in the background. "
        "0B: each request pays for the memory that it is the first to use.",
    )
    alloc_timeout: DurationSeconds = Field(
        5.0, description="How long a load waits for memory to be released before it is a miss."
    )
    huge_pages: bool = Field(
        True,
        description="Ask the system for huge pages where it has them, also for an engine's caches "
        "on the CPU.",
    )
    copy_threads: Threads = Field(
        1,
        ge=1,
        le=256,
        description="Threads that copy between the engine's memory and the pool, on the CPU.",
    )


class DiskSettings(Frozen):
    """The tier on a local disk, see docs/disk.md."""

    path: OwnPath | None = Field(
        None,
        strict=False,
        description="Directory of the disk tier, on a local file system; several processes may "
        "share it. Unset: there is no disk tier.",
    )
    size: SizeBytes = Field(
        20 << 30,
        description="Most bytes of files in the directory, over all processes that share it.",
    )
    policy: PolicyName = Field("reuse", description="Order of eviction from the disk.")
    threads: Threads = Field(
        4, ge=2, le=256, description="Threads for file I/O; one of them serves loads only."
    )
    queue: SizeBytes = Field(
        1 << 30,
        description="Memory that stores which wait for the disk may hold, and at most a quarter of "
        "the pool. Stores beyond it are dropped.",
    )
    load_timeout: DurationSeconds = Field(
        10.0, description="A load from the disk that takes longer is a miss."
    )
    codec: CodecName = Field(
        "raw",
        description="How chunks are written: raw, zstd (smaller, the same KV), or at the price of "
        "exactness fp8 or int8. See docs/codecs.md.",
    )

    @model_validator(mode="after")
    def _check_path(self) -> DiskSettings:
        others = sorted(self.model_fields_set - {"path"})
        if self.path is None and others:
            raise ValueError(f"disk.{others[0]} has no effect without disk.path")
        return self


class LookupSettings(Frozen):
    """How the scheduler asks the workers what is stored."""

    timeout: DurationSeconds = Field(
        1.0, description="A lookup that is not answered by then is a miss."
    )
    lease: DurationSeconds = Field(
        300.0,
        description="How long a lookup protects what it found from eviction if nothing ends it "
        "earlier.",
    )
    socket_dir: OwnPath | None = Field(
        None,
        strict=False,
        description="Where the lookup sockets are made, in a private directory. Unset: "
        "$XDG_RUNTIME_DIR, or else the directory for temporary files.",
    )


class IdentitySettings(Frozen):
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


class HealthSettings(Frozen):
    """How often tiers are asked whether they can serve."""

    interval: DurationSeconds = Field(
        5.0,
        description="Between two checks of the tiers' health. An unhealthy tier is left out until "
        "it recovers.",
    )
    timeout: DurationSeconds = Field(
        2.0, description="A tier that has not answered by then is unhealthy."
    )


class PluginSettings(Frozen):
    """A tier of somebody else's, see docs/plugins.md.

    Attributes:
        name: name of the tier.
        module: ``package.module:Class``.
        entry_point: name in the entry point group ``kvkeep.backends``.
        settings: handed to the plugin as they are; may hold secrets.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    module: str | None = Field(None, pattern=r"^[\w.]+:[\w.]+$")
    entry_point: str | None = Field(None, min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _check_source(self) -> PluginSettings:
        if (self.module is None) == (self.entry_point is None):
            raise ValueError(
                f"plugin {self.name} needs either module (package.module:Class) or entry_point"
            )
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.module, self.entry_point))


Plugins = Annotated[tuple[PluginSettings, ...], BeforeValidator(_as_tuple)]


class Settings(Frozen):
    """All settings of kvkeep."""

    chunk_size: Tokens = Field(
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
    remove_after_retrieve: bool = Field(
        False, description="Remove a chunk from every tier once it was loaded."
    )
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    disk: DiskSettings = Field(default_factory=DiskSettings)
    remote: RemoteSettings = Field(default_factory=RemoteSettings)
    lookup: LookupSettings = Field(default_factory=LookupSettings)
    prefetch: PrefetchSettings = Field(default_factory=PrefetchSettings)
    load: LoadSettings = Field(default_factory=LoadSettings)
    cost: CostSettings = Field(default_factory=CostSettings)
    ranks: RanksSettings = Field(default_factory=RanksSettings)
    identity: IdentitySettings = Field(default_factory=IdentitySettings)
    health: HealthSettings = Field(default_factory=HealthSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    plugins: Plugins = Field(
        (),
        description="Further tiers, below all others: a list of {name, module or entry_point, "
        "settings}. See docs/plugins.md.",
    )

    @property
    def has_slow_tier(self) -> bool:
        """There is a tier below the memory."""
        return self.disk.path is not None or self.remote.is_on or bool(self.plugins)

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        self.prefetch.check(has_slow_tier=self.has_slow_tier, lease_s=self.lookup.lease)
        if self.lookup.lease <= self.lookup.timeout:
            raise ValueError(
                f"lookup.lease ({self.lookup.lease:g} s) must be longer than lookup.timeout "
                f"({self.lookup.timeout:g} s), or what a lookup found is given up before its answer"
            )
        names = [name for name, _ in self.identity.tags]
        if len(set(names)) != len(names):
            raise ValueError(f"identity.tags names a tag twice: {names}")
        names = [plugin.name for plugin in self.plugins]
        if len(set(names)) != len(names):
            raise ValueError(f"plugins gives a name twice: {names}")
        return self


#: Settings without effect under transformers: there is one process, one rank and no queue.
VLLM_ONLY = frozenset(
    {
        "cpu.first_rank_size",
        "lookup.socket_dir",
        "prefetch.enabled",
        "prefetch.timeout",
        "prefetch.memory",
        "load.asynchronous",
        "ranks.save_only_first_rank",
        "ranks.timeout",
    }
)


def given_for_vllm(settings: Settings) -> list[str]:
    """Settings that were given, wherever, and matter under vLLM alone."""
    found = []
    for name in sorted(VLLM_ONLY):
        *sections, last = name.split(".")
        place: BaseModel = settings
        for section in sections:
            place = getattr(place, section)
        if last in place.model_fields_set:
            found.append(name)
    return found
