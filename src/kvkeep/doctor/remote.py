"""The remote tier: does its store answer, how far away is it, and does it keep a value?

A small value is put, read back, compared and removed, under a name of the doctor's own.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    ConnectorOptions,
    Refusal,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.backends.remote.names import create_connector
from kvkeep.cli.texts import about_rate, about_size, about_time
from kvkeep.codec.frame import Buffer
from kvkeep.config.store_url import RemoteURL
from kvkeep.doctor.base import Advice, Finding, Level, Patient, Probe
from kvkeep.errors import BackendError, ConfigError, MissingExtraError

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
