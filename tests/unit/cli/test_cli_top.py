"""``kvkeep top``: what a running cache shows, through its sockets and its metrics endpoint."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from kvkeep.cli.main import app
from kvkeep.identity import CacheIdentity
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.server import LookupServer
from kvkeep.lookup.sockets import ranks_path, socket_directory, socket_path
from kvkeep.metrics.endpoint import EndpointOptions, MetricsEndpoint
from support.engine_rig import EngineRig

CHUNK = 8
PROMPT = list(range(4 * CHUNK))


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("KVKEEP_LOOKUP_SOCKET_DIR", str(tmp_path))
    monkeypatch.setattr("kvkeep.cli.top.ONCE_S", 0.05)
    return lambda *arguments: CliRunner().invoke(app, ["top", *arguments])


@pytest.fixture
def engine(tmp_path):
    """An engine that answers on its socket, and has stored a prompt that was asked for twice."""
    with EngineRig(chunk_size=CHUNK) as rig:
        identity = CacheIdentity("m", "1", rig.model.layout, chunk_size=CHUNK)
        path = socket_path(socket_directory(tmp_path, {}), "engine", 0)
        server = LookupServer(rig.engine, path, identity=identity, metrics=rig.metrics)
        client = LookupClient([path], timeout_s=10.0)
        try:
            client.lookup("a", PROMPT, pin=False)
            rig.fill(PROMPT)
            client.lookup("b", PROMPT, pin=False)
            client.check()  # counts are sent, not answered; this is behind them
            yield rig
        finally:
            client.close()
            server.close()


def test_an_engine_is_found_by_its_socket(run, engine):
    done = run("--once")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(done.stdout.split())
    assert "1 rank" in text
    assert "50.0% in all" in text
    assert "0 leases open" in text
    [row] = [line.split() for line in lines if "LocalCPU" in line]
    assert row[:2] == ["LocalCPU", "50.0%"]
    assert row[-1] == "ok"


def test_two_ranks_are_one_engine_and_other_sockets_are_not_asked(run, engine, tmp_path, caplog):
    """Neither the one that ranks meet at, which has another protocol, nor one of the dead."""
    directory = socket_directory(tmp_path, {})
    identity = CacheIdentity("m", "1", engine.model.layout, chunk_size=CHUNK)
    with socket.socket(socket.AF_UNIX) as meeting, socket.socket(socket.AF_UNIX) as dead:
        meeting.bind(str(ranks_path(directory, "engine")))
        meeting.listen(1)
        meeting.setblocking(False)
        dead.bind(str(socket_path(directory, "another", 0)))
        path = socket_path(directory, "engine", 1)
        server = LookupServer(engine.engine, path, identity=identity, metrics=engine.metrics)
        try:
            done = run("--once", "--json")
        finally:
            server.close()
        with pytest.raises(BlockingIOError):
            meeting.accept()
    assert (done.exit_code, done.stderr, caplog.text) == (0, "", "")
    assert [json.loads(line)["ranks"] for line in done.stdout.splitlines()] == [2]


def test_json_has_the_numbers(run, engine):
    done = run("--once", "--json")
    view = json.loads(done.stdout)
    assert (view["ranks"], view["hit_share"], view["hit_share_since_start"]) == (1, None, 0.5)
    assert view["pool_used_bytes"] > 0
    assert view["pool_bytes"] > view["pool_used_bytes"]
    [tier] = view["tiers"]
    assert (tier["name"], tier["chunks"], tier["state"]) == ("LocalCPUBackend", 4, "ok")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_worker_is_read_from_its_endpoint(run, engine, tmp_path, monkeypatch, kind):
    place = ("127.0.0.1", 0) if kind == "tcp" else tmp_path / "metrics"
    token = "a token of sixteen"
    endpoint = MetricsEndpoint(EndpointOptions(place, token), engine.metrics.exposition)
    try:
        listen = f"unix:{place}"
        url = listen
        if kind == "tcp":
            listen = ":".join(map(str, endpoint.place))
            url = f"http://{listen}/metrics"
        refused = run("--url", url, "--once")
        assert refused.exit_code == 2
        assert "401" in refused.stderr
        file = tmp_path / "kvkeep.yaml"
        file.write_text(f"metrics: {{listen: '{listen}', token: {token}}}")
        done = run("--url", url, "--config", str(file), "--once", "--json")
        assert json.loads(done.stdout)["hit_share_since_start"] == 0.5
        monkeypatch.setenv("KVKEEP_LOOKUP_SOCKET_DIR", str(tmp_path / "none"))
        done = run("--config", str(file), "--once", "--json")
        assert json.loads(done.stdout)["engine"] == url
    finally:
        endpoint.close()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "start vLLM with kvkeep"),
        (["--url", "http://127.0.0.1:9/metrics"], "does not answer"),
        (["--url", "unix:/no/such"], "does not answer"),
        (["--url", "ftp://x"], "write http://127.0.0.1:PORT/metrics"),
    ],
)
def test_where_nothing_runs_one_message_says_what_to_do(run, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    [message] = done.stderr.splitlines()
    assert words in message
    assert done.stdout == ""


def test_a_page_of_something_else_is_no_engine(run, tmp_path):
    endpoint = MetricsEndpoint(EndpointOptions(tmp_path / "other"), lambda: b"up 1.0\n")
    try:
        done = run("--url", f"unix:{tmp_path / 'other'}")
    finally:
        endpoint.close()
    assert "no metrics of kvkeep" in done.stderr


def test_a_terminal_is_drawn_again_and_ctrl_c_ends_it_cleanly(engine, tmp_path):
    """The real command in a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "40", "TERM": "xterm-256color"}
    environment["KVKEEP_LOOKUP_SOCKET_DIR"] = str(tmp_path)
    command = "import sys; sys.argv[0] = 'kvkeep'; from kvkeep.cli.main import app; app()"
    child = subprocess.Popen(
        [sys.executable, "-c", command, "top", "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    try:
        shown = read_until(ours, lambda text: text.count("hit rate") >= 3)
        child.send_signal(signal.SIGINT)
        shown += read_until(ours, lambda text: False)
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert "Traceback" not in shown
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def read_until(descriptor, is_enough, timeout_s=60.0):
    """What a terminal shows until it is enough or its other side is closed."""
    text, deadline = "", time.monotonic() + timeout_s
    while not is_enough(text) and time.monotonic() < deadline:
        if select.select([descriptor], [], [], 0.2)[0]:
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # closed
                break
            if not data:
                break
            text += data.decode("utf-8", "replace")
    return text
