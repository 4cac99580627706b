"""Settings of how chunks come from slow tiers into memory, and from there into the engine."""

from __future__ import annotations

from pydantic import Field

from kvkeep.config.base import Frozen
from kvkeep.config.units import DurationSeconds, SizeBytes


class PrefetchSettings(Frozen):
    """Lookups that are answered when the chunks are in memory, see docs/vllm.md."""

    enabled: bool | None = Field(
        None,
        description="A vLLM request whose prefix is in a slow tier waits in the queue until its "
        "chunks are in memory, and no step waits for them. Unset: where there is a tier below the "
        "memory.",
    )
    timeout: DurationSeconds = Field(
        10.0,
        description="How long a request waits for its chunks. After that it goes on with those "
        "that have arrived.",
    )
    memory: SizeBytes | None = Field(
        None,
        description="Most memory of the pool that waiting requests may hold, in whole chunks. "
        "Unset: half of it.",
    )

    def check(self, *, has_slow_tier: bool, lease_s: float) -> None:
        """Check against the other settings.

        Args:
            has_slow_tier: there is a tier below the memory.
            lease_s: how long a lookup protects what it found.

        Raises:
            ValueError: a setting has no effect, or contradicts another one.
        """
        given = sorted(self.model_fields_set)
        if given and not has_slow_tier:
            raise ValueError(f"prefetch.{given[0]} has no effect without a tier below the memory")
        others = [name for name in given if name != "enabled"]
        if others and self.enabled is False:
            raise ValueError(f"prefetch.{others[0]} has no effect with prefetch.enabled = false")
        if has_slow_tier and self.enabled is not False and lease_s <= self.timeout:
            raise ValueError(
                f"lookup.lease ({lease_s:g} s) must be longer than prefetch.timeout "
                f"({self.timeout:g} s), or chunks are given up before they are all there"
            )


class LoadSettings(Frozen):
    """How chunks in memory are copied into the engine's pages."""

    asynchronous: bool = Field(
        False,
        description="Copy between vLLM's steps instead of before one: running requests never wait "
        "for another one's copy, and the request itself starts a step later.",
    )
