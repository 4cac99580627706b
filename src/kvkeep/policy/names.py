"""The policies by the name that stands in the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.errors import ConfigError
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.classic import FIFOPolicy, LFUPolicy, LRUPolicy, MRUPolicy
from kvkeep.policy.reuse import ReusePolicy

if TYPE_CHECKING:  # it brings torch, which commands that only replay or name policies do without
    from kvkeep.memory.base import MemoryObj

_ALL: tuple[type[CachePolicy[MemoryObj]], ...] = (
    FIFOPolicy,
    LFUPolicy,
    LRUPolicy,
    MRUPolicy,
    ReusePolicy,
)
#: Every policy by its name in lower case.
POLICIES = {policy.name: policy for policy in _ALL}


def create_policy(name: str) -> CachePolicy[MemoryObj]:
    """A new policy for a backend that keeps memory objects.

    Args:
        name: its name, in upper or lower case.

    Raises:
        ConfigError: there is no such policy; the message lists those there are.
    """
    policy = POLICIES.get(name.strip().lower())
    if policy is None:
        raise ConfigError(f"unknown cache policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return policy()
