"""The demo's processes: each does one job, tells what it is doing, and hands its result back.

A job is one line of JSON on standard input. Lines of JSON come back on standard output: ``{"step":
number, "doing": text}`` before each step, then ``{"result": value}`` or ``{"error": text}``. What
libraries print goes to standard error, which is shown only if the process fails. One module per
job, started with ``python -m``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from kvkeep.errors import KVKeepError

#: Called with the number of a step, from 0, and what is done in it.
Step = Callable[[int, str], None]

#: No step of a job takes longer; a process that is silent for so long is ended.
SILENCE_TIMEOUT_S = 1800.0
#: How long a process may take to end once it has answered, or was told to end.
END_TIMEOUT_S = 60.0
#: Threads of torch that have nothing to do sleep, where they would spin. On a machine that others
#: use, too, spinning takes the time from the threads that work: a demo that took 124 to 140 seconds
#: of processor time, and 136 to 178 in all, took 59 to 63, and 68 to 116 in all.
WAIT_ASLEEP = {"OMP_WAIT_POLICY": "passive"}
#: Bytes of what a failed process printed that are shown.
TAIL_BYTES = 2_000


def run_child(module: str, job: Mapping[str, Any], on_step: Step) -> Any:
    """Do a job in a new process, which has ended when this returns or raises.

    Args:
        module: its main module, which calls :func:`serve`.
        job: plain values.
        on_step: told what the process does.

    Returns:
        The result of the job, plain values.

    Raises:
        KVKeepError: the job cannot be done, or the process died.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**WAIT_ASLEEP, **os.environ},
        )
        try:
            _write(child, json.dumps(job).encode() + b"\n")
            answer = _listen(child, on_step)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_TIMEOUT_S)
        finally:
            _end(child)
        if answer is None:
            raise KVKeepError(f"{module} ended with code {child.returncode}:\n{_tail(log)}")
    if "error" in answer:
        raise KVKeepError(answer["error"])
    return answer["result"]


def serve(work: Callable[[Mapping[str, Any], Step], Any]) -> int:
    """The main function of a process that does a job.

    Args:
        work: the job, called with its values and with what to tell each step to.

    Returns:
        The exit code.
    """
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)

        def say(message: Mapping[str, Any]) -> None:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

        job = json.loads(sys.stdin.readline())
        try:
            result = work(job, lambda step, doing: say({"step": step, "doing": doing}))
        except KVKeepError as error:
            say({"error": str(error)})
            return 2
        say({"result": result})
    return 0


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    """Send the job; a process that died before reading it says so itself."""
    if child.stdin is None:
        return
    try:
        child.stdin.write(data)
        child.stdin.close()
    except BrokenPipeError:
        child.stdin = None


def _listen(child: subprocess.Popen[bytes], on_step: Step) -> dict[str, Any] | None:
    """What the process answers in the end; None if it ends without an answer."""
    for line in _lines(child):
        message: dict[str, Any] = json.loads(line)
        if "step" not in message:
            return message
        on_step(message["step"], message["doing"])
    return None


def _lines(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    if child.stdout is None:
        return
    rest = b""
    while True:
        ready, _, _ = select.select([child.stdout], [], [], SILENCE_TIMEOUT_S)
        if not ready:
            raise KVKeepError(f"a process of the demo was silent for {SILENCE_TIMEOUT_S:g} s")
        data = os.read(child.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _end(child: subprocess.Popen[bytes]) -> None:
    """See that the process is gone: politely, then not."""
    try:
        if child.poll() is None:
            child.terminate()
            child.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(END_TIMEOUT_S)
    finally:
        if child.stdout is not None:
            child.stdout.close()


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
    return log.read().decode("utf-8", "replace").strip()
