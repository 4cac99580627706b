"""What a worker shows of itself: what the settings ask for, for as long as it runs."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import trustme
from opentelemetry import trace

from kvkeep.backends.reference import DictBackend
from kvkeep.config import load_settings
from kvkeep.config.explain import HIDDEN, explain
from kvkeep.config.load import resolve_settings
from kvkeep.engine.build import CacheManager, observe
from kvkeep.errors import ConfigError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.logs import LOGGERS, json_logs
from kvkeep.memory.placement import WorkerPlace
from kvkeep.metrics import Metrics
from kvkeep.metrics.spans import NO_SPANS
from kvkeep.testing.faulty import Fault, FaultKind, FaultyBackend
from support.engine_rig import EngineRig
from support.paged_engine import PagedEngine
from support.servers import process

SECRET = "a-secret-of-length"


def free_port(count: int = 1) -> int:
    """The first of ``count`` ports in a row that are free now."""
    return process.free_port(also_above=count - 1)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode()


def make_manager(extra: dict[str, object], place=None) -> CacheManager:
    model = PagedEngine(num_pages=16, num_layers=2)
    settings = load_settings(
        extra={"chunk_size": 8, "cpu.size": "8MiB", "cpu.prefault": "0B", **extra}
    )
    connector = PagedGPUConnector(model.layout)
    connector.register_kv_caches(model.caches)
    identity = CacheIdentity("observed", "1", model.layout, chunk_size=8)
    return CacheManager.create(settings, identity, connector, place=place or WorkerPlace())


def test_the_manager_serves_its_metrics_until_it_is_closed():
    port = free_port()
    with make_manager({"metrics.listen": f"127.0.0.1:{port}"}) as manager:
        assert "kvkeep_lookup_tokens_total 0.0" in scrape(port)
        manager.engine.lookup(range(24))
        assert "kvkeep_lookup_tokens_total 24.0" in scrape(port)
    with pytest.raises(OSError):
        scrape(port)


def test_nothing_listens_unasked(monkeypatch):
    """Fault 48: without the setting there is no socket at all."""

    def refuse(*args: object) -> None:
        raise AssertionError("something listens")

    monkeypatch.setattr(socket.socket, "listen", refuse)
    with make_manager({}) as manager:
        assert manager.engine.lookup(range(24)) == 0


def test_each_rank_has_a_port_of_its_own():
    port = free_port(2)
    places = [WorkerPlace(rank=rank, num_ranks=2) for rank in range(2)]
    extra = {"metrics.listen": f"127.0.0.1:{port}"}
    with make_manager(extra, places[0]) as first, make_manager(extra, places[1]):
        first.engine.lookup(range(24))
        assert "kvkeep_lookup_tokens_total 24.0" in scrape(port)
        assert "kvkeep_lookup_tokens_total 0.0" in scrape(port + 1)


def test_a_port_that_is_taken_costs_the_endpoint_and_not_the_cache(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with make_manager({"metrics.listen": f"127.0.0.1:{port}"}) as manager:
            assert manager.engine.lookup(range(24)) == 0
            name = 'kvkeep_failures_total{tier="metrics",operation="listen",cause="OSError"}'
            assert manager.metrics.snapshot()[name] == 1
    assert "nothing listens for rank 0" in caplog.text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"metrics.listen": "9440"}, r"metrics\.listen = '9440'.*127\.0\.0\.1:PORT"),
        ({"metrics.listen": "127.0.0.1:99999"}, "127.0.0.1:PORT"),
        ({"metrics.listen": "example.com:9440"}, "127.0.0.1:PORT"),
        ({"metrics.listen": "300.0.0.1:9440"}, "300.0.0.1"),
        ({"metrics.listen": "unix:metrics.sock"}, "absolute"),
        ({"metrics.listen": "unix:/" + "x" * 200}, "at most 100 bytes"),
        ({"metrics.token": SECRET}, "no effect without metrics.listen"),
        ({"metrics.listen": "127.0.0.1:1", "metrics.token": "short"}, r"metrics\.token .*16"),
        ({"metrics.listen": "127.0.0.1:1", "metrics.tls_key": "/k"}, "need each other"),
        (
            {"metrics.listen": "unix:/m", "metrics.tls_key": "/k", "metrics.tls_cert": "/c"},
            "no effect on a Unix socket",
        ),
    ],
)
def test_wrong_settings_are_told(extra, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(extra=extra)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("address", ["0.0.0.0:9440", "[::]:9440", "192.168.1.2:9440"])
def test_other_machines_need_token_and_tls(address):
    """Fault 48: an address that others reach is refused without a token and TLS."""
    tls = {"metrics.tls_cert": "/c", "metrics.tls_key": "/k"}
    for extra in ({}, {"metrics.token": SECRET}, tls):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            load_settings(extra={"metrics.listen": address, **extra})
    load_settings(extra={"metrics.listen": address, "metrics.token": SECRET, **tls})
    for local in ("127.0.0.1:1", "[::1]:1", "localhost:1", "127.8.8.8:1", "unix:/run/m.sock"):
        load_settings(extra={"metrics.listen": local})


def test_token_and_certificate_reach_the_endpoint(tmp_path):
    issued = (authority := trustme.CA()).issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    port = free_port()
    extra = {
        "metrics.listen": f"127.0.0.1:{port}",
        "metrics.token": SECRET,
        "metrics.tls_cert": str(cert),
        "metrics.tls_key": str(key),
    }
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    ask = urllib.request.Request(f"https://127.0.0.1:{port}/metrics")
    with make_manager(extra):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(ask, timeout=30, context=trusting)
        ask.add_header("Authorization", f"Bearer {SECRET}")
        with urllib.request.urlopen(ask, timeout=30, context=trusting) as answer:
            assert b"kvkeep_lookup_tokens_total" in answer.read()


def test_spans_are_made_where_the_settings_ask_for_them(monkeypatch):
    asked = []

    def get_tracer(name: str) -> trace.Tracer:
        asked.append(name)
        return trace.NoOpTracer()

    monkeypatch.setattr(trace, "get_tracer", get_tracer)
    with make_manager({}) as manager:
        assert manager.metrics.spans is NO_SPANS
    with make_manager({"tracing.spans": True}) as manager:
        assert manager.engine.lookup(range(24)) == 0
        assert manager.metrics.spans is not NO_SPANS
    assert asked == ["kvkeep"]


def test_the_token_is_shown_nowhere(caplog):
    """Fault 48: secrets stand in no message, explanation or representation."""
    caplog.set_level(logging.DEBUG)
    extra = {"metrics.listen": f"127.0.0.1:{free_port()}", "metrics.token": SECRET}
    loaded = resolve_settings(extra=extra)
    assert SECRET not in repr(loaded.settings) + str(loaded)
    shown = {setting.name: setting for setting in explain(loaded)}
    assert shown["metrics.token"].value == shown["metrics.token"].text == HIDDEN
    with make_manager(extra) as manager:
        assert SECRET not in manager.metrics.exposition().decode()
    assert SECRET not in caplog.text
    unset = {setting.name: setting for setting in explain(resolve_settings())}
    assert unset["metrics.token"].text == "unset"


def test_json_logs_are_one_object_per_line(capsys):
    settings = load_settings(extra={"log.format": "json"})
    with observe(settings, WorkerPlace(), Metrics()):
        log = logging.getLogger("kvkeep.somewhere")
        log.info("stored %d tokens\nof one", 5, extra={"request": "r-1"})
        try:
            raise OSError("gone")
        except OSError:
            logging.getLogger("vllm.kvkeep.connectors").exception("a load failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["stored 5 tokens\nof one", "a load failed"]
    assert lines[0]["level"] == "info"
    assert lines[0]["logger"] == "kvkeep.somewhere"
    assert lines[0]["request"] == "r-1"
    assert lines[0]["time"].endswith("Z")
    assert "OSError: gone" in lines[1]["exception"]


def test_a_failure_says_in_fields_what_it_was(capsys):
    def broken(pool: object) -> FaultyBackend:
        return FaultyBackend(DictBackend(pool), [Fault("contains", FaultKind.RAISE)])

    with json_logs(), EngineRig(tiers=[broken]) as rig:
        assert rig.engine.lookup(range(24)) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {name: line[name] for name in ("level", "tier", "operation", "cause")} == {
        "level": "warning",
        "tier": "DictBackend",
        "operation": "contains",
        "cause": "BackendError",
    }


def test_the_log_is_left_alone_otherwise_and_afterwards(capsys):
    """Fault 49: without the setting nothing of the process's logging is touched."""

    def state() -> list[tuple]:
        loggers = [logging.getLogger(name) for name in LOGGERS]
        return [(list(log.handlers), log.propagate, log.level) for log in loggers]

    before = state()
    with observe(load_settings(), WorkerPlace(), Metrics()):
        assert state() == before
    with json_logs(), json_logs():
        assert state() != before
    assert state() == before
    assert capsys.readouterr().err == ""


def test_a_socket_path_with_ranks(tmp_path):
    path = Path(tmp_path) / "m.sock"
    extra = {"metrics.listen": f"unix:{path}"}
    with make_manager(extra), make_manager(extra, WorkerPlace(rank=1, num_ranks=2)):
        assert sorted(item.name for item in tmp_path.iterdir()) == ["m.sock", "m.sock.1"]
    assert list(tmp_path.iterdir()) == []
