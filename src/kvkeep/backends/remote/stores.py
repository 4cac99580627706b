"""RemoteStores: the queue of chunks to put into the store.

A queued chunk has a claim and holds a reference to its memory; both end with the store, whatever
becomes of it (fault 23). ``submit`` is callable from any thread and waits for nothing; the rest
runs in I/O threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.io_pool import IOPool, StoreJob
from kvkeep.backends.remote.base import (
    HEADER_BYTES,
    Refusal,
    RemoteReports,
    Value,
    cause_of,
    name_prefix,
    value_name,
)
from kvkeep.backends.remote.calls import StoreCalls
from kvkeep.backends.remote.loads import Claim, PresenceCache
from kvkeep.backends.remote.values import ChunkValue, fits
from kvkeep.backends.slow_tier import CircuitBreaker
from kvkeep.codec.base import Codec
from kvkeep.codec.frame import CHECKSUM_BYTES, ChunkMeta, FrameHeader
from kvkeep.codec.names import encode_chunk
from kvkeep.errors import BackendError, CodecError
from kvkeep.hashing import ChunkKey
from kvkeep.memory.base import MemoryObj, References, dtype_name

#: Most chunks of one request to the store, and most bytes of memory of those.
MAX_GROUP, MAX_GROUP_BYTES = 4, 64 << 20

OnComplete = Callable[[ChunkKey], None]


@dataclass(frozen=True, slots=True)
class StoreRules:
    """How chunks are stored.

    Attributes:
        identity: digest for the headers.
        full: a full chunk; no other than its like are taken.
        codec: how payloads are encoded.
        timeout_s: what one request may take.
    """

    identity: bytes
    full: ChunkMeta
    codec: Codec
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """A chunk to store.

    Attributes:
        key: the chunk.
        claim: given up if it is removed meanwhile.
        obj: its bytes, with a reference of its own.
        meta: what they are.
    """

    key: ChunkKey
    claim: Claim
    obj: MemoryObj
    meta: ChunkMeta


class RemoteStores:
    """Queues chunks, or says why not; then stores them in small groups."""

    def __init__(
        self,
        calls: StoreCalls,
        known: PresenceCache,
        rules: StoreRules,
        *,
        pool: IOPool,
        breakers: tuple[CircuitBreaker, CircuitBreaker, CircuitBreaker],
        reports: RemoteReports,
    ) -> None:
        """Nothing is queued yet.

        Args:
            calls: to the store.
            known: what need not be stored.
            rules: how to.
            pool: where it runs.
            breakers: of loads, which also questions are; of stores; and one that opens while the
                store refuses what it is given.
            reports: where drops are counted.
        """
        self._calls = calls
        self._known = known
        self._rules = rules
        self._pool = pool
        self._questions, self._breaker, self._refusals = breakers
        self._reports = reports
        self._prefix = name_prefix(rules.identity)

    def submit(
        self, keys: Sequence[ChunkKey], objs: Sequence[MemoryObj], on_complete: OnComplete | None
    ) -> list[PutOutcome]:
        """Queue a batch. Once the queue is full the rest of the batch is dropped, too.

        Args:
            keys: the chunks, a prefix before its suffix.
            objs: their bytes.
            on_complete: called by an I/O thread, without a lock, for each chunk that is in.
        """
        metas = [
            ChunkMeta(obj.metadata.fmt, dtype_name(obj.metadata.dtype), obj.metadata.shape)
            for obj in objs
        ]
        outcomes = [PutOutcome.PRESENT] * len(keys)
        fitting = [index for index, meta in enumerate(metas) if fits(meta, self._rules.full)]
        for index in sorted(set(range(len(keys))) - set(fitting)):
            outcomes[index] = PutOutcome.NO_ROOM
            self._reports.fault("put", "wrong_layout")
        claims = self._known.claim([keys[index] for index in fitting])
        wanted = [
            (index, Pending(keys[index], claim, objs[index], metas[index]))
            for index, claim in zip(fitting, claims, strict=True)
            if claim is not None
        ]
        is_full = False
        most = min(MAX_GROUP, self._calls.connector.max_values_per_call)
        for group in _groups(wanted, most):
            pending = [one for _, one in group]
            is_full = is_full or not self._queue(pending, on_complete)
            for index, one in group:
                outcomes[index] = PutOutcome.DROPPED if is_full else PutOutcome.STORED
                if is_full:
                    self._known.give_up(one.key, one.claim)
                    self._reports.fault("put", "queue_full")
        return outcomes

    def _queue(self, group: Sequence[Pending], on_complete: OnComplete | None) -> bool:
        """Queue one request, which holds references to its memory until it has ended."""
        held = References()
        for one in group:
            one.obj.ref_count_up()
            held.adopt([one.obj])
        is_trial = self._breaker.is_open or self._refusals.is_open

        def run() -> None:
            with held:
                stored = self._store(group, is_trial=is_trial)
            if on_complete is not None:
                for key in stored:
                    on_complete(key)

        def drop() -> None:
            self._lose(group, "closed")
            held.release()

        size_bytes = sum(one.obj.size_bytes for one in group)
        if self._pool.store(StoreJob(run, drop, size_bytes)):
            return True
        held.release()
        return False

    def _store(self, group: Sequence[Pending], *, is_trial: bool) -> list[ChunkKey]:
        """Store a group; returns the chunks that can be read now."""
        current = [one for one in group if self._known.is_current(one.key, one.claim)]
        self._lose([one for one in group if one not in current], "removed")
        if not is_trial and (self._breaker.is_open or self._refusals.is_open):
            self._lose(current, "failing")  # it failed since these were queued
            return []
        deadline = time.monotonic() + self._rules.timeout_s
        try:
            there = self._which_are_there(current, deadline)
            new = [one for one, is_there in zip(current, there, strict=True) if not is_there]
            refused = self._put(new, deadline) if new else []
        except (BackendError, CodecError) as error:
            self._lose(current, cause_of(error))
            return []
        losses = dict(zip([one.key for one in new], refused, strict=True))
        done = []
        for one in current:
            loss = losses.get(one.key)
            if loss is not None:
                self._lose([one], loss.value)
            elif self._known.fulfil(one.key, one.claim):
                done.append(one.key)
            else:
                self._lose([one], "removed")
                self._take_back(one)
        return done

    def _which_are_there(self, group: Sequence[Pending], deadline: float) -> list[bool]:
        """Which of these somebody else has stored: a small question that may save a large value.

        Where it is one question for each, only the first is asked for at first: whoever stored the
        prompt up to a later chunk has stored the first ones, too.
        """
        at_once = len(group) if self._calls.connector.sizes_at_once else 1
        found = self._ask(group[:at_once], deadline)
        if at_once < len(group):
            rest = group[at_once:]
            found += self._ask(rest, deadline) if found[0] else [False] * len(rest)
        return found

    def _ask(self, group: Sequence[Pending], deadline: float) -> list[bool]:
        """Which of these have a value of a possible size."""
        names = [self._name(one) for one in group]
        most = HEADER_BYTES + self._rules.full.size_bytes
        sizes = self._calls.sizes(names, deadline, self._questions) if names else []
        return [HEADER_BYTES < size <= most for size in sizes]

    def _put(self, group: Sequence[Pending], deadline: float) -> list[Refusal | None]:
        values = [self._value(one) for one in group]
        started = time.perf_counter()
        names = [self._name(one) for one in group]
        answers = self._calls.put(names, values, deadline, self._breaker)
        seconds = (time.perf_counter() - started) / len(group)
        for one, answer in zip(group, answers, strict=True):
            if answer is None:
                self._reports.stored(one.obj.size_bytes, seconds)
        if None in answers:
            self._refusals.succeeded()
        if set(answers) - {None, Refusal.TOO_LARGE}:
            self._refusals.failed()
        return answers

    def _value(self, one: Pending) -> Value:
        encoded = encode_chunk(self._rules.codec, one.obj.byte_array, one.meta)
        header = FrameHeader(
            key=one.key,
            identity=self._rules.identity,
            meta=one.meta,
            payload_bytes=memoryview(encoded.payload).nbytes,
            payload_checksum=bytes(CHECKSUM_BYTES),
            codec=encoded.code,
        )
        return ChunkValue(header, encoded.payload)

    def _take_back(self, one: Pending) -> None:
        """Remove a value whose chunk was removed while it was stored."""
        deadline = time.monotonic() + self._rules.timeout_s
        with contextlib.suppress(BackendError):  # it was counted
            self._calls.remove([self._name(one)], deadline)

    def _lose(self, group: Sequence[Pending], cause: str) -> None:
        """These are not stored."""
        for one in group:
            self._known.give_up(one.key, one.claim)
            self._reports.dropped(cause)

    def _name(self, one: Pending) -> str:
        return value_name(self._prefix, one.key)


def _groups(wanted: Sequence[tuple[int, Pending]], most: int) -> list[list[tuple[int, Pending]]]:
    """Cut a batch into requests, with one chunk at least in each and at most ``most``."""
    groups: list[list[tuple[int, Pending]]] = []
    size_bytes = 0
    for entry in wanted:
        size_bytes += entry[1].obj.size_bytes
        if not groups or len(groups[-1]) == most or size_bytes > MAX_GROUP_BYTES:
            groups.append([])
            size_bytes = entry[1].obj.size_bytes
        groups[-1].append(entry)
    return groups
