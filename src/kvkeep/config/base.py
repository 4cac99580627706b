"""Frozen: what every group of settings is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable, exact about types, and closed: an unknown name is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)
