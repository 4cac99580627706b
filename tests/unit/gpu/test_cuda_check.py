"""benchmarks/cuda_check.py on the CPU: the same steps, and what it says when bytes are wrong."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import typer

from kvkeep.gpu.device import DeviceCopier

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cuda_check.py"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch):
    """The script as a module that measures once."""
    spec = importlib.util.spec_from_file_location("cuda_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cuda_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROUNDS", 1)
    return module


def test_everything_is_right_on_the_cpu(script, capsys) -> None:
    assert script.run(CPU, layers=2, tokens=256) == script.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("  every bit is right") == 5
    assert sum("of the plain copy" in line for line in lines) == 20


def test_pages_that_are_not_loaded_are_found(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(DeviceCopier, "scatter", lambda *arguments: None)
    with pytest.raises(Exception, match="self-test"):
        script.run(CPU, layers=2, tokens=256)  # refused before anything is stored


@pytest.mark.parametrize("wrong", ["a page", "beside"])
def test_wrong_bytes_are_named(script, monkeypatch, capsys, wrong: str) -> None:
    scatter = DeviceCopier.scatter

    def damaging(copier, rows, layers, plan, after) -> None:
        scatter(copier, rows, layers, plan, after)
        if sum(len(batch.index) for batch in plan.batches) > 3:  # not in the self-test
            used = plan.batches[0].index.tolist()
            page = used[1] if wrong == "a page" else min(set(range(len(rows[1]))) - set(used))
            rows[1][page, 5] ^= 1

    monkeypatch.setattr(DeviceCopier, "scatter", damaging)
    assert script.run(CPU, layers=2, tokens=256) == script.WRONG
    said = capsys.readouterr().out
    assert "tensor 1 differs in 1 pages" in said


def test_without_a_gpu_it_says_so(script, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.Exit) as left:
        script.main(device="cuda", layers=2, tokens=256)
    assert left.value.exit_code == script.NO_CUDA
    assert "no CUDA device" in capsys.readouterr().out
