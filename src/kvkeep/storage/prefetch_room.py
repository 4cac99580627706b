"""PrefetchRoom: how many chunks all prefetches together may hold in memory.

A prefetch takes its room whole before it holds anything, or waits, first come, first served. So two
of them never hold half of it each and wait for the rest (fault 26). Used in the I/O thread only.
"""

from __future__ import annotations

import asyncio
from collections import deque


class PrefetchRoom:
    """A number of chunks to share out."""

    def __init__(self, num_chunks: int) -> None:
        """All of it is free.

        Args:
            num_chunks: at least 1.

        Raises:
            ValueError: it is less.
        """
        if num_chunks < 1:
            raise ValueError(f"prefetches need room for a chunk, got {num_chunks}")
        self.num_chunks = num_chunks
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, wanted: int) -> int:
        """Room for ``wanted`` chunks, or for all that there ever can be, once it is free.

        Returns:
            How many; the caller gives them back.
        """
        count = min(wanted, self.num_chunks)
        if self._waiting or self.used + count > self.num_chunks:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (count, turn)
            self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                elif not turn.cancelled():
                    self.used -= count  # its turn came as it was given up
                self._let_in()
                raise
        else:
            self.used += count
        return count

    def give_back(self, count: int) -> None:
        """``count`` chunks are not held any more."""
        self.used -= count
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.num_chunks:
            count, turn = self._waiting.popleft()
            if not turn.done():  # else it was given up, and its task has not run since
                self.used += count
                turn.set_result(None)
