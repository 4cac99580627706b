"""HealthMonitor: bypasses tiers whose health check fails, until they recover.

Callable from any thread. It has no thread of its own: whoever asks after the engine's health, or a
timer of the engine's, calls it.
"""

from __future__ import annotations

import logging

from kvkeep.backends.base import BackendHealth
from kvkeep.storage.manager import StorageManager

_log = logging.getLogger(__name__)


class HealthMonitor:
    """Sets and clears the bypass of every tier by its health."""

    def __init__(self, manager: StorageManager) -> None:
        """Watch the tiers of ``manager``."""
        self._manager = manager

    def check_once(self) -> dict[str, BackendHealth]:
        """Ask every tier, bypass those that are unhealthy or raise, take the others back in.

        Returns:
            The answers by tier.
        """
        answers = self._manager.health()
        bypassed = self._manager.bypassed
        for name, health in answers.items():
            if health.healthy == (name not in bypassed):
                continue
            self._manager.set_bypassed(name, not health.healthy)
            if health.healthy:
                _log.info("%s has recovered and takes part again", name)
            else:
                _log.warning("%s is unhealthy and left out: %s", name, health.detail)
        return answers
