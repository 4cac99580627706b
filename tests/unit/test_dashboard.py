"""The Grafana dashboard asks only for metrics that are there, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from promql_parser import (
    AggregateExpr,
    BinaryExpr,
    Call,
    MatrixSelector,
    ParenExpr,
    VectorSelector,
)

from kvkeep.metrics.catalogue import CATALOGUE, Kind

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "dashboards" / "kvkeep.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]
#: Labels that Prometheus adds.
SCRAPED = {"instance", "job"}


def exposed_series() -> dict[str, set[str]]:
    """Every series by its name, and its labels."""
    series = {}
    for spec in CATALOGUE.values():
        names = {spec.exposed_name}
        if spec.kind is Kind.HISTOGRAM:
            names = {f"{spec.name}_{end}" for end in ("bucket", "sum", "count")}
        for name in names:
            series[name] = {*spec.labels, *SCRAPED} | (
                {"le"} if name.endswith("_bucket") else set()
            )
    return series


def with_variables(expr: str, prefix: str = "kvkeep_") -> str:
    """A query as Grafana sends it."""
    text = expr.replace("${prefix}", prefix).replace("$__rate_interval", "1m")
    return text.replace("$instance", ".*")


def grouped_by(expr: str) -> set[str]:
    """The labels that are left by the aggregations of a query."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expr))))


def selectors(node: object) -> list[VectorSelector]:
    """Every selector in a query."""
    if isinstance(node, VectorSelector):
        return [node]
    if isinstance(node, MatrixSelector):
        return selectors(node.vector_selector)
    if isinstance(node, ParenExpr | AggregateExpr):
        return selectors(node.expr)
    if isinstance(node, BinaryExpr):
        return selectors(node.lhs) + selectors(node.rhs)
    if isinstance(node, Call):
        return [found for arg in node.args for found in selectors(arg)]
    return []


@pytest.mark.parametrize("expr", QUERIES)
@pytest.mark.parametrize("prefix", ["kvkeep_", "vllm:kvkeep_"])
def test_a_query_names_metrics_and_labels_that_exist(expr, prefix):
    found = selectors(promql_parser.parse(with_variables(expr, prefix)))
    assert found
    series = exposed_series()
    for selector in found:
        name = selector.name.replace("vllm:", "", 1)
        assert name in series, name
        for matcher in selector.matchers.matchers:
            assert matcher.name in series[name], (name, matcher.name)
    known = set.union(*(series[s.name.replace("vllm:", "", 1)] for s in found))
    assert grouped_by(expr) <= known


def test_every_metric_is_shown():
    """A metric that nobody can see on the dashboard is one that nobody looks at."""
    text = " ".join(with_variables(query.values[0]) for query in QUERIES)
    assert [name for name in CATALOGUE if not re.search(rf"\b{name}(_|\b)", text)] == []


def test_legends_name_labels_that_their_query_has():
    for panel in PANELS:
        for target in panel["targets"]:
            grouped = set(
                re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"])))
            )
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= grouped, panel["title"]


def test_panels_stand_in_a_grid_and_say_what_they_show():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert all(panel["description"].endswith(".") for panel in PANELS)


def test_it_can_be_loaded_into_any_grafana():
    """Nothing in it belongs to one installation: no id, no data source but the variable."""
    assert DASHBOARD.get("id") is None
    assert DASHBOARD["uid"] == "kvkeep"
    sources = set(re.findall(r'"uid": "([^"]+)"', json.dumps(DASHBOARD["panels"])))
    assert sources == {"${datasource}"}
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(PANELS)))
    assert used - {"__rate_interval"} <= names


def lost_paths(written: object, read: object, path: str = "") -> list[str]:
    """Where ``read`` lacks or changes something of ``written``."""
    if isinstance(written, dict) and isinstance(read, dict):
        parts = [(f"{path}/{key}", value, read.get(key)) for key, value in written.items()]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        parts = [
            (f"{path}/{index}", *pair) for index, pair in enumerate(zip(written, read, strict=True))
        ]
    else:
        return [] if written == read else [path]
    return [lost for name, mine, its in parts for lost in lost_paths(mine, its, name)]


def test_it_loads_with_grafanas_own_types() -> None:
    """Nothing is lost on the way through them but what only an import or an editor looks at."""
    register_default_plugins()
    loaded = Dashboard.from_json(DASHBOARD)
    assert loaded.title == DASHBOARD["title"]
    lost = lost_paths(DASHBOARD, json.loads(JSONEncoder().encode(loaded)))
    assert {re.sub("/[0-9]+/", "/*/", path) for path in lost} == {
        "/__inputs",
        "/__requires",
        "/templating/list/*/definition",
    }
