"""Catalogue: every metric of kvkeep, what it says, and when it moves. Values, and nothing else.

``docs/metrics.md`` shows this table. A metric that is not here cannot be counted. Labels have few
values, all of them from kvkeep's code and the names of tiers: never a request, a prompt, a path, an
address or a secret.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

#: Bounds of the histograms of seconds: from a copy of one chunk to a load that times out.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
#: Bounds of the histograms of bytes: from one small chunk to a long prompt.
BYTES = tuple(float(1 << exponent) for exponent in range(16, 34, 2))

#: Causes of ``kvkeep_failures_total`` that mean: these bytes are not those that were stored.
INTEGRITY_CAUSES = frozenset(
    {
        "not_a_file",
        "truncated",
        "length",
        "magic",
        "version",
        "header_checksum",
        "fields",
        "payload_checksum",
        "codec",
        "wrong_key",
        "wrong_identity",
        "wrong_layout",
        "wrong_size",
    }
)


class Kind(StrEnum):
    """The kinds of Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: without the ``_total`` of counters.
        kind: of Prometheus.
        unit: of its value.
        text: what it says.
        moves: when it moves.
        labels: names of its labels.
        bounds: upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    moves: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """As Prometheus sees it; a histogram has three series below this name."""
        return self.name + "_total" if self.kind is Kind.COUNTER else self.name


def _counter(name: str, unit: str, text: str, moves: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, Kind.COUNTER, unit, text, moves, labels)


def _gauge(name: str, unit: str, text: str, moves: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, Kind.GAUGE, unit, text, moves, labels)


_SPECS = (
    _counter(
        "kvkeep_lookup_tokens",
        "tokens",
        "Tokens that lookups asked for.",
        "Once per prompt, when its lookup is answered or given up.",
    ),
    _counter(
        "kvkeep_lookup_hit_tokens",
        "tokens",
        "Tokens that lookups found.",
        "With `kvkeep_lookup_tokens_total`, by what was found in the tier.",
        "tier",
    ),
    _counter(
        "kvkeep_lookup_failed_tokens",
        "tokens",
        "Tokens of lookups that the scheduler gave up; they are asked for and not found.",
        "A lookup was not answered by its deadline, or could not be asked or answered.",
        "cause",
    ),
    MetricSpec(
        "kvkeep_lookup_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "Time that one lookup took in this worker.",
        "Each lookup, also one that asks again for a prompt that waits.",
        bounds=SECONDS,
    ),
    _counter(
        "kvkeep_loaded_tokens",
        "tokens",
        "Tokens whose KV was written into engine memory, by the tier that they were found in.",
        "A load was copied into the engine.",
        "tier",
    ),
    _counter(
        "kvkeep_load_failed_tokens",
        "tokens",
        "Tokens found and then not loaded.",
        "A load fell short of its lookup.",
        "cause",
    ),
    _counter(
        "kvkeep_stored_tokens",
        "tokens",
        "Tokens whose KV was copied out of engine memory.",
        "A store was copied and at least one tier took it.",
    ),
    _counter(
        "kvkeep_store_skipped_tokens",
        "tokens",
        "Tokens that a store left out.",
        "A store kept less than it was given. Chunks that are stored already do not count.",
        "cause",
    ),
    _counter(
        "kvkeep_dropped_chunks",
        "chunks",
        "Chunks shed by a tier on their way in.",
        "A tier had no room, a full queue, or could not write what it had taken.",
        "tier",
        "cause",
    ),
    _counter(
        "kvkeep_tier_skipped_tokens",
        "tokens",
        "Tokens for which a tier was not asked, although it may have them.",
        "A lookup left a tier out because loading is expected to take longer than computing. A "
        "prompt that waits and is asked for again counts once.",
        "tier",
        "cause",
    ),
    _gauge(
        "kvkeep_expected_load_bytes_per_second",
        "bytes per second",
        "How fast a tier is expected to load, once it has begun, or as a mean of all its time "
        "where that cannot be told apart; 0 if unknown.",
        "Chunks were loaded from the tier.",
        "tier",
    ),
    _gauge(
        "kvkeep_expected_load_start_seconds",
        "seconds",
        "How long a tier is expected to take before its first chunk; 0 if unknown.",
        "Chunks were loaded from the tier.",
        "tier",
    ),
    _gauge(
        "kvkeep_prefill_tokens_per_second",
        "tokens per second",
        "How fast the engine computes prompts; 0 if unknown.",
        "The engine has computed tokens of a prompt.",
    ),
    _counter(
        "kvkeep_evictions",
        "chunks",
        "Chunks evicted by policy.",
        "A tier made room.",
        "tier",
    ),
    MetricSpec(
        "kvkeep_transfer_bytes",
        Kind.HISTOGRAM,
        "bytes",
        "Bytes of KV that one operation moved into (`store`) or out of (`load`) a tier.",
        "The pool: one store or load of a request. Other tiers: one chunk.",
        ("tier", "direction"),
        BYTES,
    ),
    MetricSpec(
        "kvkeep_transfer_seconds",
        Kind.HISTOGRAM,
        "seconds",
        "Time that the same operation took; with several threads their times add up.",
        "With `kvkeep_transfer_bytes`.",
        ("tier", "direction"),
        SECONDS,
    ),
    _counter(
        "kvkeep_failures",
        "failures",
        "Calls that failed. Each was a miss or a drop for the engine.",
        "A tier, the lookup service or a copy failed. A miss by itself is none.",
        "tier",
        "operation",
        "cause",
    ),
    _counter(
        "kvkeep_integrity_failures",
        "failures",
        "Chunks that did not verify. None was served.",
        "With `kvkeep_failures_total`, where the cause is that bytes are not those stored.",
        "tier",
        "cause",
    ),
    _counter(
        "kvkeep_prefetches",
        "lookups",
        "Lookups that waited for a slow tier while their request was queued, by their end.",
        "An asynchronous lookup was answered, given up or refused.",
        "outcome",
    ),
    _gauge(
        "kvkeep_prefetches_running",
        "lookups",
        "Such lookups whose chunks are on their way into memory.",
        "A prefetch begins and ends.",
    ),
    _counter(
        "kvkeep_leases_expired",
        "leases",
        "Leases taken back after their deadline.",
        "Nobody loaded what a lookup had pinned, nor gave it back, for `lookup.lease`.",
    ),
    _gauge(
        "kvkeep_leases_open",
        "leases",
        "Leases that wait for their load.",
        "A lookup pinned something; a load, an unpin or the deadline ended it.",
    ),
    _gauge(
        "kvkeep_pool_bytes",
        "bytes",
        "Bytes of the memory pool, `used` or `free`.",
        "Memory of the pool is taken or given back.",
        "state",
    ),
    _gauge(
        "kvkeep_chunks",
        "chunks",
        "Chunks that can be read.",
        "A tier stores, evicts, removes or clears.",
        "tier",
    ),
    _gauge(
        "kvkeep_backend_bypassed",
        "0 or 1",
        "1 while a tier is left out because it is unhealthy.",
        "A health check changed its answer, or a tier owes a clear.",
        "tier",
    ),
    _gauge(
        "kvkeep_breaker_open",
        "0 or 1",
        "1 while a tier is left alone after failures in a row, until one attempt works.",
        "Calls of the tier fail, or work again.",
        "tier",
        "direction",
    ),
    _gauge(
        "kvkeep_queued_operations",
        "operations",
        "Operations that wait for an I/O thread of a tier.",
        "Operations are queued and begun.",
        "tier",
        "direction",
    ),
    _gauge(
        "kvkeep_queued_bytes",
        "bytes",
        "Memory of the pool that stores hold which wait for a tier.",
        "Stores are queued and begun.",
        "tier",
    ),
)

#: Every metric by its name without ``_total``.
CATALOGUE: dict[str, MetricSpec] = {spec.name: spec for spec in _SPECS}
