"""A real Prometheus: its linter passes, it scrapes the endpoint, and the dashboard has its data."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.metrics import Metrics
from kvkeep.metrics.catalogue import CATALOGUE, Kind
from kvkeep.metrics.endpoint import EndpointOptions, MetricsEndpoint
from support.servers.process import ServerProcess, find_program, free_port

DASHBOARD = json.loads((Path(__file__).parents[2] / "dashboards" / "kvkeep.json").read_text())
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
LABELS = {
    "tier": "LocalCPUBackend",
    "direction": "load",
    "state": "used",
    "operation": "get",
    "cause": "timeout",
    "outcome": "done",
}
LONG_S = 60.0
#: Scrapes between which a rate can be seen.
SCRAPE_S = 0.25


def move_all(metrics: Metrics) -> None:
    """One move of every metric."""
    for name, spec in CATALOGUE.items():
        labels = tuple(LABELS[label] for label in spec.labels)
        if spec.kind is Kind.COUNTER:
            metrics._add(name, 5, *labels)
        elif spec.kind is Kind.HISTOGRAM:
            metrics._observe(name, 0.5, *labels)
        else:
            metrics._watch(name, lambda: 3.0, *labels)


def test_promtool_finds_nothing_to_say():
    """Of the names, helps and types of every metric, moved and not."""
    for is_moved in (False, True):
        metrics = Metrics()
        if is_moved:
            move_all(metrics)
        done = subprocess.run(
            [find_program("promtool"), "check", "metrics"],
            input=metrics.exposition(),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, b"")


class Prometheus:
    """A server that scrapes one endpoint."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expr: str) -> list[dict]:
        """The series that an instant query has; an error of the server is one here."""
        address = f"{self._url}/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            data = json.load(answer)
        assert data["status"] == "success"
        return data["data"]["result"]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory) -> Iterator[Prometheus]:
    """A Prometheus that has seen every metric move twice."""
    folder = tmp_path_factory.mktemp("prometheus")
    metrics = Metrics()
    move_all(metrics)
    endpoint = MetricsEndpoint(EndpointOptions(("127.0.0.1", 0)), metrics.exposition)
    host, port = endpoint.place
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {SCRAPE_S * 1000:.0f}ms, scrape_timeout: 200ms}}\n"
        "scrape_configs:\n"
        "  - job_name: kvkeep\n"
        f'    static_configs: [{{targets: ["{host}:{port}"]}}]\n'
    )
    own = free_port()
    command = [
        find_program("prometheus"),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    server = ServerProcess("prometheus", command, lambda: is_ready(own), folder=folder)
    with server:
        prometheus = Prometheus(own)
        deadline = time.monotonic() + LONG_S
        wanted = 0
        for _ in range(2):  # a rate needs two values
            wanted += 2
            while int(value_of(prometheus.query("count_over_time(up[5m])"))) < wanted:
                assert time.monotonic() < deadline
                time.sleep(SCRAPE_S)
            move_all(metrics)
        while value_of(prometheus.query("kvkeep_lookup_tokens_total")) < 15:
            assert time.monotonic() < deadline
            time.sleep(SCRAPE_S)
        yield prometheus
    endpoint.close()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=10):
            return True
    except OSError:
        return False


def value_of(result: list[dict]) -> float:
    return float(result[0]["value"][1]) if result else 0.0


def test_it_is_scraped(scraped):
    assert value_of(scraped.query('up{job="kvkeep"}')) == 1
    names = {row["metric"]["__name__"] for row in scraped.query('{__name__=~"kvkeep_.+"}')}
    for spec in CATALOGUE.values():
        assert spec.exposed_name in names or f"{spec.name}_sum" in names, spec.name


@pytest.mark.parametrize("name", QUERIES)
def test_every_panel_shows_data(scraped, name):
    expr = QUERIES[name].replace("${prefix}", "kvkeep_").replace("$__rate_interval", "1m")
    result = scraped.query(expr.replace("$instance", ".*"))
    assert result, name
    assert all(row["value"][1] != "NaN" for row in result)


def test_the_hit_rate_of_the_documents(scraped):
    """docs/metrics.md's own query, of 5 found of 5 + 5 + ... asked."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if line.startswith("    sum(rate(")]
    assert value_of(scraped.query(line)) == pytest.approx(1.0)
