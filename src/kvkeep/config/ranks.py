"""Settings of an engine that has several ranks."""

from __future__ import annotations

from pydantic import Field

from kvkeep.config.base import Frozen
from kvkeep.config.units import DurationSeconds


class RanksSettings(Frozen):
    """How the ranks (workers) of one engine load together, see docs/vllm.md."""

    save_only_first_rank: bool | None = Field(
        None,
        description="Rank 0 alone stores and loads, and the other ranks copy what it loaded. "
        "Unset: where the KV is the same on every rank (latent attention) and all ranks are on "
        "one machine. On where that is not so is an error.",
    )
    timeout: DurationSeconds = Field(
        5.0,
        description="How long a load waits for another rank. After that it is a miss on every "
        "rank.",
    )
