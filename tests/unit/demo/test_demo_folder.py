"""The folder of the demo's disk tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkeep.config import load_settings
from kvkeep.demo.model import (
    LARGE_TEMPORARY,
    disk_folder,
    disk_settings,
    leave_page_cache,
    temporary_parent,
)
from kvkeep.errors import ConfigError


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_temporary_folder_is_removed_whatever_happens(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(error), disk_folder(None) as folder:
        (folder / "chunks").mkdir()
        (folder / "chunks" / "a.kvc").touch()
        assert folder.parent == tmp_path
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_given_folder_is_made_and_kept(tmp_path: Path) -> None:
    with disk_folder(tmp_path / "a" / "b") as folder:
        assert folder == tmp_path / "a" / "b"
    assert folder.is_dir()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot use"),
        disk_folder(tmp_path / "file" / "below"),
    ):
        raise AssertionError


def test_temporary_folders_are_on_a_disk_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/somewhere")
    assert temporary_parent({"TMPDIR": "/somewhere"}) == Path("/somewhere")
    expected = LARGE_TEMPORARY if os.access(LARGE_TEMPORARY, os.W_OK) else Path("/somewhere")
    assert temporary_parent({}) == expected


def test_the_settings_switch_the_disk_tier_on(tmp_path: Path) -> None:
    settings = load_settings(env={}, extra=disk_settings(str(tmp_path)))
    assert settings.disk.path == tmp_path
    assert settings.lookup.timeout == 10.0


def test_chunks_are_the_same_after_they_left_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "aa" / "a.kvc"
    file.parent.mkdir()
    content = os.urandom(1 << 16)
    file.write_bytes(content)
    leave_page_cache(tmp_path)
    assert file.read_bytes() == content
