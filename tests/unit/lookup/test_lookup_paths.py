"""Where the lookup sockets are, and who may enter there."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from kvkeep.errors import LookupServiceError
from kvkeep.lookup.sockets import (
    MAX_PATH_BYTES,
    check_private,
    make_private,
    remove_stale_sockets,
    socket_directory,
    socket_path,
)


def test_directory_is_the_given_one_then_the_runtime_one_then_the_temporary_one(tmp_path):
    mine = f"kvkeep-{os.getuid()}"
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert socket_directory(Path("/srv"), env) == Path("/srv") / mine
    assert socket_directory(None, env) == tmp_path / mine
    missing = {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}
    assert socket_directory(None, missing) == socket_directory(None, {})


def test_paths_differ_by_engine_and_rank(tmp_path):
    paths = {socket_path(tmp_path, engine, rank) for engine in ("a", "a_dp1") for rank in (0, 1)}
    assert len(paths) == 4


def test_a_long_engine_name_makes_no_long_path():
    assert len(str(socket_path(Path("/tmp"), "e" * 500, 12))) < 40


def test_too_long_a_directory_is_an_error():
    with pytest.raises(LookupServiceError, match=r"lookup\.socket_dir"):
        socket_path(Path("/" + "d" * MAX_PATH_BYTES), "engine", 0)


def test_made_for_its_owner_alone(tmp_path):
    directory = tmp_path / "a" / "b"
    make_private(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    make_private(directory)


def test_others_may_not_enter(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir(mode=0o700)
    directory.chmod(0o750)
    with pytest.raises(LookupServiceError, match="0700"):
        make_private(directory)


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(LookupServiceError, match="0700"):
        make_private(tmp_path / "link")


def test_a_file_or_nothing_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LookupServiceError):
        make_private(tmp_path / "file")
    with pytest.raises(LookupServiceError, match="no socket directory"):
        check_private(tmp_path / "missing")


def test_sockets_that_killed_workers_left_are_removed(tmp_path):
    names = ("dead-0.sock", "dead.ranks", "alive-0.sock", "young-0.sock", "dead-0.txt")
    sockets = {}
    for name in names:
        sockets[name] = socket.socket(socket.AF_UNIX)
        sockets[name].bind(str(tmp_path / name))
        sockets[name].listen(1)
    for name in names[:3]:
        os.utime(tmp_path / name, (time.time() - 100,) * 2)
    for name in ("dead-0.sock", "dead.ranks", "young-0.sock", "dead-0.txt"):
        sockets[name].close()
    assert remove_stale_sockets(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[2:])
    sockets["alive-0.sock"].close()
