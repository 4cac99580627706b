"""Tiers: which backends there are, in which order, and which of them take part now.

Callable from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvkeep.backends.base import AllocatorBackendInterface, StorageBackendInterface


class Tiers:
    """Backends in order of priority."""

    def __init__(
        self,
        backends: Sequence[StorageBackendInterface],
        allocator_backend: AllocatorBackendInterface,
    ) -> None:
        """All take part at first. ``first`` is the tier in whose memory chunks are loaded.

        Args:
            backends: in order of priority.
            allocator_backend: the one that is still read when the tiers are frozen.

        Raises:
            ValueError: two backends have one name.
        """
        self.backends: OrderedDict[str, StorageBackendInterface] = OrderedDict(
            (backend.name, backend) for backend in backends
        )
        if len(self.backends) != len(backends):
            raise ValueError(f"names of tiers repeat: {[backend.name for backend in backends]}")
        self.frozen = False
        self._unhealthy: frozenset[str] = frozenset()  # written with _lock
        self._owing: frozenset[str] = frozenset()  # written with _lock
        self._in_clear: frozenset[str] = frozenset()  # written with _lock
        self.first = allocator_backend
        self._lock = threading.Lock()
        self.clear_lock = threading.Lock()
        """Held from looking at ``num_clears`` to having put chunks into the first tier."""
        self.num_clears = 0
        """How often everything was removed; written with ``clear_lock``."""

    def set_bypassed(self, name: str, bypassed: bool) -> None:
        """Leave a tier out, or take it back in.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._unhealthy = self._unhealthy | {name} if bypassed else self._unhealthy - {name}

    def set_owing(self, name: str, owing: bool) -> None:
        """Note that a tier has to be cleared before it takes part again, or has been.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._owing = self._owing | {name} if owing else self._owing - {name}

    def set_in_clear(self, name: str, in_clear: bool) -> None:
        """Note that a tier is being cleared: nothing is found in it or put into it meanwhile.

        Raises:
            ValueError: there is no tier of this name.
        """
        self.check_names([name])
        with self._lock:
            self._in_clear = self._in_clear | {name} if in_clear else self._in_clear - {name}

    def note_clear(self) -> None:
        """Everything is about to be removed: nothing asked for before may come into the first."""
        with self.clear_lock:
            self.num_clears += 1

    def is_owing(self, name: str) -> bool:
        """The tier has to be cleared before it takes part again."""
        return name in self._owing

    @property
    def bypassed(self) -> frozenset[str]:
        """Names of the tiers that are left out now."""
        return self._unhealthy | self._owing

    def is_bypassed(self, name: str) -> bool:
        """The tier is left out now."""
        return name in self.bypassed

    def check_names(self, names: Collection[str]) -> None:
        """Raise ValueError if one of these is no tier's name."""
        for name in names:
            if name not in self.backends:
                known = ", ".join(self.backends)
                raise ValueError(f"no tier is called {name!r}; there are: {known}")

    def active(self, names: Collection[str] | None = None) -> list[StorageBackendInterface]:
        """The tiers that are neither bypassed nor being cleared, in order.

        Args:
            names: only these; all if None.

        Raises:
            ValueError: one of ``names`` does not exist.
        """
        if names is not None:
            self.check_names(names)
        left_out = self.bypassed | self._in_clear
        return [
            backend
            for name, backend in self.backends.items()
            if name not in left_out and (names is None or name in names)
        ]

    def readable(self, names: Collection[str] | None = None) -> list[StorageBackendInterface]:
        """The active tiers that may be searched and read: when frozen, the allocator's own only."""
        tiers = self.active(names)
        if self.frozen:
            return [backend for backend in tiers if backend is self.first]
        return tiers
