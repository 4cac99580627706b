"""LeaseTable: the leases of answered lookups, by lookup id, until somebody claims them.

Callable from any thread. There is no timer: expired leases are taken back when the table is used
and when an allocation finds no room, so a lease never ends under a reader (a claimed lease has left
the table and is its claimant's to release).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kvkeep.backends.lease import Lease


class LeaseTable:
    """Leases that wait for their load. One per lookup id; the latest lookup wins."""

    def __init__(
        self,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        on_expired: Callable[[Lease], None] | None = None,
        is_bypassed: Callable[[str], bool] | None = None,
    ) -> None:
        """An empty table.

        Args:
            timeout_s: seconds from :meth:`open` to a lease's deadline.
            clock: seconds that only grow; deadlines are values of it.
            on_expired: called for each lease that was taken back after its deadline, without a
                lock held.
            is_bypassed: whether the backend of a name is left out now; see :class:`Lease`.
        """
        self._is_bypassed = is_bypassed
        self.timeout_s = timeout_s
        self._clock = clock
        self._on_expired = on_expired
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}  # guarded by _lock
        self._next_deadline = math.inf  # guarded by _lock; no lease in the table expires before

    def open(self, owner: str) -> Lease:
        """A new lease. It is not in the table yet: fill it, then :meth:`keep` or release it.

        Args:
            owner: the lookup id it is for.
        """
        self.reap()
        deadline = self._clock() + self.timeout_s
        return Lease(owner, deadline, is_bypassed=self._is_bypassed)

    def keep(self, lookup_id: str, lease: Lease) -> None:
        """Register ``lease``; one that the id had before is released once this one is in."""
        with self._lock:
            previous = self._leases.get(lookup_id)
            self._leases[lookup_id] = lease
            self._next_deadline = min(self._next_deadline, lease.deadline)
        if previous is not None and previous is not lease:
            previous.release()
        self.reap()

    def claim(self, lookup_id: str) -> Lease | None:
        """Take the lease out of the table; the caller must release it.

        Returns:
            None if there is none or its deadline has passed, in which case it is released here.
        """
        with self._lock:
            lease = self._leases.pop(lookup_id, None)
        if lease is not None and lease.expired(self._clock()):
            self._end(lease)
            lease = None
        self.reap()
        return lease

    def release(self, lookup_id: str) -> bool:
        """Give the lease of ``lookup_id`` back; False if there is none (any more)."""
        with self._lock:
            lease = self._leases.pop(lookup_id, None)
        if lease is None:
            return False
        lease.release()
        return True

    def drop(self, lookup_id: str, lease: Lease) -> None:
        """Give this lease back, and take it out of the table if it is there."""
        with self._lock:
            if self._leases.get(lookup_id) is lease:
                del self._leases[lookup_id]
        lease.release()

    def keep_first(self, lookup_id: str, num_chunks: int) -> None:
        """Shorten the lease of ``lookup_id``, if it has one, to its first chunks."""
        with self._lock:
            lease = self._leases.get(lookup_id)
        if lease is not None:
            lease.keep_first(num_chunks)

    def reap(self) -> int:
        """Release every lease in the table whose deadline has passed; returns how many."""
        now = self._clock()
        with self._lock:
            if now < self._next_deadline:
                return 0
            ended = {name: lease for name, lease in self._leases.items() if lease.expired(now)}
            for name in ended:
                del self._leases[name]
            self._next_deadline = min(
                (lease.deadline for lease in self._leases.values()), default=math.inf
            )
        for lease in ended.values():
            self._end(lease)
        return len(ended)

    def release_all(self) -> int:
        """Release every lease in the table; returns how many there were."""
        with self._lock:
            leases, self._leases = self._leases, {}
            self._next_deadline = math.inf
        for lease in leases.values():
            lease.release()
        return len(leases)

    def __len__(self) -> int:
        """Leases in the table."""
        with self._lock:
            return len(self._leases)

    def _end(self, lease: Lease) -> None:
        """Release an expired lease that has left the table."""
        lease.release()
        if self._on_expired is not None:
            self._on_expired(lease)
