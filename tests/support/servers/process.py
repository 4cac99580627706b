"""One server as a child process: started, stopped, killed and started again on the same port.

A server ends with its owner at the latest: it is closed by the ``with`` block that started it, and
the kernel ends it if this process dies without closing anything. Only processes that this module
started are ever sent a signal, by their own process id.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

#: How long a server may take until it answers, and until it has ended.
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
#: Ports for servers: below those that systems give to clients.
_PORTS = range(10_000, 22_000)
#: How often the start is looked at.
LOOK_S = 0.02
#: As much of a log as an error shows.
LOG_CHARS = 4000


class ServerError(RuntimeError):
    """A server that does not start; the message ends with its log."""


def servers_folder() -> Path:
    """Where ``scripts/install_servers.py`` unpacks servers that the system does not have."""
    return Path(os.environ.get("KVKEEP_SERVERS", Path(sys.prefix) / "servers"))


def find_program(name: str) -> str:
    """The full path of a server's program: on PATH, in the environment, or unpacked beside it.

    Raises:
        ServerError: there is none.
    """
    folder = servers_folder() / "usr" / "bin"
    found = shutil.which(name) or shutil.which(name, path=f"{Path(sys.executable).parent}:{folder}")
    if found is None:
        raise ServerError(f"{name} is not installed; run: python scripts/install_servers.py")
    return found


def library_environment() -> dict[str, str]:
    """What a program needs in its environment to find libraries that were unpacked."""
    folder = servers_folder()
    tops = [folder / "usr" / "lib", folder / "lib"]
    found = [str(path) for top in tops for path in (*top.glob("*-linux-gnu*"), top)]
    if not any(top.is_dir() for top in tops):
        return {}
    return {"LD_LIBRARY_PATH": ":".join([*found, *_given("LD_LIBRARY_PATH")])}


def load_libraries(*names: str) -> None:
    """Load libraries that were unpacked, the needed ones first, before a module asks for them."""
    for name in names:
        for top in ("usr/lib", "lib"):
            for path in sorted((servers_folder() / top).rglob(name)):
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _given(variable: str) -> list[str]:
    value = os.environ.get(variable, "")
    return [value] if value else []


def free_port(*, also_above: int = 0) -> int:
    """A port of the loopback interface that nobody has, outside of those that clients are given.

    Between this call and the server's start no connection of anybody can take it by chance.
    ``also_above`` asks that the port that many above it is free too, as a Redis cluster needs.
    """
    while True:
        port = secrets.choice(_PORTS)
        if _is_free(port) and (not also_above or _is_free(port + also_above)):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Somebody listens on the port."""
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class ServerProcess:
    """A server that runs while the ``with`` block does.

    Attributes:
        name: What error messages call it.
        command: Program and arguments; the same at each start.
        ready: True once the server answers; asked again and again while it starts.
        folder: Where it runs and keeps its data and log; one of its own unless one is given,
            which is then not removed.
        env: Added to this process's environment.
    """

    name: str
    command: Sequence[str]
    ready: Callable[[], bool]
    folder: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    _own: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False)
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def home(self) -> Path:
        """The folder that it runs in."""
        if self.folder is None:
            self._own = tempfile.TemporaryDirectory(prefix="kvkeep-")
            self.folder = Path(self._own.name)
        return self.folder

    @property
    def pid(self) -> int:
        """The id of the running process."""
        if self._child is None:
            raise ServerError(f"{self.name} is not running")
        return self._child.pid

    @property
    def log(self) -> str:
        """The end of what it wrote so far, over all its starts."""
        path = self.home / f"{self.name}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return text[-LOG_CHARS:]

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            ServerError: it ended, or did not answer within a minute.
        """
        if self._child is not None:
            raise ServerError(f"{self.name} is running already")
        env = {**os.environ, **library_environment(), **self.env}
        with (self.home / f"{self.name}.log").open("ab") as log:
            self._child = subprocess.Popen(
                [*_end_with_parent(), *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env=env,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready():
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline:
                what = "does not answer" if code is None else f"ended with code {code}"
                log_text = self.log
                self.kill()
                raise ServerError(f"{self.name} {what}; its log:\n{log_text}")
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """Freeze it as SIGSTOP does: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Let it go on after ``stop``."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(END_TIMEOUT_S)
            self._child = None

    def end(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self._child is None:
            return
        self.cont()
        self._child.terminate()
        try:
            self._child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._child = None

    def restart(self) -> None:
        """End it at once and start it again: the same port, the same folder."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it and remove its own folder."""
        self.end()
        if self._own is not None:
            self._own.cleanup()
            self._own = self.folder = None


def _end_with_parent() -> list[str]:
    """What lets the kernel end a child once its parent is gone, where the system has it."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []
