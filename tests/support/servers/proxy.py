"""A TCP proxy that is a bad network: slow, narrow, stalled, or gone.

It runs in a thread of this process and forwards to one port of the loopback interface. What it
does to the traffic can be changed at any moment and holds for open connections too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from support.servers.process import ServerProcess, accepts, free_port

#: Most bytes that are read at once.
PIECE_BYTES = 256 * 1024
#: Pieces of one connection and direction that are under way at the same time.
PIECES_UNDER_WAY = 64
START_TIMEOUT_S = 10.0


@dataclass
class Weather:
    """What happens to the traffic.

    Attributes:
        delay_s: Every piece arrives that much later; pieces follow each other without a gap.
        bytes_per_second: Most bytes per connection, direction and second; 0 is no limit.
        stalled: Nothing passes and nothing is closed, as with a server that is frozen.
        refused: New connections are closed at once.
        reset_chance: The probability that a piece is lost and its connection reset instead.
        reset_after_bytes: A connection is reset after that many bytes of one direction; 0 never.
    """

    delay_s: float = 0.0
    bytes_per_second: int = 0
    stalled: bool = False
    refused: bool = False
    reset_chance: float = 0.0
    reset_after_bytes: int = 0


class TcpProxy:
    """Forwards connections of ``port`` to ``target_port``.

    ``weather`` may be changed, or replaced, from any thread. ``forwarded_bytes`` counts what has
    passed in both directions, ``connections`` what was accepted.
    """

    def __init__(
        self, target_port: int, weather: Weather | None = None, *, port: int = 0, seed: int = 0
    ) -> None:
        self.target_port = target_port
        self.weather = weather or Weather()
        self.port = port
        self.forwarded_bytes = 0
        self.connections = 0
        self._chance = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()  # owned by the loop's thread
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-test-proxy", daemon=True)
        self._done = asyncio.Event()

    def start(self) -> None:
        """Listen; ``port`` is known afterwards."""
        self._thread.start()
        if not self._listening.wait(START_TIMEOUT_S):
            raise TimeoutError("the proxy does not start")

    def close(self) -> None:
        """Close all connections and end the thread."""
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(START_TIMEOUT_S)

    def reset_all(self) -> None:
        """Reset every open connection."""
        done = threading.Event()

        def reset() -> None:
            for writer in list(self._writers):
                _reset(writer)
            done.set()

        self._loop.call_soon_threadsafe(reset)
        done.wait(START_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._done.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets in the next turn

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.weather.refused:
            _reset(writer)
            return
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            _reset(writer)
            return
        both = {writer, there[1]}
        self._writers |= both
        try:
            # only close() cancels; the stream server would report it as an error of ours
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._forward(reader, there[1], both), self._forward(there[0], writer, both)
                )
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: set[asyncio.StreamWriter],
    ) -> None:
        """Carry one direction: one task reads and dates the pieces, one lets them go when due."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES_UNDER_WAY)
        out = asyncio.create_task(self._deliver(pieces, writer))
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                passed += len(data)
                weather = self.weather
                lost = self._chance.random() < weather.reset_chance
                if lost or 0 < weather.reset_after_bytes < passed:
                    for end in both:
                        _reset(end)
                    break
                await pieces.put((self._loop.time() + weather.delay_s, data))
            else:
                await pieces.put((self._loop.time() + self.weather.delay_s, b""))
                await out
        out.cancel()

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        """Write each piece when it is due; an empty one says that the direction has ended."""
        with contextlib.suppress(ConnectionError):
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not data:
                    writer.write_eof()
                    return
                while self.weather.stalled:
                    await asyncio.sleep(0.01)
                if rate := self.weather.bytes_per_second:
                    await asyncio.sleep(len(data) / rate)
                writer.write(data)
                await writer.drain()
                self.forwarded_bytes += len(data)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a reset instead of an orderly end."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def tcp_proxy(target_port: int, weather: Weather | None = None) -> Iterator[TcpProxy]:
    """A proxy in front of a port of the loopback interface, closed with the block."""
    proxy = TcpProxy(target_port, weather)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


#: A proxy as a process: for clients that hold the interpreter's lock while they wait.
_PROCESS = """
import sys, threading
from support.servers.proxy import TcpProxy, Weather
port, target_port, delay_s = sys.argv[1:]
TcpProxy(int(target_port), Weather(delay_s=float(delay_s)), port=int(port)).start()
threading.Event().wait()
"""


@contextmanager
def slow_proxy_process(target_port: int, delay_s: float) -> Iterator[int]:
    """The port of a proxy that runs in a process of its own, ended with the block."""
    port = free_port()
    command = [sys.executable, "-c", _PROCESS, str(port), str(target_port), str(delay_s)]
    with ServerProcess("proxy", command, lambda: accepts(port)):
        yield port
