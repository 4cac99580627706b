"""What a group of ranks promises an engine. Start here.

All ranks of an engine load the same requests in the same order, and what one of them lacks is
worth nothing on the others. So each load is a round in which all ranks report how many chunks they
have written, and every rank gets the same answer: the minimum, or 0 where one of them is late,
gone or could not. There are two kinds of groups:

- each rank has KV of its own: it loads from its own tiers, and the round compares;
- the KV is the same on every rank (latent attention): rank 0 stores and loads, and the others copy
  what it loaded out of its pool, which they map.

A round that waits too long, or whose members die or are stopped in the middle, ends with 0 for all
of them: the outcome is decided in one place (``verdicts``), by whoever is first.

Rounds of one group follow each other. Every method may be called from any thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj

#: Between two looks for ranks that are waited for.
_LOOK_S = 0.01
#: Where a failure of another rank is counted: the ``tier`` of the metrics.
OTHER_RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Which group, and whose place in it.

    Attributes:
        socket: rank 0's Unix socket; its directory is private to the user. The verdicts stand in a
            directory beside it.
        rank: this one.
        num_ranks: all of them.
        shares_kv: rank 0's chunks are everybody's.
        timeout_s: how long a round waits for another rank.
        identity: 32 bytes that are equal on all ranks of an engine, and on no others.
    """

    socket: Path
    rank: int
    num_ranks: int
    shares_kv: bool
    timeout_s: float
    identity: bytes


class Round(ABC):
    """One load. It ends by exactly one of :meth:`conclude` and :meth:`abort`."""

    @property
    @abstractmethod
    def num_offered(self) -> int:
        """Chunks that rank 0 offers to the others; 0 where each rank loads its own."""

    @abstractmethod
    def borrow(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """An offered chunk in rank 0's memory, with a reference for the caller.

        It may only be read, and what was read counts only if :meth:`conclude` says so: if this
        rank is late, its bytes are another chunk's by now.

        Returns:
            None if there is none that is just as large.
        """

    @abstractmethod
    def conclude(self, written: int) -> int:
        """This rank has written its first ``written`` chunks; how many count, on every rank alike.

        Waits for the others, at most two timeouts. What was lent or borrowed must be held until
        this returns.
        """

    @abstractmethod
    def abort(self) -> None:
        """This rank gives the load up, so it is a miss on every rank. Does nothing after an end."""


class RankGroup(ABC):
    """The ranks of one engine, as seen by one of them.

    Attributes:
        shares_kv: rank 0's chunks are everybody's.
        is_first: this is rank 0.
    """

    shares_kv: bool
    is_first: bool

    @property
    def is_passive(self) -> bool:
        """This rank stores nothing: rank 0 does."""
        return self.shares_kv and not self.is_first

    @abstractmethod
    def is_whole(self) -> bool:
        """As far as this rank knows, all are there, so that a load can succeed; does not wait."""

    @abstractmethod
    def tend(self) -> None:
        """Look who has come or gone; does not wait."""

    def wait_until_whole(self, timeout_s: float) -> bool:
        """Wait for ranks that start at the same time as this one; whether all are there."""
        deadline = time.monotonic() + timeout_s
        while not self.is_whole():
            if time.monotonic() >= deadline:
                return False
            self.tend()
            time.sleep(_LOOK_S)
        return True

    @abstractmethod
    def open_round(self, tag: bytes, offered: Sequence[MemoryObj] = ()) -> Round | None:
        """Begin a load.

        Args:
            tag: 32 bytes that all ranks give to this load, and hardly to another one.
            offered: what rank 0 has, where it is everybody's.

        Returns:
            None if the load is a miss: the group is not whole, another rank gave it up or did not
            come, or rank 0 has nothing to offer.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group; a second call does nothing."""
