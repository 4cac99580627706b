"""The disk tier's directory: may it be used, what is it on, how much is free, how fast is it?

The rate is that of one file, written, flushed to the medium and read back past the system's cache,
then removed. It takes little of the tier's budget and never longer than a few seconds.

The remote tier: does its store answer, how far away is it, and does it keep a value?

A small value is put, read back, compared and removed, under a name of the doctor's own.

Plugins, and the directory of the lookup sockets: can they be used?
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from kvkeep.backends.plugins import find_plugin
from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.cli.output import about_rate, about_size, about_time
from kvkeep.codec.frame import Buffer
from kvkeep.config.base import RemoteURL, format_size
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.errors import BackendError, ConfigError, LookupServiceError, MissingExtraError
from kvkeep.lookup.sockets import check_private, is_listened_on, socket_directory, socket_path

#: File systems that other machines serve; locks and renames on them are slow or worse.
NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre"),
        *("beegfs", "gpfs", "orangefs", "wekafs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse"),
        *("fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "virtiofs"),
    }
)
#: File systems that are memory.
MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
#: Bytes of the test file, at most; and the share of what is free or allowed.
_TEST_BYTES, _TEST_SHARE = 256 << 20, 16
_PIECE_BYTES = 4 << 20
#: Writing stops then, and so does reading.
_TEST_S = 2.0
#: Files of the tier are counted for so long.
_COUNT_S = 2.0


@dataclass(frozen=True, slots=True)
class _Rates:
    written: float
    read: float
    num_bytes: int


def place(patient: Patient) -> Sequence[Finding]:
    """The directory, its file system and the room on it."""
    disk = patient.settings.disk
    if disk.path is None:
        advice = Advice(
            "Name a directory on a local disk, and what is kept survives a restart.",
            "disk.path: /var/cache/kvkeep",
        )
        return [Finding("directory", "none: there is no disk tier", Level.NOTE, advice)]
    path = disk.path.absolute()
    existing = _nearest(path)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is no directory" if not existing.is_dir() else "may not be written by this user"
        advice = Advice(
            "Let this user make and write the directory, or name another one.",
            f"sudo install -d -o $USER -m 700 {path}",
        )
        return [Finding("directory", f"{existing} {what}", Level.ERROR, advice)]
    text = f"{path}" if existing == path else f"{path}, which is made when it is first used"
    return [Finding("directory", text), _file_system(existing), _room(patient, path, existing)]


def rates(patient: Patient) -> Sequence[Finding]:
    """How fast one file is written and read."""
    disk = patient.settings.disk
    if disk.path is None:
        return []
    folder = _nearest(disk.path.absolute())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return []
    free = shutil.disk_usage(folder).free
    size = min(_TEST_BYTES, disk.size // _TEST_SHARE, free // _TEST_SHARE)
    try:
        found = _measure(folder, max(size // _PIECE_BYTES, 1) * _PIECE_BYTES)
    except OSError as error:
        return [Finding("rate", f"cannot be measured: {error.strerror}", Level.ERROR)]
    text = (
        f"{about_rate(found.written)} written and flushed, {about_rate(found.read)} read "
        f"(one file, {about_size(found.num_bytes)})"
    )
    values = {"written_bytes_per_s": found.written, "read_bytes_per_s": found.read}
    return [Finding("rate", text, values=values)]


def file_system_of(path: Path) -> tuple[str, str]:
    """(type, mount point) of the file system that ``path`` is on; ``("unknown", "/")`` else."""
    best = ("unknown", "/")
    real = path.resolve()
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if real.is_relative_to(point) and len(mount.mountpoint) >= len(best[1]):
            best = (mount.fstype, mount.mountpoint)
    return best


def _file_system(path: Path) -> Finding:
    kind, mount = file_system_of(path)
    values = {"type": kind, "mount": mount}
    if kind in NETWORK_TYPES:
        advice = Advice(
            "Put disk.path on a local disk; a directory that machines share is a remote tier.",
            f"remote.url: file://{path}",
        )
        text = f"{kind} at {mount}: another machine serves it"
        return Finding("file system", text, Level.WARNING, advice, values)
    if kind in MEMORY_TYPES:
        advice = Advice(f"Put disk.path on a disk: {mount} is memory, which a restart empties.")
        text = f"{kind} at {mount}: that is memory"
        return Finding("file system", text, Level.WARNING, advice, values)
    return Finding("file system", f"{kind} at {mount}, local", values=values)


def _room(patient: Patient, path: Path, existing: Path) -> Finding:
    usage = shutil.disk_usage(existing)
    budget = patient.settings.disk.size
    used, is_all = _used_bytes(path)
    values = {"free_bytes": usage.free, "budget_bytes": budget, "used_bytes": used}
    text = f"{about_size(usage.free)} free; the tier may use {about_size(budget)}"
    if used:
        text += f" and uses {'' if is_all else 'more than '}{about_size(used)}"
    if usage.free + used < budget:
        fitting = format_size((usage.free + used) * 9 // 10 >> 30 << 30)
        if fitting == "0B":
            advice = Advice(f"Make room on {existing}, or name a directory on another disk.")
        else:
            advice = Advice("Let the tier use no more than is free.", f"disk.size: {fitting}")
        return Finding("room", text, Level.WARNING, advice, values)
    return Finding("room", text, values=values)


def _used_bytes(path: Path) -> tuple[int, bool]:
    """What files below ``path`` take, as far as that is known soon; and whether that is all.

    What goes away meanwhile does not count.
    """
    total, end = 0, time.monotonic() + _COUNT_S
    for folder, _, names in os.walk(path):
        if time.monotonic() > end:
            return total, False
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total, True


def _nearest(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _measure(folder: Path, size: int) -> _Rates:
    """Write, flush and read one file of up to ``size`` bytes.

    Raises:
        OSError: the disk is full, or fails.
    """
    piece = np.random.default_rng(1).integers(0, 256, _PIECE_BYTES, np.uint8).tobytes()
    with tempfile.NamedTemporaryFile(prefix=".kvkeep-doctor-", dir=folder, buffering=0) as file:
        fd = file.fileno()
        begin = time.perf_counter()
        written = 0
        while written < size and time.perf_counter() - begin < _TEST_S:
            written += os.write(fd, piece)
        os.fsync(fd)
        write_s = time.perf_counter() - begin
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        target = bytearray(_PIECE_BYTES)
        begin = time.perf_counter()
        done = 0
        while done < written and time.perf_counter() - begin < _TEST_S:
            done += os.preadv(fd, [target], done)
        read_s = time.perf_counter() - begin
    return _Rates(written / write_s, done / read_s, written)


DISK_PROBES = (
    Probe("disk", "directory", place, deadline_s=10.0),
    Probe("disk", "rate", rates, deadline_s=20.0),
)


#: Deadline of every call.
CALL_TIMEOUT_S = 3.0
_PINGS = 5
_VALUE_BYTES = 4 << 20
_NAME = "kvkeep-doctor-"


class ReadBack(ValueSink):
    """Collects one value in memory of its own."""

    def __init__(self, payload_bytes: int) -> None:
        """Expect a payload of that size."""
        self.payload = bytearray(payload_bytes)  # nobody else's, so it need not be held
        self._view = memoryview(self.payload)
        self.header = b""
        self.is_whole = False

    def expected(self, payload_bytes: int) -> memoryview | None:
        """See :meth:`ValueSink.expected`."""
        return self._view if payload_bytes == len(self._view) else None

    def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
        """See :meth:`ValueSink.begin`."""
        self.header = bytes(header)
        return self.expected(size_bytes - HEADER_BYTES)

    def filled(self, payload_bytes: int) -> None:
        """See :meth:`ValueSink.filled`."""

    def finish(self) -> None:
        """See :meth:`ValueSink.finish`."""
        self.is_whole = True

    def hold(self) -> Callable[[], None]:
        """See :meth:`ValueSink.hold`."""
        return lambda: None

    def fail(self, cause: str) -> None:
        """See :meth:`ValueSink.fail`."""


def store(patient: Patient) -> Sequence[Finding]:
    """Ask the store that the settings name."""
    remote = patient.settings.remote
    if remote.url is None:
        return [Finding("store", "none: there is no remote tier")]
    options = ConnectorOptions(
        connections=2,
        connect_timeout_s=remote.connect_timeout,
        ttl_s=remote.ttl,
        max_value_bytes=HEADER_BYTES + _VALUE_BYTES,
    )
    shown = RemoteURL.parse(remote.url).masked
    try:
        connector = create_connector(RemoteURL.parse(remote.url), options)
    except (ConfigError, MissingExtraError) as error:
        advice = Advice("Mend remote.url, or install what it needs.")
        return [Finding("store", f"{shown}: {error}", Level.ERROR, advice)]
    try:
        return [Finding("store", connector.description), *_ask(connector)]
    except BackendError as error:
        advice = Advice(f"Start the store, or mend remote.url: {shown} is of no use now.")
        return [Finding("store", f"{shown}: {error}", Level.ERROR, advice)]
    finally:
        connector.close()


def _ask(connector: RemoteConnector) -> list[Finding]:
    """Ping, and a value there and back.

    Raises:
        BackendError: the store failed.
    """
    connector.ping(CALL_TIMEOUT_S)  # makes the connection
    times = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        connector.ping(CALL_TIMEOUT_S)
        times.append(time.perf_counter() - begin)
    trip = min(times)
    findings = [Finding("round trip", about_time(trip), values={"seconds": trip})]
    name = _NAME + secrets.token_hex(16)
    payload = os.urandom(_VALUE_BYTES)
    try:
        findings.append(_there_and_back(connector, name, payload))
    finally:
        connector.remove([name], CALL_TIMEOUT_S)
    return findings


def _there_and_back(connector: RemoteConnector, name: str, payload: bytes) -> Finding:
    value = Value(os.urandom(HEADER_BYTES), payload)
    begin = time.perf_counter()
    [refusal] = connector.put([name], [value], CALL_TIMEOUT_S)
    put_s = time.perf_counter() - begin
    if refusal is not None:
        return Finding("value", f"refused: {refusal}", Level.ERROR, _for_refusal(refusal))
    sink = ReadBack(len(payload))
    begin = time.perf_counter()
    connector.get([name], [sink], CALL_TIMEOUT_S)
    get_s = time.perf_counter() - begin
    if not sink.is_whole or sink.header != value.header or sink.payload != payload:
        return Finding("value", "what was put is not what came back", Level.ERROR)
    put_rate, get_rate = len(payload) / put_s, len(payload) / get_s
    text = (
        f"put {about_rate(put_rate)}, got back {about_rate(get_rate)}, removed "
        f"({about_size(len(payload))}, one connection)"
    )
    values = {"put_bytes_per_s": put_rate, "get_bytes_per_s": get_rate}
    return Finding("value", text, values=values)


def _for_refusal(refusal: Refusal) -> Advice:
    return {
        Refusal.FULL: Advice("Give the store more memory, or let it evict what is old."),
        Refusal.READ_ONLY: Advice("Let kvkeep write: name the primary, or give its user rights."),
        Refusal.TOO_LARGE: Advice("Let the store take values of some tens of MiB."),
        Refusal.REFUSED: Advice("Look into the store's own log for why it refused a value."),
    }[refusal]


REMOTE_PROBES = (Probe("remote", "store", store, deadline_s=8 * CALL_TIMEOUT_S),)


def sockets(patient: Patient) -> Sequence[Finding]:
    """Where workers make their sockets: there, private, and short enough."""
    directory = socket_directory(patient.settings.lookup.socket_dir, patient.env)
    advice = Advice(
        "Name a short directory that this user may write.", "lookup.socket_dir: /run/user/1000"
    )
    try:
        socket_path(directory, "engine", 0)
        if directory.exists() or directory.is_symlink():
            check_private(directory)
    except LookupServiceError as error:
        return [Finding("sockets", str(error), Level.ERROR, advice)]
    base = directory if directory.exists() else directory.parent
    while not base.exists():
        base = base.parent
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        text = f"{base} may not be written by this user"
        return [Finding("sockets", text, Level.ERROR, advice)]
    found = directory.glob("*.sock") if directory.exists() else ()
    count = sum(1 for path in found if is_listened_on(path))
    running = {0: "no engine runs", 1: "1 worker answers"}.get(count, f"{count} workers answer")
    return [Finding("sockets", f"{directory}, {running}", values={"sockets": count})]


def plugins(patient: Patient) -> Sequence[Finding]:
    """Whether each plugin's class is found; it is not built."""
    findings = []
    for plugin in patient.settings.plugins:
        try:
            found = find_plugin(plugin)
        except ConfigError as error:
            advice = Advice(f"Mend or remove the plugin {plugin.name}.")
            findings.append(Finding(plugin.name, str(error), Level.ERROR, advice))
        else:
            findings.append(Finding(plugin.name, f"plugin {found.__qualname__}, found"))
    return findings


TIER_PROBES = (
    Probe("engine", "sockets", sockets),
    Probe("engine", "plugins", plugins, deadline_s=20.0),
)
