"""Ranks of one engine in processes of their own, for tests: each with a real cache over toy pages.

:class:`Ranks` starts them, tells them what to do and reads what they answer. A rank can be told to
stop, to die or to raise at a :class:`Point` of its next load. The KV of a token is the same on
every rank, as with latent attention.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from kvkeep.config import load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.memory.placement import WorkerPlace
from kvkeep.ranks.base import Channel
from kvkeep.ranks.first import Verdicts
from kvkeep.testing.chunks import wait_until
from support.paged_engine import PagedEngine

CHUNK, NUM_PAGES, NUM_LAYERS = 8, 64, 3
#: How long a test waits for an answer that must come.
ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Point:
    """A moment in a load.

    Attributes:
        name: ``copy``, ``decide`` or ``send`` and a message: ``send Plan``.
        is_after: right after it, not right before.
        action: ``stop``, ``kill`` or ``raise``.
    """

    name: str
    is_after: bool
    action: str

    def act(self) -> None:
        """Stop or end this process, or raise."""
        if self.action == "raise":
            raise RuntimeError(f"raised at {self}")
        os.kill(os.getpid(), signal.SIGSTOP if self.action == "stop" else signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a rank says of a load.

    Attributes:
        mask: where it says that KV was written.
        is_right: every page that lies in the mask holds exactly these tokens' KV.
    """

    mask: tuple[bool, ...]
    is_right: bool


@dataclass
class _Hook:
    """Where this process is to act, once."""

    point: Point | None = None

    def around(self, name: str, run: Callable[[], Any]) -> Any:
        point = self.point
        if point is None or point.name != name:
            return run()
        self.point = None
        if not point.is_after:
            point.act()
            return run()
        result = run()
        point.act()
        return result


def _install(hook: _Hook) -> None:
    """Have the hook called where loads pass."""
    copy, decide, send = PagedGPUConnector.batched_to_gpu, Verdicts.decide, Channel.send

    def hooked_copy(self: PagedGPUConnector, *args: Any, **more: Any) -> None:
        hook.around("copy", lambda: copy(self, *args, **more))

    def hooked_decide(self: Verdicts, seq: int, written: int) -> int:
        result: int = hook.around("decide", lambda: decide(self, seq, written))
        return result

    def hooked_send(self: Channel, message: Any, deadline: float, **more: Any) -> None:
        name = f"send {type(message).__name__}"
        hook.around(name, lambda: send(self, message, deadline, **more))

    PagedGPUConnector.batched_to_gpu = hooked_copy  # type: ignore[method-assign]
    Verdicts.decide = hooked_decide  # type: ignore[method-assign]
    Channel.send = hooked_send  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _Start:
    rank: int
    num_ranks: int
    is_shared: bool
    socket: Path
    timeout_s: float
    extra: dict[str, object]


class _Rank:
    """What runs in a rank's process."""

    def __init__(self, start: _Start) -> None:
        self.hook = _Hook()
        _install(self.hook)
        self.model = PagedEngine(num_pages=NUM_PAGES, num_layers=NUM_LAYERS)
        settings = load_settings(
            extra={
                "chunk_size": CHUNK,
                "cpu.size": "1MiB",
                "cpu.prefault": "0B",
                "ranks.timeout": start.timeout_s,
                **start.extra,
            }
        )
        identity = CacheIdentity(
            "ranks",
            "1",
            self.model.layout,
            chunk_size=CHUNK,
            rank=0 if start.is_shared else start.rank,
            world_size=1 if start.is_shared else start.num_ranks,
        )
        place = WorkerPlace(
            rank=start.rank,
            num_ranks=start.num_ranks,
            num_local=start.num_ranks,
            has_same_kv=start.is_shared,
            first_rank_only=start.is_shared,
        )
        connector = PagedGPUConnector(self.model.layout)
        self.manager = CacheManager.create(
            settings, identity, connector, place=place, ranks_socket=start.socket
        )
        self.engine = self.manager.engine

    def fill(self, tokens: list[int]) -> int:
        """Prefill and store; how many tokens were copied."""
        pages = range(self.model.num_pages_for(len(tokens)))
        self.model.prefill(tokens, pages)
        slots = self.model.slots(pages, len(tokens))
        return self.engine.store(
            tokens, kvcaches=self.model.caches, slot_mapping=slots
        ).num_copied_tokens

    def lookup(self, tokens: list[int], lookup_id: str | None = None) -> int:
        """Tokens found; leased under ``lookup_id`` if it is given."""
        return int(self.engine.lookup(tokens, lookup_id=lookup_id, pin=lookup_id is not None))

    def forget(self, tokens: list[int], number: int) -> int:
        """Lose one chunk of a prompt."""
        keys = self.engine.token_database.process_tokens(tokens).keys
        return self.manager.storage.batched_remove([keys[number]])

    def load(self, tokens: list[int], req_id: str, point: Point | None, layerwise: bool) -> Loaded:
        """Wipe the pages and load."""
        count = self.model.num_pages_for(len(tokens))
        pages = list(reversed(range(NUM_PAGES - count, NUM_PAGES)))
        self.model.wipe(range(NUM_PAGES))
        self.hook.point = point
        slots = self.model.slots(pages, len(tokens))
        verb = self.engine.retrieve_layer if layerwise else self.engine.retrieve
        result: Any = verb(tokens, kvcaches=self.model.caches, slot_mapping=slots, req_id=req_id)
        mask = (list(result)[-1] if layerwise else result).tolist()
        right = self.model.right_pages(tokens, pages)
        size = self.model.page_size
        is_right = all(right[index // size] for index, is_there in enumerate(mask) if is_there)
        return Loaded(tuple(mask), is_right)

    def check(self) -> tuple[int, int, int]:
        """Open leases, objects and chunks."""
        report = self.engine.check()
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        return report.open_leases, report.num_objects, report.num_chunks

    def metrics(self) -> dict[str, float]:
        """Every counter."""
        return dict(self.engine.metrics.snapshot())

    def capacity(self) -> int:
        """Bytes of the pool."""
        return self.engine.check().capacity_bytes

    def is_whole(self) -> bool:
        """What the rank thinks of its group."""
        ranks = self.engine._parts.ranks
        return ranks is not None and ranks.is_whole()


def _serve(start: _Start, pipe: Connection) -> None:
    """A rank's process: one command after the other, until the pipe closes."""
    rank = _Rank(start)
    pipe.send("ready")
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            verb, args = pipe.recv()
            try:
                pipe.send(getattr(rank, verb)(*args))
            except Exception as error:  # noqa: BLE001  the top of this task: the test is told
                pipe.send(error)
    rank.manager.close()


@dataclass
class Ranks:
    """Several ranks. Use :func:`running_ranks`."""

    directory: Path
    num_ranks: int
    is_shared: bool
    timeout_s: float
    extra: dict[str, object] = field(default_factory=dict)
    processes: list[ForkServerProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def start(self, rank: int) -> None:
        """Start a rank, in place of one that is dead."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        socket = self.directory / "ranks.sock"
        start = _Start(
            rank, self.num_ranks, self.is_shared, socket, self.timeout_s, dict(self.extra)
        )
        process = context.Process(target=_serve, args=(start, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes[rank : rank + 1] = [process]
        self.pipes[rank : rank + 1] = [ours]
        assert self.answer(rank) == "ready"

    def ask(self, rank: int, verb: str, *args: object) -> None:
        """Tell a rank what to do, without waiting."""
        self.pipes[rank].send((verb, args))

    def answer(self, rank: int, timeout_s: float = ANSWER_S) -> Any:
        """What a rank answers; an error that it raised is raised here."""
        if not self.pipes[rank].poll(timeout_s):
            raise AssertionError(f"rank {rank} did not answer within {timeout_s} s")
        result = self.pipes[rank].recv()
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, rank: int, verb: str, *args: object) -> Any:
        """Ask and wait."""
        self.ask(rank, verb, *args)
        return self.answer(rank)

    def all(self, verb: str, *args: object) -> list[Any]:
        """Ask all ranks at once; their answers."""
        for rank in range(self.num_ranks):
            self.ask(rank, verb, *args)
        return [self.answer(rank) for rank in range(self.num_ranks)]

    def load(self, tokens: Sequence[int], req_id: str, *, layerwise: bool = False) -> list[Loaded]:
        """Load on all ranks."""
        return self.all("load", list(tokens), req_id, None, layerwise)

    def send_signal(self, rank: int, number: int) -> None:
        """Stop, continue or kill a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_stopped(self, rank: int) -> None:
        """Until the rank's process is stopped."""
        stat = Path(f"/proc/{self.processes[rank].pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")

    def wait_whole(self) -> None:
        """Until rank 0 sees everybody, and everybody rank 0."""
        wait_until(lambda: all(self.all("is_whole")))

    def check_idle(self) -> None:
        """No lease open, and no memory held but chunks, on any rank."""
        for leases, num_objects, num_chunks in self.all("check"):
            assert (leases, num_objects) == (0, num_chunks)

    def close(self) -> None:
        """End all ranks, in order where they live."""
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(rank, signal.SIGCONT)
            self.pipes[rank].close()
            process.join(ANSWER_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def running_ranks(
    directory: Path,
    *,
    num_ranks: int = 2,
    is_shared: bool = True,
    timeout_s: float = 1.0,
    **extra: object,
) -> Iterator[Ranks]:
    """Ranks that have found each other; at the end nothing is held on any of them.

    Args:
        directory: private to the user.
        num_ranks: how many.
        is_shared: rank 0 stores for all.
        timeout_s: of a load's wait for another rank.
        extra: further settings, with ``_`` for a dot.
    """
    directory.chmod(0o700)
    settings = {name.replace("_", ".", 1): value for name, value in extra.items()}
    ranks = Ranks(directory, num_ranks, is_shared, timeout_s, settings)
    try:
        for rank in range(num_ranks):
            ranks.start(rank)
        ranks.wait_whole()
        yield ranks
        ranks.check_idle()
    finally:
        ranks.close()
    assert list(directory.iterdir()) == [], "the ranks left something behind"
