"""The benchmark of vLLM drives engines; here their processes are a few lines that answer alike."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path

import psutil
import pytest

from kvkeep.testing.chunks import wait_until

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
#: Answers with the sum of each prompt; ends with an error when a prompt begins with 666.
SERVER = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    if not line.strip():
        break
    prompts = json.loads(line)["prompts"]
    if prompts[0][0] == 666:
        sys.exit("no room left")
    answer = {"total_s": 0.002, "tokens": [[sum(prompt)] for prompt in prompts]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The benchmark, its engines replaced."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("vllm_engines", "bench_vllm"):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    monkeypatch.setattr(sys.modules["vllm_engines"], "SERVER", server)
    return sys.modules["bench_vllm"]


@pytest.fixture
def engine(bench, tmp_path):
    """Starts engines, and ends them."""
    started = []

    def start(name: str):
        started.append(bench.Engine(name, None, model=tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()
        assert one._process.poll() is not None


def test_all_engines_but_the_one_that_is_asked_are_stopped(bench, engine) -> None:
    first, second = engine("first"), engine("second")
    engines = bench.Engines(first, second)
    for asked, other in ((first, second), (second, first), (first, second)):
        assert engines.ask(asked, [[1, 2], [3]]).tokens == [[3], [3]]
        process = psutil.Process(other._process.pid)
        wait_until(lambda process=process: process.status() == psutil.STATUS_STOPPED)


def test_an_engine_that_ends_is_an_error_with_its_last_words(bench, engine) -> None:
    one = engine("one")
    with pytest.raises(bench.EngineError, match="no room left"):
        one.ask([[666]])
    with pytest.raises(bench.EngineError):
        one.ask([[1]])


def test_another_token_than_before_is_an_error(bench, engine) -> None:
    one = engine("one")
    engines = bench.Engines(one)
    timing = bench.Timing([1, 2])
    timing.ask("cold", engines, one)
    timing.ask("memory", engines, one)
    assert timing.median("memory") == 2.0
    timing.token = 4
    with pytest.raises(bench.WrongTokenError, match="3 after 2 tokens, not 4"):
        timing.ask("memory", engines, one)


def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on(bench, engine) -> None:
    peer, ours = engine("peer"), engine("ours")
    engines = bench.Engines(peer, ours)
    kept: list[int] = []
    report = bench.Report(lambda rows: kept.append(len(rows)))
    left = bench.Peer(peer)
    for prompt in ([1], [666]):
        left.ask(report, bench.Timing(prompt), "peer", engines)
    assert left.engine is None
    left.ask(report, bench.Timing([1]), "peer", engines)
    timing = bench.Timing([5])
    for name in ("cold", "memory", "memory"):
        timing.ask(name, engines, ours)
    bench.against_reference(report, 1024, [timing], "memory")
    assert kept == [], "nothing to hold it against"
    bench.against_reference(report, 4096, [timing], "memory")
    assert kept == [1]
    assert report.rows[0].what.endswith("as quoted")


def test_a_part_whose_engine_fails_keeps_the_rows_that_it_has(bench, engine) -> None:
    kept: list[int] = []
    report = bench.Report(lambda rows: kept.append(len(rows)))
    with report.part("a part"):
        report.add(bench.paired_row("a row", [(1.0, 2.0), (3.0, 4.0)], 1.0))
        engine("one").ask([[666]])
    assert kept == [1]


def test_the_interval_holds_the_median(bench) -> None:
    ratios = [1.0, 1.1, 0.9, 1.02, 0.98, 1.01, 1.3]
    low, high = bench.interval(ratios)
    assert min(ratios) <= low <= statistics.median(ratios) <= high <= max(ratios)
    assert bench.interval([1.0] * 5) == (1.0, 1.0)
