"""SlowBackend: a tier whose reads take their time, or wait until they are let through.

For tests and measurements of whatever must not wait for a slow tier. It keeps chunks as DictBackend
does, and can be named as a plugin: ``{name: slow, module: "kvkeep.testing.slow:SlowBackend",
settings: {seconds_per_chunk: 0.2}}``. Callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from kvkeep.backends.base import AllocatorBackendInterface, StoragePluginInterface
from kvkeep.backends.reference import DictBackend
from kvkeep.errors import ConfigError
from kvkeep.keys import ChunkKey
from kvkeep.memory.base import MemoryObj

#: How long a read waits for the gate at most.
_GATE_TIMEOUT_S = 60.0


class SlowBackend(DictBackend, StoragePluginInterface):
    """Chunks in a dict behind a gate.

    Attributes:
        seconds_per_chunk: how long each chunk of a read takes.
        gate: reads wait for it to be set; it is, at first.
        reads: the chunks of every read that has begun, in order.
    """

    def __init__(
        self,
        allocator_backend: AllocatorBackendInterface,
        *,
        name: str = "SlowBackend",
        seconds_per_chunk: float = 0.0,
    ) -> None:
        """Start empty, with an open gate."""
        super().__init__(allocator_backend, name=name)
        self.seconds_per_chunk = seconds_per_chunk
        self.gate = threading.Event()
        self.gate.set()
        self.reads: list[list[ChunkKey]] = []  # appended to, never changed
        self._closing = threading.Event()

    @classmethod
    def from_settings(
        cls, settings: Mapping[str, object], allocator_backend: AllocatorBackendInterface
    ) -> SlowBackend:
        """A slow tier that takes ``seconds_per_chunk``.

        Raises:
            ConfigError: that is no number, or there is something else in the settings.
        """
        seconds = settings.get("seconds_per_chunk", 0.0)
        if set(settings) - {"seconds_per_chunk"} or not isinstance(seconds, int | float):
            raise ConfigError(f"seconds_per_chunk must be a number, got {dict(settings)}")
        return cls(allocator_backend, seconds_per_chunk=float(seconds))

    def _load(self, keys: Sequence[ChunkKey], *, busy_loop: bool) -> list[MemoryObj | None]:
        """Wait, then read; for gets, and for lookups that pin what they find."""
        self.reads.append(list(keys))
        deadline = time.monotonic() + _GATE_TIMEOUT_S
        while not self.gate.wait(0.05) and not self._closing.is_set():
            if time.monotonic() > deadline:
                return [None] * len(keys)
        self._closing.wait(self.seconds_per_chunk * len(keys))
        return super()._load(keys, busy_loop=busy_loop)

    def close(self) -> None:
        """End all waits and let the chunks go."""
        self._closing.set()
        super().close()
