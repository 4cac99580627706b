"""FollowerRank: the side of every rank but rank 0.

It answers rank 0's rounds. Whatever goes wrong in one, it is a miss here, by the verdict that all
ranks read, and the connection is made anew by a thread of its own. Callable from any thread; a
round, or a look at the connection, takes its turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import torch

from kvkeep.errors import RankError
from kvkeep.layout import MemoryFormat
from kvkeep.memory.base import MemoryObj
from kvkeep.memory.shared import MappedPool
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import (
    OTHER_RANKS,
    PROTOCOL,
    Channel,
    Done,
    Join,
    Message,
    Plan,
    RankGroup,
    RankOptions,
    Round,
    Verdict,
    Welcome,
)
from kvkeep.ranks.first import Verdicts, verdict_directory
from kvkeep.storage.health import HealthTimer

#: Between two looks at the connection.
REJOIN_INTERVAL_S = 0.5
#: Plans that came before their load is asked for here; of more the oldest is forgotten.
MAX_EARLY_PLANS = 64
#: A verdict is waited for that many timeouts: rank 0 itself may wait one for a third rank.
_VERDICT_TIMEOUTS = 2

_log = logging.getLogger(__name__)


class FollowerRank(RankGroup):
    """Any rank but rank 0."""

    is_first = False

    def __init__(self, options: RankOptions, *, metrics: Metrics) -> None:
        """Start to look for rank 0, without waiting for it.

        Args:
            options: the group.
            metrics: where failures of other ranks are counted.
        """
        self.shares_kv = options.shares_kv
        self._options = options
        self._metrics = metrics
        self._turn = threading.Lock()
        self._channel: Channel | None = None  # guarded by _turn, as is the rest
        self._verdicts: Verdicts | None = None
        self._pool: MappedPool | None = None
        self._early: OrderedDict[bytes, Plan] = OrderedDict()
        self._closed = False
        self._timer = HealthTimer(
            self.tend,
            interval_s=REJOIN_INTERVAL_S,
            timeout_s=options.timeout_s,
            on_error=lambda error: metrics.failure(OTHER_RANKS, "join", type(error).__name__),
        )

    def is_whole(self) -> bool:
        """See :meth:`RankGroup.is_whole`: rank 0 is there; only it knows of the others."""
        return self._channel is not None

    def tend(self) -> None:
        """Read what came unasked, connect if there is no connection. Does not wait."""
        if not self._turn.acquire(blocking=False):
            return  # a round will find out itself
        try:
            if self._closed:
                return
            if self._channel is not None:
                self._drain_locked(self._channel)
            if self._channel is None:
                self._join_locked()
        finally:
            self._turn.release()

    def open_round(self, tag: bytes, offered: Sequence[MemoryObj] = ()) -> Round | None:
        """See :meth:`RankGroup.open_round`."""
        if not self._turn.acquire(timeout=self._options.timeout_s):
            self._metrics.failure(OTHER_RANKS, "load", "busy")
            return None
        try:
            if self._channel is None:
                self._metrics.failure(OTHER_RANKS, "load", "not_whole")
            elif not self.shares_kv:
                return _FollowerRound(self, tag, None)
            else:
                plan = self.await_plan_locked(tag)
                if plan is not None:
                    return _FollowerRound(self, tag, plan)
            self._turn.release()
            return None
        except BaseException:
            self._turn.release()
            raise

    def close(self) -> None:
        """See :meth:`RankGroup.close`; waits for a round that is under way."""
        self._timer.close()
        has_turn = self._turn.acquire(timeout=_VERDICT_TIMEOUTS * self._options.timeout_s)
        try:
            self._closed = True
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self._pool is not None:
                self._pool.close()
                self._pool = None
        finally:
            if has_turn:
                self._turn.release()

    # -- used by a round, which has the turn ------------------------------------------------------

    def await_plan_locked(self, tag: bytes) -> Plan | None:
        """Rank 0's plan for this load; None if it refused, is gone or late."""
        deadline = time.monotonic() + self._options.timeout_s
        plan = self._early.pop(tag, None)
        while plan is None:
            message = self._receive_locked(deadline)
            if message is None:
                return None
            if isinstance(message, Plan) and message.load == tag:
                plan = message
            else:
                self._take_locked(message)
        return None if plan.refused else plan

    def answer_locked(self, seq: int, written: int) -> int:
        """Say what was written and wait for the outcome."""
        deadline = time.monotonic() + _VERDICT_TIMEOUTS * self._options.timeout_s
        self.tell_locked(seq, written)
        while (message := self._receive_locked(deadline)) is not None:
            if isinstance(message, Verdict) and message.seq == seq:
                return min(message.written, written)
            self._take_locked(message)
        verdicts = self._verdicts
        return min(verdicts.decide(seq, 0), written) if verdicts is not None else 0

    def tell_locked(self, seq: int, written: int) -> None:
        """Say what was written."""
        if self._channel is None:
            return
        try:
            self._channel.send(Done(seq, written), time.monotonic() + self._options.timeout_s)
        except RankError as error:
            self.leave_locked("gone", error)

    def borrow_locked(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """A view of rank 0's memory; None if it is not there."""
        try:
            return self._pool.view(offset, shape, dtype, fmt) if self._pool is not None else None
        except ValueError as error:
            self.leave_locked("malformed", error)
            return None

    def leave_locked(self, cause: str, error: BaseException | None = None) -> None:
        """Close the connection: rank 0 sees it at once, and it is made anew."""
        channel, self._channel = self._channel, None
        self._early.clear()
        if channel is not None:
            channel.close()
            self._metrics.failure(OTHER_RANKS, "load", cause)
            _log.warning("rank 0 is lost until it is back: %s", error or f"{cause} in a load")

    def end_turn(self) -> None:
        """The round is over."""
        self._turn.release()

    # -- the connection ---------------------------------------------------------------------------

    def _receive_locked(self, deadline: float) -> Message | None:
        """The next message; None if rank 0 is late or gone, and then the connection is closed."""
        if self._channel is None:
            return None
        try:
            message = self._channel.receive(deadline)
        except RankError as error:
            self.leave_locked("gone", error)
            return None
        if message is None:
            self.leave_locked("timeout")
        return message

    def _drain_locked(self, channel: Channel) -> None:
        try:
            while (message := channel.receive(0.0)) is not None:
                self._take_locked(message)
        except RankError as error:
            self.leave_locked("gone", error)

    def _take_locked(self, message: Message) -> None:
        """A message that is not the one waited for."""
        if isinstance(message, Welcome):
            self._settle_in_locked(message)
        elif isinstance(message, Plan):
            self._early[message.load] = message
            while len(self._early) > MAX_EARLY_PLANS:
                self._early.popitem(last=False)
        elif isinstance(message, Verdict):  # of a round that ended here, or never began
            over = [tag for tag, plan in self._early.items() if plan.seq <= message.seq]
            for tag in over:
                del self._early[tag]
        else:
            self.leave_locked("malformed")

    def _settle_in_locked(self, welcome: Welcome) -> None:
        """Rank 0 has let this one in."""
        options = self._options
        self._verdicts = Verdicts(verdict_directory(options.socket), welcome.session)
        fd = self._channel.take_fd() if self._channel is not None else None
        earlier, self._pool = self._pool, None
        if earlier is not None:
            earlier.close()
        if fd is None:
            return
        try:
            self._pool = MappedPool(fd, welcome.pool_bytes)
        except (OSError, ValueError) as error:
            self.leave_locked("malformed", error)

    def _join_locked(self) -> None:
        options = self._options
        channel = Channel.connect(str(options.socket))
        if channel is None:
            return
        join = Join(PROTOCOL, options.rank, options.num_ranks, options.identity)
        try:
            channel.send(join, time.monotonic() + options.timeout_s)
        except RankError:
            channel.close()
            return
        self._early.clear()
        self._channel = channel


class _FollowerRound(Round):
    """A round of rank 0's; it has the turn.

    ``plan`` is None where every rank loads its own: rank 0 begins the round only after that.
    """

    def __init__(self, group: FollowerRank, tag: bytes, plan: Plan | None) -> None:
        self._group = group
        self._tag = tag
        self._plan = plan
        self._is_over = False

    @property
    def num_offered(self) -> int:
        """See :meth:`Round.num_offered`."""
        return len(self._plan.places) if self._plan is not None else 0

    def borrow(
        self, index: int, shape: Sequence[int], dtype: torch.dtype, fmt: MemoryFormat
    ) -> MemoryObj | None:
        """See :meth:`Round.borrow`."""
        if self._plan is None or not 0 <= index < len(self._plan.places):
            return None
        offset, size = self._plan.places[index]
        obj = self._group.borrow_locked(offset, shape, dtype, fmt)
        if obj is not None and obj.size_bytes != size:
            obj.ref_count_down()
            return None
        return obj

    def conclude(self, written: int) -> int:
        """See :meth:`Round.conclude`."""
        if self._is_over:
            return 0
        self._is_over = True
        group = self._group
        try:
            plan = self._plan or group.await_plan_locked(self._tag)
            if plan is None:
                return 0
            if not written:
                group.tell_locked(plan.seq, 0)
                return 0
            return group.answer_locked(plan.seq, written)
        except BaseException as error:
            group.leave_locked("raised", error)  # or rank 0 would wait
            raise
        finally:
            group.end_turn()

    def abort(self) -> None:
        """See :meth:`Round.abort`."""
        if self._is_over:
            return
        self._is_over = True
        try:
            if self._plan is not None:
                self._group.tell_locked(self._plan.seq, 0)
            else:
                self._group.leave_locked("aborted")
        finally:
            self._group.end_turn()
