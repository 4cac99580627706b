"""PrefixSearch: which tier holds which chunk of a prefix. Callable from any thread."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvkeep.backends.base import StorageBackendInterface
from kvkeep.backends.lease import Lease
from kvkeep.keys import ChunkKey
from kvkeep.prefix import LocatedRun, locate_prefix
from kvkeep.storage.guard import BackendGuard
from kvkeep.storage.tiers import Tiers


class PrefixSearch:
    """Asks the readable tiers, in order, for runs of chunks."""

    def __init__(self, tiers: Tiers, guard: BackendGuard) -> None:
        """Search ``tiers``; a tier that fails has nothing."""
        self._tiers = tiers
        self._guard = guard

    def locate(
        self,
        keys: Sequence[ChunkKey],
        search_range: Collection[str] | None,
        pin: Lease | None,
    ) -> list[LocatedRun]:
        """Runs without gaps; see :meth:`kvkeep.storage.manager.StorageManager.get_block_mapping`.

        Raises:
            ValueError: a tier in ``search_range`` does not exist.
        """
        tiers = self._tiers.readable(search_range)
        askers = [(backend.name, self._asker(backend, keys, pin)) for backend in tiers]
        return locate_prefix(len(keys), askers)

    def _asker(
        self, backend: StorageBackendInterface, keys: Sequence[ChunkKey], pin: Lease | None
    ) -> Callable[[int], int]:
        def ask(start: int) -> int:
            rest = keys[start:] if start else keys
            return self._guard.count(
                backend, len(rest), partial(backend.batched_contains, rest, pin=pin)
            )

        return ask
