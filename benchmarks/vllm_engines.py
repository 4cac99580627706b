"""Engines of bench_vllm.py: processes of their own, of which one at a time may run.

An engine that was just asked goes on spinning for a second, which on few cores is half a machine
that another one lacks. So all but the one that is asked are stopped (SIGSTOP). Every wait has a
deadline. Used from one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SERVER = Path(__file__).with_name("vllm_server.py")
#: How long an engine may take to start, to answer and to end.
START_S, ANSWER_S, END_S = 180.0, 180.0, 60.0
#: How long one may take to come to rest, how long it is watched at a time, and what share of a core
#: one that rests may use.
SETTLE_S, REST_S, RESTING_SHARE = 60.0, 0.5, 0.1
#: All engines are bound to the same cores; by itself vLLM gives one with a connector others than
#: one without.
CORES = "0-1"
#: The engine's own memory for KV, in GiB.
KV_GIB = 1


class EngineError(RuntimeError):
    """An engine does not start, or does not answer in time."""


@dataclass(frozen=True)
class Answer:
    """What an engine has generated.

    Attributes:
        total_ms: from asking until the last token was there.
        tokens: by prompt.
    """

    total_ms: float
    tokens: list[list[int]]


def kvkeep_transfer(settings: Mapping[str, object]) -> dict[str, object]:
    """For kvkeep, what vLLM calls ``kv_transfer_config``."""
    return {
        "kv_connector": "KVKeepConnector",
        "kv_connector_module_path": "kvkeep.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(settings),
    }


def settle(pid: int) -> None:
    """Wait until a process and its children rest."""
    deadline = time.monotonic() + SETTLE_S
    used_s = _cpu_s(pid)
    while time.monotonic() < deadline:
        time.sleep(REST_S)
        before_s, used_s = used_s, _cpu_s(pid)
        if used_s - before_s < RESTING_SHARE * REST_S:
            return


def _cpu_s(pid: int) -> float:
    """Processor time that a process and its children have used so far."""
    total_s = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


class Engine:
    """A running engine and its children, a process group of its own."""

    def __init__(
        self,
        name: str,
        transfer: Mapping[str, object] | None,
        *,
        model: Path,
        python: str = sys.executable,
    ) -> None:
        """Start it and wait until it serves.

        Args:
            name: of the engine, for messages.
            transfer: vLLM's ``kv_transfer_config``.
            model: folder of the model.
            python: interpreter that has vLLM and the connector.

        Raises:
            EngineError: it does not serve in time.
        """
        self.name = name
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": CORES,
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if python != sys.executable:
            env.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the engine
        self._process = subprocess.Popen(
            [python, str(SERVER), json.dumps({"model": str(model), "transfer": transfer})],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        try:
            self._read(START_S)
        except BaseException:
            self.close()
            raise

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Answer:
        """Generate for all prompts at once.

        Raises:
            EngineError: no answer in time.
        """
        assert self._process.stdin is not None
        try:
            request = {"prompts": list(prompts), "max_tokens": max_tokens}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EngineError(f"the engine {self.name} has ended:\n{self._log_end()}") from error
        answer = self._read(ANSWER_S)
        return Answer(answer["total_s"] * 1e3, answer["tokens"])

    def settle(self) -> None:
        """Wait until it and its children rest: memory is committed, all is written."""
        settle(self._process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the engine and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Ask it to end."""
        assert self._process.stdin is not None
        self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError, ValueError), self._process.stdin:
            self._process.stdin.write("\n")

    def close(self) -> None:
        """Let it end, and what it writes reach its tiers; kill it if that takes too long."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read_lines(self) -> None:
        """The reading thread."""
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _read(self, timeout_s: float) -> dict[str, object]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineError(f"the engine {self.name} is silent for {timeout_s:g} s") from None
        if not line:
            self._lines.put("")  # for whoever asks again
            raise EngineError(f"the engine {self.name} has ended:\n{self._log_end()}")
        return dict(json.loads(line))

    def _log_end(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


class Engines:
    """Engines that are asked in turn; all but one are stopped."""

    def __init__(self, *engines: Engine) -> None:
        """They may be running."""
        self._engines = engines

    def ask(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> Answer:
        """Ask one of them, alone on the machine."""
        for other in self._engines:
            if other is not engine:
                other.signal(signal.SIGSTOP)
        engine.signal(signal.SIGCONT)
        return engine.ask(prompts, max_tokens)


@dataclass(frozen=True)
class LMCacheServer:
    """LMCache's separate server, running.

    Attributes:
        transfer: what vLLM calls ``kv_transfer_config``, for an engine that uses it.
        pid: of its process.
    """

    transfer: dict[str, object]
    pid: int


@contextlib.contextmanager
def lmcache_server(
    python: str, gib: int, tiers: Sequence[Mapping[str, object]] = ()
) -> Iterator[LMCacheServer]:
    """Start LMCache's server, with shared memory.

    Args:
        python: interpreter that has LMCache.
        gib: memory of its server.
        tiers: what it calls L2 adapters: where it keeps what survives it.
    """
    from support.servers.process import free_port

    port, http_port = free_port(), free_port()
    options = {
        "--port": port,
        "--http-port": http_port,
        "--shm-name": f"bench{port}",
        "--supported-transfer-mode": "auto",
        "--l1-size-gb": gib,
        "--eviction-policy": "LRU",
    }
    words = [str(word) for pair in options.items() for word in pair]
    words.append("--disable-observability")
    words += [word for tier in tiers for word in ("--l2-adapter", json.dumps(tier))]
    server = subprocess.Popen(
        [str(Path(python).with_name("lmcache")), "server", "--no-l1-use-lazy", *words],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": port},
        }
        yield LMCacheServer(transfer, server.pid)
    finally:
        server.terminate()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
