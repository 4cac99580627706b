"""Building the compiled copies: what is made, and that an installation does without."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from kvkeep.gpu.host_copy import RowCopier, load_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture
def build_rows():
    """The script as a module."""
    path = ROOT / "scripts" / "build_rows.py"
    spec = importlib.util.spec_from_file_location("build_rows", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_compiler(build_rows) -> bool:
    try:
        return bool(build_rows.compiler())
    except build_rows.BuildError:
        return False


def test_where_a_compiler_is_the_copies_are_compiled(build_rows, tmp_path) -> None:
    assert (load_rows() is not None) == has_compiler(build_rows)
    if has_compiler(build_rows):
        library = tmp_path / "rows.so"
        build_rows.build(library)
        assert list(tmp_path.iterdir()) == [library]
        RowCopier(library)


def test_without_a_compiler_the_script_says_so(build_rows, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build_rows.main() == 1
    assert "there is no C compiler (cc, gcc or clang)" in capsys.readouterr().err
    monkeypatch.setenv("CC", "tcc -b")
    assert build_rows.main() == 1
    assert "there is no C compiler (tcc -b)" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["exit 1", "echo no such header >&2; exit 1"])
def test_a_compiler_that_fails_leaves_nothing(
    build_rows, monkeypatch, tmp_path, capsys, code: str
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{code}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    before = build_rows.LIBRARY.stat().st_mtime_ns if build_rows.LIBRARY.exists() else None
    assert build_rows.main() == 1
    assert "failed" in capsys.readouterr().err
    after = build_rows.LIBRARY.stat().st_mtime_ns if build_rows.LIBRARY.exists() else None
    assert before == after


@pytest.mark.parametrize("works", [True, False])
def test_a_wheel_has_them_or_is_pure(build_rows, monkeypatch, tmp_path, works: bool) -> None:
    if not works:
        monkeypatch.setenv("CC", "false")
    [path] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if "_rows." in name]
    is_compiled = works and has_compiler(build_rows)
    assert path.endswith("-py3-none-any.whl") != is_compiled
    assert ("kvkeep/gpu/_rows.native.so" in names) == is_compiled
    assert "kvkeep/gpu/_rows.c" in names
