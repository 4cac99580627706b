"""Settings of the rule that says whether asking a slow tier pays."""

from __future__ import annotations

from pydantic import Field

from kvkeep.config.base import Frozen
from kvkeep.config.units import DurationSeconds


class CostSettings(Frozen):
    """Whether loading is weighed against computing again, see docs/architecture.md."""

    enabled: bool = Field(
        True,
        description="Ask a tier below the memory only where loading is expected to be quicker than "
        "computing again, as measured. Off: every tier is always asked.",
    )
    retry: DurationSeconds = Field(
        30.0,
        description="A tier that is too slow to pay is tried again after this time.",
    )
