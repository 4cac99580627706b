"""LeaseTable: the leases of answered lookups, by lookup id, until somebody claims them.

Callable from any thread. There is no timer: expired leases are taken back when the table is used
and when an allocation finds no room, so a lease never ends under a reader (a claimed lease has left
the table and is its claimant's to release).

EventManager: what is under way for which request, and how it will end (spec 10.1).

An event is a future with a name. It is entered when something starts for a request, and it is gone
when the request has used it, given it up, or ended: no event outlives its request. Whoever changes
an event names the future that he means, so a late end of one that was given up never touches its
successor. Callable from any thread, also within the garbage collector: a lease that ends there
takes its event with it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvkeep.backends.base import Lease


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


class EventType(StrEnum):
    """What is under way."""

    LOADING = "loading"
    """Chunks travel from slow tiers into memory; the future says how many there are then."""


class EventStatus(StrEnum):
    """How far it is."""

    ONGOING = "ongoing"
    """It has not ended."""
    DONE = "done"
    """It has ended, and what it brought is held for the request."""
    NOT_FOUND = "not_found"
    """There is no such event: it was never entered, or it is over."""


@dataclass(slots=True)
class _Event:
    future: Future[Any]
    status: EventStatus


class EventManager:
    """Events by type and id."""

    def __init__(self) -> None:
        """No events."""
        self._lock = threading.RLock()  # a lease may end while this thread holds it
        self._events: dict[tuple[EventType, str], _Event] = {}  # guarded by _lock

    def add_event(
        self, event_type: EventType, event_id: str, future: Future[Any]
    ) -> Future[Any] | None:
        """Enter an event, ONGOING.

        Returns:
            The future of the event that this one replaces, which is given up by that; or None.
        """
        with self._lock:
            previous = self._events.get((event_type, event_id))
            self._events[event_type, event_id] = _Event(future, EventStatus.ONGOING)
        return previous.future if previous is not None else None

    def update_event_status(
        self, event_type: EventType, event_id: str, status: EventStatus, *, future: Future[Any]
    ) -> bool:
        """Set the status of the event with this future; False if it was given up meanwhile."""
        with self._lock:
            event = self._events.get((event_type, event_id))
            if event is None or event.future is not future:
                return False
            event.status = status
            return True

    def get_event_status(self, event_type: EventType, event_id: str) -> EventStatus:
        """How far an event is."""
        with self._lock:
            event = self._events.get((event_type, event_id))
            return event.status if event is not None else EventStatus.NOT_FOUND

    def get_event(self, event_type: EventType, event_id: str) -> Future[Any] | None:
        """The future of an event that stays where it is; None if there is none."""
        with self._lock:
            event = self._events.get((event_type, event_id))
            return event.future if event is not None else None

    def pop_event(
        self, event_type: EventType, event_id: str, *, future: Future[Any] | None = None
    ) -> Future[Any] | None:
        """Take an event out; with ``future`` only if it is that one. None if there is none."""
        with self._lock:
            event = self._events.get((event_type, event_id))
            if event is None or (future is not None and event.future is not future):
                return None
            del self._events[event_type, event_id]
            return event.future

    def ids(self, event_type: EventType) -> list[str]:
        """The ids of all events of a type."""
        with self._lock:
            return [event_id for kind, event_id in self._events if kind is event_type]

    def __len__(self) -> int:
        """Events that are not over."""
        with self._lock:
            return len(self._events)
