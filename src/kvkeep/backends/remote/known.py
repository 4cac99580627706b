"""KnownChunks: what this process believes to be in the store, and what it is about to put there.

Only a hint: it saves storing the same chunk twice. The store is always asked before a chunk is
promised, and its answers correct the hint. A store may lose or drop chunks and is not asked while
everything is found in memory, so a hint ends by itself. Bounded; callable from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvkeep.keys import ChunkKey

#: Chunks that are remembered, about 10 MB of memory.
MAX_KNOWN = 1 << 16
#: Seconds for which a hint is believed.
BELIEVED_S = 600.0


class Claim:
    """The right to store one chunk; taken back when the chunk is removed meanwhile."""


class KnownChunks:
    """Hints and claims."""

    def __init__(
        self,
        max_known: int = MAX_KNOWN,
        *,
        believed_s: float = BELIEVED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known.

        Args:
            max_known: hints that are kept.
            believed_s: seconds for which each is believed.
            clock: seconds that only grow.
        """
        self._max_known = max_known
        self._believed_s = believed_s
        self._clock = clock
        self._lock = threading.Lock()
        # each with the end of its time; guarded by _lock
        self._known: OrderedDict[ChunkKey, float] = OrderedDict()
        self._claims: dict[ChunkKey, Claim] = {}  # guarded by _lock

    def claim(self, keys: Sequence[ChunkKey]) -> list[Claim | None]:
        """A claim for each chunk that is neither known nor claimed; a key twice gets one claim."""
        with self._lock:
            now = self._clock()
            return [self._claim_locked(key, now) for key in keys]

    def _claim_locked(self, key: ChunkKey, now: float) -> Claim | None:
        if self._known.get(key, now) > now or key in self._claims:
            return None
        self._claims[key] = claim = Claim()
        return claim

    def run_length(self, keys: Sequence[ChunkKey]) -> int:
        """Length of the run of chunks that are known or claimed."""
        with self._lock:
            now = self._clock()
            for number, key in enumerate(keys):
                if self._known.get(key, now) <= now and key not in self._claims:
                    return number
        return len(keys)

    def has_seen(self, keys: Sequence[ChunkKey]) -> bool:
        """All of them were in the store, as far as this process knows; a claim is not enough."""
        with self._lock:
            now = self._clock()
            return all(self._known.get(key, now) > now for key in keys)

    def is_current(self, key: ChunkKey, claim: Claim) -> bool:
        """The claim was not taken back."""
        with self._lock:
            return self._claims.get(key) is claim

    def fulfil(self, key: ChunkKey, claim: Claim) -> bool:
        """The chunk is in the store; False if the claim was taken back before."""
        with self._lock:
            if self._claims.get(key) is not claim:
                return False
            del self._claims[key]
            self._note_locked(key)
            return True

    def give_up(self, key: ChunkKey, claim: Claim) -> None:
        """The chunk is not stored after all."""
        with self._lock:
            if self._claims.get(key) is claim:
                del self._claims[key]

    def saw(self, keys: Iterable[ChunkKey]) -> None:
        """The store said that it has these."""
        with self._lock:
            for key in keys:
                self._note_locked(key)

    def missed(self, keys: Iterable[ChunkKey]) -> None:
        """The store said that it does not have these. Claims stay."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def forget(self, keys: Iterable[ChunkKey]) -> None:
        """These are removed: hints go, claims are taken back."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
                self._claims.pop(key, None)

    def forget_all(self) -> None:
        """Everything is removed."""
        with self._lock:
            self._known.clear()
            self._claims.clear()

    def __len__(self) -> int:
        """Number of hints."""
        return len(self._known)

    def _note_locked(self, key: ChunkKey) -> None:
        self._known[key] = self._clock() + self._believed_s
        self._known.move_to_end(key)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
