"""What the verbs of CacheEngine answer: immutable values, for any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvkeep.backends.base import BackendHealth
from kvkeep.storage.manager import StorageManager


class FoundTokens(int):
    """Number of tokens that a lookup found.

    Attributes:
        tiers: (tier, tokens) of the runs in which they are, from the first token on.
    """

    tiers: tuple[tuple[str, int], ...]

    def __new__(cls, tiers: Sequence[tuple[str, int]] = ()) -> FoundTokens:
        """The sum over the runs."""
        found = super().__new__(cls, sum(num_tokens for _, num_tokens in tiers))
        found.tiers = tuple(tiers)
        return found

    def sums(self) -> dict[str, int]:
        """Tokens by tier."""
        sums: dict[str, int] = {}
        for tier, num_tokens in self.tiers:
            sums[tier] = sums.get(tier, 0) + num_tokens
        return sums

    def first(self, num_tokens: int) -> FoundTokens:
        """The first ``num_tokens`` of them, where another worker has found no more."""
        left, runs = num_tokens, []
        for tier, count in self.tiers:
            if left > 0:
                runs.append((tier, min(count, left)))
                left -= count
        return FoundTokens(runs)


class StoreStop(StrEnum):
    """Why a store did not keep all tokens of the prompt."""

    EMPTY = "empty"
    """There are no tokens."""
    TAIL = "tail"
    """Only the tail that fills no chunk is not stored."""
    NO_ROOM = "no_room"
    """The pool has no room and nothing may be evicted for it."""
    DROPPED = "dropped"
    """Every tier shed the chunk, or none keeps chunks."""
    FAILED = "failed"
    """The copy out of the engine failed, or every tier failed to take the chunk."""
    PASSIVE = "passive"
    """Rank 0 stores, whose KV is the same."""
    FROZEN = "frozen"
    """The engine is frozen: nothing is stored any more."""
    UNHEALTHY = "unhealthy"
    """The engine is unhealthy or closed."""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What a store achieved.

    Attributes:
        num_tokens: the prompt's tokens [0, num_tokens) are stored, as far as the masked ones are,
            which are not asked for.
        num_copied_tokens: tokens that this call copied out of the engine and stored; the others
            were stored already.
        stopped_by: why it ends there; None if the whole prompt is stored.
    """

    num_tokens: int
    num_copied_tokens: int
    stopped_by: StoreStop | None


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """How an engine and its tiers are.

    Attributes:
        healthy: the engine serves; it does as long as the tier whose memory it uses does.
        frozen: nothing is stored, and only the CPU tier is read.
        backends: every tier's own opinion, by name.
    """

    healthy: bool
    frozen: bool
    backends: Mapping[str, BackendHealth]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What an engine holds now, after its pool was proved sound.

    Attributes:
        open_leases: leases of lookups that wait for their load.
        used_bytes: bytes of the pool handed out.
        free_bytes: bytes that can be handed out; used + free = capacity.
        capacity_bytes: size of the pool.
        num_objects: memory objects alive; that of every chunk in the CPU tier, and those that
            somebody is filling or reading.
        num_chunks: chunks in the tier whose memory the engine uses.
        metrics: every counter and gauge.
    """

    open_leases: int
    used_bytes: int
    free_bytes: int
    capacity_bytes: int
    num_objects: int
    num_chunks: int
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, storage: StorageManager) -> CheckReport:
        """What these tiers hold.

        Raises:
            OwnershipError: used and free memory are not the whole pool, or objects overlap.
        """
        memory = storage.memcheck()
        return cls(
            open_leases=len(storage.leases),
            used_bytes=memory.used_bytes,
            free_bytes=memory.free_bytes,
            capacity_bytes=memory.capacity_bytes,
            num_objects=memory.num_objects,
            num_chunks=len(storage.allocator_backend.keys()),
            metrics=storage.metrics.snapshot(),
        )
