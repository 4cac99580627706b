"""What vLLM's own logs say about kvkeep: tokens moved and failures, per logging interval.

Plain counters; vLLM carries them from the worker to its logger. kvkeep's full metrics are in
:class:`kvkeep.metrics.Metrics`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass(slots=True)
class StepStats:
    """Counters of one worker since they were last taken.

    Attributes:
        loaded_tokens: tokens whose KV was written into the engine's blocks.
        stored_tokens: tokens whose KV was copied out of them.
        failed_tokens: tokens promised and not loaded.
        failures: exceptions caught.
    """

    loaded_tokens: int = 0
    stored_tokens: int = 0
    failed_tokens: int = 0
    failures: int = 0


class KVKeepStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """StepStats in vLLM's own form: ``data`` maps names to sums."""

    @classmethod
    def of(cls, stats: StepStats) -> KVKeepStats:
        """The same counters."""
        return cls(data=asdict(stats))

    def reset(self) -> None:
        """Set all counters to zero."""
        self.data = asdict(StepStats())

    def aggregate(self, other: KVConnectorStats) -> KVKeepStats:
        """Add another worker's or step's counters."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, for a line in the log."""
        totals: dict[str, Any] = self.data
        return dict(totals)

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.values())
