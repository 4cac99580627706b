"""ConnectorContract: what every connector to a remote store must do, as a pytest class.

Subclass it, override the fixture ``connector``, and pytest runs all of it:

    class TestMyConnector(ConnectorContract):
        @pytest.fixture
        def connector(self):
            return MyConnector(RemoteURL.parse("mine://host"), OPTIONS)
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    ConnectorOptions,
    RemoteConnector,
    Value,
    ValueSink,
)
from kvkeep.codec.frame import Buffer
from kvkeep.errors import BackendError

#: The largest value of the contract.
MAX_VALUE_BYTES = 4 << 20
#: What the connector of the contract is made with.
OPTIONS = ConnectorOptions(connections=4, connect_timeout_s=5.0, max_value_bytes=MAX_VALUE_BYTES)
WAIT_S = 30.0


class TestingSink(ValueSink):
    """A sink that keeps what it gets, and notes what is done to it."""

    __test__ = False  # for pytest: no class of tests

    def __init__(self, *, refuse: bool = False) -> None:
        """Refuse the value once its header is known, if asked."""
        self.header: bytes | None = None
        self.size_bytes = -1
        self.failure: str | None = None
        self.is_finished = False
        self._refuse = refuse
        self._memory = memoryview(bytearray())
        self._filled = 0

    def expected(self, payload_bytes: int) -> memoryview | None:
        """None: the header first."""
        return None

    def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
        """Note it, and give memory."""
        self.header, self.size_bytes = bytes(header), size_bytes
        self.is_finished, self._filled = False, 0
        if self._refuse or size_bytes < HEADER_BYTES or size_bytes > MAX_VALUE_BYTES:
            return None
        self._memory = memoryview(bytearray(size_bytes - HEADER_BYTES))
        return self._memory

    def filled(self, payload_bytes: int) -> None:
        """It never goes back."""
        assert self._filled <= payload_bytes <= len(self._memory)
        self._filled = payload_bytes

    def finish(self) -> None:
        """Once, after begin."""
        assert self.header is not None
        assert not self.is_finished
        self.is_finished = True

    def hold(self) -> Callable[[], None]:
        """Its memory is nobody else's anyway."""
        return lambda: None

    def fail(self, cause: str) -> None:
        """Note it."""
        self.failure = cause

    @property
    def data(self) -> bytes | None:
        """The whole value, None if it did not come."""
        return self.header + bytes(self._memory) if self.is_finished and self.header else None


def random_value(size_bytes: int, seed: int = 0) -> Value:
    """A value of so many bytes, header included; no two seeds give the same."""
    data = random.Random(f"{seed}/{size_bytes}").randbytes(size_bytes)
    return Value(data[:HEADER_BYTES], memoryview(bytearray(data[HEADER_BYTES:])))


def bytes_of_value(value: Value) -> bytes:
    """The whole of it."""
    return value.header + bytes(value.payload)


def read(connector: RemoteConnector, names: list[str]) -> list[bytes | None]:
    """What a store has under these names."""
    sinks = [TestingSink() for _ in names]
    connector.get(names, sinks, WAIT_S)
    return [sink.data for sink in sinks]


class ConnectorContract:
    """Tests that every connector must pass."""

    @pytest.fixture
    def connector(self) -> RemoteConnector:
        """Override it: a connector made with :data:`OPTIONS`. What else is in the store, stays."""
        raise NotImplementedError

    @pytest.fixture
    def prefix(self, connector: RemoteConnector) -> Iterator[str]:
        """What names of this test start with; they are removed after it."""
        prefix = f"kvkeep-v1/{uuid.uuid4().hex}/"
        yield prefix
        left = list(connector.names(prefix, WAIT_S))
        for start in range(0, len(left), 500):
            connector.remove(left[start : start + 500], WAIT_S)
        connector.close()
        connector.close()

    def test_nothing_is_there(self, connector: RemoteConnector, prefix: str) -> None:
        """Misses are values; the store answers."""
        names = [prefix + "a" * 64, prefix + "b" * 64]
        connector.ping(WAIT_S)
        assert connector.sizes(names, WAIT_S) == [0, 0]
        assert read(connector, names) == [None, None]
        assert connector.remove(names, WAIT_S) == [False, False]
        assert list(connector.names(prefix, WAIT_S)) == []
        assert connector.description

    def test_empty_batches(self, connector: RemoteConnector, prefix: str) -> None:
        """An empty question has an empty answer."""
        assert connector.sizes([], WAIT_S) == []
        assert connector.put([], [], WAIT_S) == []
        assert connector.remove([], WAIT_S) == []
        connector.get([], [], WAIT_S)

    @pytest.mark.parametrize("size_bytes", [257, 448, 70_000, (1 << 20) + 256, MAX_VALUE_BYTES])
    def test_what_was_put_can_be_read(
        self, connector: RemoteConnector, prefix: str, size_bytes: int
    ) -> None:
        """Byte for byte, at any size up to the largest."""
        name, value = prefix + "c" * 64, random_value(size_bytes)
        assert connector.put([name], [value], WAIT_S) == [None]
        assert connector.sizes([name], WAIT_S) == [size_bytes]
        assert read(connector, [name]) == [bytes_of_value(value)]

    def test_answers_stand_position_by_position(
        self, connector: RemoteConnector, prefix: str
    ) -> None:
        """Faults 1, 2: among many names, some of which are missing, every value is its own."""
        names = [f"{prefix}{number:064x}" for number in range(40)]
        values = [random_value(300 + number, number) for number in range(40)]
        there = [number for number in range(40) if number % 3]
        put = connector.put([names[i] for i in there], [values[i] for i in there], WAIT_S)
        assert put == [None] * len(there)
        wanted = [bytes_of_value(values[i]) if i % 3 else None for i in range(40)]
        assert connector.sizes(names, WAIT_S) == [300 + i if i % 3 else 0 for i in range(40)]
        assert read(connector, names) == wanted
        assert read(connector, names[::-1]) == wanted[::-1]
        assert connector.remove(names, WAIT_S) == [i % 3 > 0 for i in range(40)]
        assert connector.sizes(names, WAIT_S) == [0] * 40

    def test_a_value_replaces_another(self, connector: RemoteConnector, prefix: str) -> None:
        """The whole of it, also a longer one."""
        name = prefix + "d" * 64
        connector.put([name], [random_value(5000, 1)], WAIT_S)
        shorter = random_value(400, 2)
        assert connector.put([name], [shorter], WAIT_S) == [None]
        assert connector.sizes([name], WAIT_S) == [400]
        assert read(connector, [name]) == [bytes_of_value(shorter)]

    def test_short_and_empty_values(self, connector: RemoteConnector, prefix: str) -> None:
        """Fault 44: an empty value is none; a short one is shown as it is, and refused."""
        names = [f"{prefix}{number:064x}" for number in range(3)]
        values = [Value(b"", b""), Value(b"x" * 100, b""), random_value(300)]
        assert connector.put(names, values, WAIT_S) == [None] * 3
        assert connector.sizes(names, WAIT_S) == [0, 100, 300]
        sinks = [TestingSink() for _ in names]
        connector.get(names, sinks, WAIT_S)
        assert [sink.is_finished for sink in sinks] == [False, False, True]
        assert (sinks[1].header, sinks[1].size_bytes) == (b"x" * 100, 100)
        assert sinks[2].data == bytes_of_value(values[2])

    def test_a_value_that_is_too_large_is_not_read(
        self, connector: RemoteConnector, prefix: str
    ) -> None:
        """Its size is known, nothing of it is read, and what comes after it is right."""
        names = [f"{prefix}{number:064x}" for number in range(3)]
        large = random_value(MAX_VALUE_BYTES + 1)
        values = [random_value(300, 1), large, random_value(300, 2)]
        assert connector.put(names, values, WAIT_S) == [None] * 3
        sinks = [TestingSink() for _ in names]
        connector.get(names, sinks, WAIT_S)
        assert (sinks[1].header, sinks[1].size_bytes) == (b"", MAX_VALUE_BYTES + 1)
        assert [sink.data for sink in sinks] == [
            bytes_of_value(values[0]),
            None,
            bytes_of_value(values[2]),
        ]

    def test_a_refused_value_leaves_the_others_right(
        self, connector: RemoteConnector, prefix: str
    ) -> None:
        """Fault 41: what a sink did not want is skipped, not given to the next one."""
        names = [f"{prefix}{number:064x}" for number in range(4)]
        values = [random_value(3000 + number, number) for number in range(4)]
        connector.put(names, values, WAIT_S)
        sinks = [TestingSink(refuse=number in (0, 2)) for number in range(4)]
        connector.get(names, sinks, WAIT_S)
        data = [bytes_of_value(value) for value in values]
        assert [sink.data for sink in sinks] == [None, data[1], None, data[3]]
        assert read(connector, names) == data

    def test_a_sink_that_raises_does_no_harm_to_later_calls(
        self, connector: RemoteConnector, prefix: str
    ) -> None:
        """Fault 41: after an exception in the middle of a value the next answer is its own."""
        names = [f"{prefix}{number:064x}" for number in range(3)]
        values = [random_value(100_000 + number, number) for number in range(3)]
        connector.put(names, values, WAIT_S)

        class Broken(TestingSink):
            def begin(self, header: Buffer, size_bytes: int) -> memoryview | None:
                raise ZeroDivisionError("in the middle of a value")

        with pytest.raises((ZeroDivisionError, BackendError)):
            connector.get(names, [TestingSink(), Broken(), TestingSink()], WAIT_S)
        assert read(connector, names) == [bytes_of_value(value) for value in values]

    def test_names(self, connector: RemoteConnector, prefix: str) -> None:
        """All that start with a prefix, and no others."""
        names = [f"{prefix}{number:064x}" for number in range(30)]
        other = f"kvkeep-v1/{uuid.uuid4().hex}/{0:064x}"
        connector.put([*names, other], [random_value(300)] * 31, WAIT_S)
        assert sorted(set(connector.names(prefix, WAIT_S))) == names
        connector.remove([other], WAIT_S)

    def test_threads(self, connector: RemoteConnector, prefix: str) -> None:
        """Four threads put, read and remove the same names; no byte is ever another name's."""
        names = [f"{prefix}{number:064x}" for number in range(8)]
        values = [random_value(2000 + 10 * number, number) for number in range(8)]
        data = [bytes_of_value(value) for value in values]

        def work(seed: int) -> int:
            chance, rounds = random.Random(seed), 0
            while rounds < 40:
                some = chance.sample(range(8), 3)
                action = chance.randrange(3)
                if action == 0:
                    connector.put([names[i] for i in some], [values[i] for i in some], WAIT_S)
                elif action == 1:
                    found = read(connector, [names[i] for i in some])
                    for index, one in zip(some, found, strict=True):
                        assert one is None or one == data[index]
                else:
                    connector.remove([names[some[0]]], WAIT_S)
                rounds += 1
            return rounds

        with ThreadPoolExecutor(4) as threads:
            tasks = [threads.submit(work, seed) for seed in range(4)]
            assert [task.result(120) for task in tasks] == [40] * 4

    def test_a_deadline_that_has_passed(self, connector: RemoteConnector, prefix: str) -> None:
        """A call without time ends at once, as failed or done; the next one works."""
        name, value = prefix + "e" * 64, random_value(MAX_VALUE_BYTES)
        connector.put([name], [value], WAIT_S)
        for _ in range(3):
            sink = TestingSink()
            try:
                connector.get([name], [sink], 1e-6)
            except BackendError:
                assert not sink.is_finished
        assert read(connector, [name]) == [bytes_of_value(value)]
