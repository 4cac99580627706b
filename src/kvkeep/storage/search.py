"""PrefixSearch: which tier holds which chunk of a prefix. Callable from any thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvkeep.backends.base import StorageBackendInterface
from kvkeep.backends.lease import Lease
from kvkeep.keys import ChunkKey
from kvkeep.prefix import LocatedRun, locate_prefix
from kvkeep.storage.cost import CostRule
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.tiers import Tiers


class PrefixSearch:
    """Asks the readable tiers, in order, for runs of chunks."""

    def __init__(self, tiers: Tiers, guard: BackendGuard, cost: CostRule) -> None:
        """Search ``tiers``; a tier that fails has nothing, and ``cost`` says which are worth it."""
        self._tiers = tiers
        self._guard = guard
        self._cost = cost

    def locate(
        self,
        keys: Sequence[ChunkKey],
        search_range: Collection[str] | None,
        pin: Lease | None,
        *,
        to_load: bool,
    ) -> list[LocatedRun]:
        """Runs without gaps; see :meth:`kvkeep.storage.manager.StorageManager.get_block_mapping`.

        Args:
            keys: the chunks.
            search_range: names of the tiers to ask; all if None.
            pin: the owner of pins.
            to_load: ask a tier below the first one only where loading from it pays.

        Raises:
            ValueError: a tier in ``search_range`` does not exist.
        """
        tiers = self._tiers.readable(search_range)
        askers = [
            (
                backend.name,
                self._weighed(backend, keys, pin)
                if to_load and backend is not self._tiers.first
                else self._asker(backend, keys, pin),
            )
            for backend in tiers
        ]
        return locate_prefix(len(keys), askers)

    def locate_known(self, keys: Sequence[ChunkKey]) -> list[LocatedRun]:
        """Runs as :meth:`locate` has them, of what the tiers know without asking a slow medium.

        What only a tier has that lookups leave out does not count: it has to come into memory.
        """

        def asker(backend: StorageBackendInterface) -> Callable[[int], int]:
            return lambda start: self._guard.count(
                backend, len(keys) - start, partial(backend.known_run, keys[start:])
            )

        tiers = [
            backend
            for backend in self._tiers.readable()
            if backend is self._tiers.first or not self._cost.is_slow(backend.name, len(keys))
        ]
        return locate_prefix(len(keys), [(backend.name, asker(backend)) for backend in tiers])

    def _asker(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey], pin: Lease | None
    ) -> Callable[[int], int]:
        def ask(start: int) -> int:
            rest = keys[start:] if start else keys
            since = self._tiers.num_clears
            found = self._guard.count(
                backend, len(rest), partial(backend.batched_contains, rest, pin=pin)
            )
            if pin is not None and self._tiers.num_clears != since:
                self._forget(backend, rest[:found])
            return found

        return ask

    def _forget(self, backend: StorageBackendInterface, keys: Sequence[ChunkKey]) -> None:
        """Tiers were cleared while a lower one pinned these: what it brought in must not stay.

        The lookup began before that, and its lease holds what it found.
        """
        first = self._tiers.first
        if backend is not first:
            self._guard.call(first, "remove", partial(first.batched_remove, keys), 0)

    def _weighed(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey], pin: Lease | None
    ) -> Callable[[int], int]:
        """The same where a load follows, or is part of the answer as it is with ``pin``."""
        plain = self._asker(backend, keys, pin)

        def ask(start: int) -> int:
            if not self._cost.admits(backend.name, len(keys) - start, prompt=keys[-1]):
                return 0
            started = time.perf_counter()
            found = plain(start)
            if pin is not None or not found:
                self._cost.note_load(backend.name, found, time.perf_counter() - started)
            return found

        return ask
