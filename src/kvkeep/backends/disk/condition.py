"""DiskCondition: whether the disk tier can be used now. Callable from any thread.

Its directory is opened in the background; one that cannot be opened is tried again. Stores can be
out alone: the disk is full, or read-only.
"""

from __future__ import annotations

import logging

from kvkeep.backends.disk.catalog import Catalog
from kvkeep.backends.disk.files import cause_of
from kvkeep.backends.io.breaker import Breaker
from kvkeep.backends.io.condition import TierCondition
from kvkeep.backends.io.pool import IOPool
from kvkeep.errors import BackendError

_log = logging.getLogger(__name__)


class DiskCondition(TierCondition):
    """Opens and checks a catalog."""

    def __init__(
        self,
        catalog: Catalog,
        pool: IOPool,
        *,
        breakers: tuple[Breaker, Breaker],
        stall_timeout_s: float,
    ) -> None:
        """Not open yet; see the base class.

        Args:
            catalog: what is opened and checked.
            pool: where that runs.
            breakers: of loads, and of stores.
            stall_timeout_s: a call that runs for longer means that the medium hangs.
        """
        super().__init__(pool, breakers=breakers, stall_timeout_s=stall_timeout_s)
        self._catalog = catalog
        # Both are written by the one task that opens.
        self._is_open = False
        self._told = ""  # why it could not be opened, as the log has it

    @property
    def is_open(self) -> bool:
        """The directory was opened."""
        return self._is_open

    def _try_first(self) -> None:
        try:
            self._catalog.open()
        except (OSError, BackendError) as error:
            cause = cause_of(error) if isinstance(error, OSError) else "lock_timeout"
            self._catalog.reports.fault("open", cause)
            self.loads.trip()
            if str(error) != self._told:  # or each of many tries would say the same
                self._told = str(error)
                _log.warning("the disk tier cannot be opened: %s", error)
            return
        self._is_open = True
        self.loads.succeeded()

    def _try_again(self) -> None:
        if not self._is_open:
            self._try_first()
            return
        try:
            self._catalog.check()
        except OSError as error:
            self._catalog.reports.fault("check", cause_of(error))
            self.loads.failed()
        else:
            self.loads.succeeded()
