"""Translates the settings of LMCache, as its documentation names them, into kvkeep's.

Every key that is given gets a note: what became of it, and why. Nothing is dropped in silence, and
a value that cannot be read is an error. Keys are those of LMCache's page "Configuring LMCache"
(https://docs.lmcache.ai/api_reference/configurations.html). Pure but for reading the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvkeep.config.base import SMALLEST_SIZE_BYTES, RemoteURL, format_size
from kvkeep.config.load import read_yaml, resolve_settings
from kvkeep.errors import ConfigError


class Fate(StrEnum):
    """What became of a key."""

    TAKEN = "taken"
    """It is in the translation."""
    NOT_NEEDED = "not_needed"
    """Nothing is lost: it is off, or kvkeep does so anyway."""
    NO_COUNTERPART = "no_counterpart"
    """kvkeep has no such thing; the reason says what to do instead."""


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one key.

    Attributes:
        key: LMCache's name.
        fate: what became of it.
        reason: kvkeep's settings that it became, or why there is none.
    """

    key: str
    fate: Fate
    reason: str


@dataclass(slots=True)
class Translation:
    """kvkeep's settings, nested, with a note for every key of LMCache's."""

    settings: dict[str, object] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def take(self, key: str, values: Mapping[str, object]) -> None:
        """Enter settings by their dotted names, and note it."""
        for path, value in values.items():
            section, _, name = path.rpartition(".")
            place: object = self.settings.setdefault(section, {}) if section else self.settings
            if isinstance(place, dict):
                place[name] = value
        self.notes.append(Note(key, Fate.TAKEN, ", ".join(values)))

    def pass_over(self, key: str, reason: str, fate: Fate = Fate.NOT_NEEDED) -> None:
        """Note that a key became nothing."""
        self.notes.append(Note(key, fate, reason))


def translate_file(path: Path) -> Translation:
    """Translate a YAML file of LMCache's; the result is checked as kvkeep checks its own.

    Raises:
        ConfigError: it cannot be read, a value is malformed, or kvkeep refuses the translation.
    """
    given = read_yaml(path)
    try:
        translation = translate(given)
        resolve_settings(extra=translation.settings, extra_origin="the translation")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return translation


def translate(given: Mapping[str, object]) -> Translation:
    """Translate the keys and values of one file.

    Raises:
        ConfigError: a value has the wrong type.
    """
    done = Translation()
    for name, value in given.items():
        key = str(name)
        if key in _READERS:
            _READERS[key](done, given)
        elif value is None or value is False or value in ("", {}, []):
            done.pass_over(key, "switched off")
        elif key in _REASONS:
            done.pass_over(key, *_REASONS[key])
        else:
            done.pass_over(key, _reason_of_group(key), Fate.NO_COUNTERPART)
    return done


def _number(given: Mapping[str, object], key: str) -> float:
    value = given[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ConfigError(f"{key} = {value!r}: must be a number, 0 or more")
    return value


def _flag(given: Mapping[str, object], key: str) -> bool:
    value = given[key]
    if not isinstance(value, bool):
        raise ConfigError(f"{key} = {value!r}: must be true or false")
    return value


def _size(given: Mapping[str, object], key: str) -> str | None:
    """LMCache's GB are 2^30 bytes; None is less than a page, which stands for none."""
    size_bytes = int(_number(given, key) * (1 << 30)) // SMALLEST_SIZE_BYTES * SMALLEST_SIZE_BYTES
    return format_size(size_bytes) if size_bytes else None


def _chunk_size(done: Translation, given: Mapping[str, object]) -> None:
    if type(given["chunk_size"]) is not int:
        raise ConfigError(f"chunk_size = {given['chunk_size']!r}: must be a whole number")
    done.take("chunk_size", {"chunk_size": given["chunk_size"]})


def _same_flag(key: str, name: str) -> Callable[[Translation, Mapping[str, object]], None]:
    def read(done: Translation, given: Mapping[str, object]) -> None:
        done.take(key, {name: _flag(given, key)})

    return read


def _local_cpu(done: Translation, given: Mapping[str, object]) -> None:
    if _flag(given, "local_cpu"):
        done.pass_over("local_cpu", "the CPU tier is always on")
    else:
        done.pass_over(
            "local_cpu", "the CPU tier is always on; make it small by cpu.size", Fate.NO_COUNTERPART
        )


def _cpu_size(done: Translation, given: Mapping[str, object]) -> None:
    size = _size(given, "max_local_cpu_size")
    if size is None:
        done.pass_over("max_local_cpu_size", "the pool cannot be empty", Fate.NO_COUNTERPART)
    else:
        done.take("max_local_cpu_size", {"cpu.size": size})


def _reserve(done: Translation, given: Mapping[str, object]) -> None:
    size = _size(given, "reserve_local_cpu_size")
    if size is None:
        done.pass_over("reserve_local_cpu_size", "switched off")
    else:
        done.take("reserve_local_cpu_size", {"cpu.reserve": size})


def _disk_path(given: Mapping[str, object]) -> str | None:
    value = given.get("local_disk")
    if value in (None, False, ""):
        return None
    if not isinstance(value, str) or "," in value:
        raise ConfigError(f"local_disk = {value!r}: must be one path like file:///path/")
    scheme, mark, path = value.partition("://")
    if mark and scheme != "file":
        raise ConfigError(f"local_disk = {value!r}: must be one path like file:///path/")
    return (path if mark else value).rstrip("/") or "/"


def _local_disk(done: Translation, given: Mapping[str, object]) -> None:
    path = _disk_path(given)
    if path is None:
        done.pass_over("local_disk", "switched off")
        return
    done.take("local_disk", {"disk.path": path})


def _disk_size(done: Translation, given: Mapping[str, object]) -> None:
    size = _size(given, "max_local_disk_size")
    if _disk_path(given) is None:
        done.pass_over("max_local_disk_size", "there is no local_disk")
    elif size is None:
        done.pass_over(
            "max_local_disk_size",
            "a disk tier cannot be empty; it has kvkeep's default size unless you set disk.size",
            Fate.NO_COUNTERPART,
        )
    else:
        done.take("max_local_disk_size", {"disk.size": size})


def _policy(done: Translation, given: Mapping[str, object]) -> None:
    value = given["cache_policy"]
    if not isinstance(value, str):
        raise ConfigError(f"cache_policy = {value!r}: must be a name like LRU")
    names = ["cpu.policy"] + (["disk.policy"] if _disk_path(given) is not None else [])
    done.take("cache_policy", dict.fromkeys(names, value.lower()))


def _numa(done: Translation, given: Mapping[str, object]) -> None:
    mode = given["numa_mode"]
    extra = given.get("extra_config")
    nodes = extra.get("gpu_to_numa_mapping") if isinstance(extra, Mapping) else None
    if mode in (None, "auto"):
        done.take("numa_mode", {"cpu.numa": "auto" if mode else "off"})
    elif mode == "manual" and isinstance(nodes, Mapping):
        done.take("numa_mode", {"cpu.numa": dict(nodes)})
    else:
        raise ConfigError(
            f"numa_mode = {mode!r}: must be auto, null, or manual with gpu_to_numa_mapping in "
            "extra_config"
        )


def _lookup_timeout(done: Translation, given: Mapping[str, object]) -> None:
    milliseconds = _number(given, "lookup_timeout_ms")
    done.take("lookup_timeout_ms", {"lookup.timeout": f"{milliseconds:.15g}ms"})


def _remote_url(done: Translation, given: Mapping[str, object]) -> None:
    value = given["remote_url"]
    if not value:
        done.pass_over("remote_url", "switched off")
        return
    url = _store_of(value)
    if url is None:
        reason = "no such store, or it is written in another way: see docs/remote.md"
        done.pass_over("remote_url", reason, Fate.NO_COUNTERPART)
    else:
        done.take("remote_url", {"remote.url": url})


def _store_of(value: object) -> str | None:
    """The URL here for a store of LMCache's; None if there is none, or more must be said."""
    if not isinstance(value, str):
        raise ConfigError("remote_url must be a text like redis://host:6379")
    url = RemoteURL.parse(value)
    if url.scheme in ("redis", "rediss", "valkey", "unix"):
        return value
    return f"file://{url.path}" if url.scheme == "fs" and url.path.startswith("/") else None


def _remote_serde(done: Translation, given: Mapping[str, object]) -> None:
    if given["remote_serde"] in (None, "naive"):
        done.pass_over("remote_serde", "chunks are stored as they are in memory")
    else:
        reason = "remote.codec can be zstd, or, at the price of exactness, fp8 or int8"
        done.pass_over("remote_serde", reason, Fate.NO_COUNTERPART)


def _extra_config(done: Translation, given: Mapping[str, object]) -> None:
    extra = given["extra_config"]
    if extra is None:
        done.pass_over("extra_config", "empty")
        return
    if not isinstance(extra, Mapping):
        raise ConfigError(f"extra_config = {extra!r}: must be a mapping")
    for name in extra:
        key = f"extra_config.{name}"
        if name != "gpu_to_numa_mapping":
            done.pass_over(key, _reason_of_group(str(name)), Fate.NO_COUNTERPART)
        elif given.get("numa_mode") != "manual":
            done.pass_over(key, "numa_mode is not manual")
        else:
            done.pass_over(key, "part of cpu.numa", Fate.TAKEN)


_READERS: dict[str, Callable[[Translation, Mapping[str, object]], None]] = {
    "chunk_size": _chunk_size,
    "local_cpu": _local_cpu,
    "max_local_cpu_size": _cpu_size,
    "reserve_local_cpu_size": _reserve,
    "local_disk": _local_disk,
    "max_local_disk_size": _disk_size,
    "save_decode_cache": _same_flag("save_decode_cache", "store_decode"),
    "save_unfull_chunk": _same_flag("save_unfull_chunk", "save_unfull_chunk"),
    "save_only_first_rank": _same_flag("save_only_first_rank", "ranks.save_only_first_rank"),
    "enable_async_loading": _same_flag("enable_async_loading", "prefetch.enabled"),
    "cache_policy": _policy,
    "numa_mode": _numa,
    "lookup_timeout_ms": _lookup_timeout,
    "remote_url": _remote_url,
    "remote_serde": _remote_serde,
    "extra_config": _extra_config,
}
_LAZY = "the pool's memory is always committed as it is used; see cpu.prefault"
_REASONS: dict[str, tuple[str, Fate]] = {
    "enable_lazy_memory_allocator": (_LAZY, Fate.NOT_NEEDED),
    "lazy_memory_initial_ratio": (_LAZY, Fate.NOT_NEEDED),
    "lazy_memory_expand_trigger_ratio": (_LAZY, Fate.NOT_NEEDED),
    "lazy_memory_step_ratio": (_LAZY, Fate.NOT_NEEDED),
    "lazy_memory_safe_size": (_LAZY, Fate.NOT_NEEDED),
    "pre_caching_hash_algorithm": (
        "keys are always SHA-256, equal in every process",
        Fate.NOT_NEEDED,
    ),
    "py_enable_gc": ("Python's garbage collection is left alone", Fate.NOT_NEEDED),
    "use_layerwise": ("under an engine, chunks move whole", Fate.NO_COUNTERPART),
    "blocking_timeout_secs": (
        "each wait has its own limit: lookup.timeout, cpu.alloc_timeout, disk.load_timeout, "
        "remote.load_timeout",
        Fate.NO_COUNTERPART,
    ),
    "external_lookup_client": ("lookups go to the workers themselves", Fate.NO_COUNTERPART),
    "priority_limit": ("requests are cached whatever their priority", Fate.NO_COUNTERPART),
    "min_retrieve_tokens": ("every hit is loaded, however short", Fate.NO_COUNTERPART),
    "transfer_channel": ("KV is not sent from engine to engine", Fate.NO_COUNTERPART),
    "lmcache_instance_id": ("there is no controller", Fate.NO_COUNTERPART),
    "lmcache_worker_port": ("there is no controller", Fate.NO_COUNTERPART),
}
_GROUPS = {
    ("blend_", "enable_blending"): "only unbroken prefixes are reused; there is no blending",
    ("p2p_", "enable_p2p", "peer_"): "KV is not sent from engine to engine",
    ("controller_", "enable_controller"): "there is no controller",
    ("pd_", "enable_pd"): "there is no split into prefill and decode engines",
    ("nixl_", "enable_nixl"): "there is no NIXL tier",
    ("gds_", "cufile_"): "there is no GPUDirect Storage tier; disk.path is read through memory",
    ("internal_api_",): "there is no HTTP server but that of metrics.listen",
    ("histogram_bucket_",): "the buckets of the histograms are fixed; see docs/metrics.md",
}


def _reason_of_group(key: str) -> str:
    """Why kvkeep has no counterpart for a key, by the beginning of its name."""
    for starts, reason in _GROUPS.items():
        if key.startswith(starts):
            return reason
    near = difflib.get_close_matches(key, [*_READERS, *_REASONS], n=1, cutoff=0.75)
    return "not a key that kvkeep knows" + (f"; did you mean {near[0]}?" if near else "")
