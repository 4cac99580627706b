"""EventManager: what is under way for which request, and how it will end (spec 10.1).

An event is a future with a name. It is entered when something starts for a request, and it is gone
when the request has used it, given it up, or ended: no event outlives its request. Whoever changes
an event names the future that he means, so a late end of one that was given up never touches its
successor. Callable from any thread, also within the garbage collector: a lease that ends there
takes its event with it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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
