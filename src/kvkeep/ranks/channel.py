"""Channel: messages over one Unix stream socket, with deadlines, and a descriptor beside them.

Used by one thread at a time. After an error the other side's messages can no longer be told apart,
so the channel is to be closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from kvkeep.errors import RankError
from kvkeep.ranks.messages import PREFIX, Message, body_size, decode, encode

_READ_BYTES = 64 << 10
#: Descriptors taken with one read; a peer that sends more gets the others closed by the system.
_MAX_FDS = 4


class Channel:
    """One connection to another rank."""

    def __init__(self, sock: socket.socket) -> None:
        """Own ``sock``, which is connected."""
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: list[int] = []

    @classmethod
    def connect(cls, path: str) -> Channel | None:
        """Connect without waiting; None if nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            return None
        return cls(sock)

    def send(self, message: Message, deadline: float, *, fd: int | None = None) -> None:
        """Send a message, and a descriptor with its first byte.

        Args:
            message: what.
            deadline: value of ``time.monotonic()``.
            fd: the descriptor; stays the caller's.

        Raises:
            RankError: the other side is gone or does not read.
        """
        data = memoryview(encode(message))
        while data:
            try:
                if fd is None:
                    sent = self._sock.send(data)
                else:
                    sent, fd = socket.send_fds(self._sock, [data], [fd]), None
                data = data[sent:]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise RankError("another rank does not read") from None
            except OSError as error:
                raise RankError(f"another rank is gone: {error}") from error

    def receive(self, deadline: float) -> Message | None:
        """The next message; None if it has not come by ``deadline``.

        What has arrived is read also after the deadline, for a process that was stopped meanwhile.

        Raises:
            RankError: the other side is gone, or it was no message.
        """
        while True:
            message = self._parse()
            if message is not None:
                return message
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    return None
                continue
            except OSError as error:
                raise RankError(f"another rank is gone: {error}") from error
            self._fds += fds
            if not data:
                raise RankError("another rank is gone")
            self._buffer += data

    def take_fd(self) -> int | None:
        """The oldest descriptor that came; it is the caller's now."""
        return self._fds.pop(0) if self._fds else None

    def fileno(self) -> int:
        """For polling."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket and descriptors that nobody took; a second call does nothing."""
        self._sock.close()
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.pop())

    def _parse(self) -> Message | None:
        """A whole message from the buffer, if there is one."""
        if len(self._buffer) < PREFIX.size:
            return None
        end = PREFIX.size + body_size(self._buffer[: PREFIX.size])
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return decode(body)

    def _wait(self, event: int, deadline: float) -> bool:
        """Until the socket is ready; False if the deadline passes first."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        poller = select.poll()
        poller.register(self._sock, event)
        poller.poll(left_s * 1000 + 1)
        return True
