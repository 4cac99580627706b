"""The benchmark scripts run and say what they measured; never how fast it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvkeep.bench.engine import DENSE, CopyCase, Memcpy, run_cases
from kvkeep.bench.measure import Row, save

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A script of benchmarks/ as a module."""

    def load_script(name: str):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load_script


def test_figures_become_tables(load, tmp_path) -> None:
    table = load("table")
    rows = [Row("load", 12.0, 13.5, "GB/s", 0.889, 0.85), Row("keys", 1.5, 1.0, "ms", 1.5, 1.3)]
    save(rows, tmp_path, "copies.json")
    save([Row("memory", 540, 1024, "B", 0.53, None)], tmp_path, "scale.json")
    text = table.figures(tmp_path)
    assert "| load | 12.00 GB/s | 13.50 GB/s | 0.89 | ≥ 0.85 | yes |" in text
    assert "| keys | 1.50 ms | 1.00 ms | 1.50 | ≤ 1.30 | no |" in text
    assert "| memory | 540.00 B | 1,024.00 B | 0.53 |  |  |" in text
    assert text.index("### Copies") < text.index("### Growth")
    assert text.count("python") == 1  # one machine, said once


def test_only_what_stands_between_the_markers_is_replaced(load, tmp_path, monkeypatch) -> None:
    table = load("table")
    save([Row("load", 1, 1, "GB/s", 1, None)], tmp_path, "copies.json")
    document = tmp_path / "page.md"
    document.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "DOCUMENT", document)
    for _ in range(2):
        table.main()
        text = document.read_text()
        assert text.startswith(f"before\n{table.BEGIN}\n")
        assert text.endswith(f"{table.END}\nafter\n")
        assert "| load |" in text
        assert "old" not in text


def test_growth_is_measured_beside_pinned_chunks_and_threads(load, tmp_path, monkeypatch) -> None:
    disk = load("scale_disk")
    monkeypatch.setattr(disk, "STARTS", 2)
    starts = disk.rows(tmp_path, 100)
    assert [row.unit for row in starts] == ["s", "us", "B"]
    scale = load("scale")
    monkeypatch.setattr(scale, "BATCHES", 2)
    monkeypatch.setattr(scale, "ROUNDS", 4)
    monkeypatch.setattr(scale, "THREADS", 4)
    found = scale.measure([2048, 4096], "reuse")
    assert [one.chunks for one in found] == [2048, 4096]
    rows = scale.rows_of(found)
    assert len(rows) == 10
    assert all(row.kvkeep > 0 for row in rows if row.unit == "us")
    assert "4,096 chunks / 2,048" in rows[0].what


@pytest.mark.parametrize("page_size", [16, DENSE])
def test_every_way_to_copy_is_measured(monkeypatch, page_size: int) -> None:
    monkeypatch.setattr("kvkeep.bench.engine.NUM_LAYERS", 2)
    case = CopyCase(512, page_size, "float8_e4m3fn", threads=2)
    rows = run_cases(1, [case])
    assert [row.what.split(",")[0] for row in rows] == [
        "store",
        "load",
        "store layerwise",
        "load layerwise",
    ]
    assert all(row.what.endswith("fp8, 2 threads") for row in rows)


def test_the_limit_copies_all_bytes_with_any_number_of_threads() -> None:
    for threads in (1, 3):
        limit = Memcpy(1001, threads)
        limit._from[:] = 7
        limit()
        assert (limit._to == 7).all()


def test_the_sections_of_a_run_have_titles(load) -> None:
    assert list(load("run").SECTIONS) == list(load("table").TITLES)
