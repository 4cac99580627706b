"""DirectoryConnector: files whole or not at all, whatever happens to the directory."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.base import Refusal
from kvkeep.backends.remote.directory import TEMP_AGE_S
from kvkeep.config.base import RemoteURL
from kvkeep.errors import BackendError, BackendTimeoutError, ConfigError
from kvkeep.testing.remote_stores import (
    OPTIONS,
    WAIT_S,
    TestingSink,
    bytes_of_value,
    random_value,
    read,
)

NAMES = [f"kvkeep-v1/test/{number:064x}" for number in range(6)]
VALUE = random_value(5000)


def connect(path, **options):
    return create_connector(RemoteURL.parse(f"file://{path}"), replace(OPTIONS, **options))


def file_of(path, name):
    folder, _, last = name.rpartition("/")
    return path / folder / last[:2] / f"{last}.kvv"


def files(path):
    return sorted(found for found in path.rglob("*") if found.is_file())


@pytest.fixture
def connector(tmp_path):
    return connect(tmp_path)


@pytest.mark.parametrize(
    "url",
    ["file://host/mnt", "file://", "file:///", "file:///mnt?x=1", "file://user:hush@localhost/mnt"],
)
def test_urls_that_are_wrong(url):
    """Fault 45."""
    with pytest.raises(ConfigError, match="file://") as caught:
        create_connector(RemoteURL.parse(url), OPTIONS)
    assert "hush" not in str(caught.value)


def test_where_files_are(connector, tmp_path):
    """One file per value, of the bytes of the value, for its owner only."""
    connector.put(NAMES[:1], [VALUE], WAIT_S)
    (file,) = files(tmp_path)
    assert file == file_of(tmp_path, NAMES[0])
    assert file.read_bytes() == bytes_of_value(VALUE)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a//b", "/a", "a/.", "a\0b", ""])
def test_no_name_leaves_the_directory(connector, name):
    """Fault 16."""
    for call in (
        lambda: connector.put([name], [VALUE], WAIT_S),
        lambda: connector.sizes([name], WAIT_S),
        lambda: connector.remove([name], WAIT_S),
    ):
        with pytest.raises(ValueError, match="no name"):
            call()


def test_the_directory_itself_is_never_made(tmp_path):
    """It may be a mount that is away: nothing is written where it would be."""
    connector = connect(tmp_path / "away")
    with pytest.raises(BackendError):
        connector.ping(WAIT_S)
    with pytest.raises(BackendError):
        connector.put(NAMES[:1], [VALUE], WAIT_S)
    assert connector.sizes(NAMES, WAIT_S) == [0] * 6
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_and_comes_back(tmp_path):
    root = tmp_path / "shared"
    root.mkdir()
    connector = connect(root)
    connector.put(NAMES, [VALUE] * 6, WAIT_S)
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(BackendError):
        connector.ping(WAIT_S)
    assert read(connector, NAMES) == [None] * 6
    (tmp_path / "elsewhere").rename(root)
    assert read(connector, NAMES) == [bytes_of_value(VALUE)] * 6


def test_files_that_others_remove(connector, tmp_path):
    """Somebody clears up by age while we read and write."""
    connector.put(NAMES, [VALUE] * 6, WAIT_S)
    file_of(tmp_path, NAMES[1]).unlink()
    for file in (tmp_path / "kvkeep-tmp").iterdir():
        file.unlink()
    (tmp_path / "kvkeep-tmp").rmdir()
    found = read(connector, NAMES)
    assert [data is not None for data in found] == [True, False, True, True, True, True]
    assert connector.put(NAMES[1:2], [VALUE], WAIT_S) == [None]
    assert connector.remove(NAMES, WAIT_S) == [True] * 6


def test_things_that_are_no_files(connector, tmp_path):
    """They are shown as impossible, refused, and removed."""
    connector.put(NAMES, [VALUE] * 6, WAIT_S)
    places = [file_of(tmp_path, name) for name in NAMES]
    for place in places[:4]:
        place.unlink()
    places[0].mkdir()
    places[1].symlink_to(places[5])
    os.mkfifo(places[2])
    places[3].symlink_to("/nowhere")
    assert connector.sizes(NAMES, WAIT_S) == [1, 1, 1, 1, 5000, 5000]
    sinks = [TestingSink() for _ in NAMES]
    connector.get(NAMES, sinks, WAIT_S)
    assert [sink.failure for sink in sinks] == ["not_a_file"] * 4 + [None] * 2
    assert connector.remove(NAMES[:4], WAIT_S) == [True] * 4
    assert read(connector, NAMES[4:]) == [bytes_of_value(VALUE)] * 2
    assert connector.put(NAMES[:4], [VALUE] * 4, WAIT_S) == [None] * 4


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (errno.ENOSPC, Refusal.FULL),
        (errno.EDQUOT, Refusal.FULL),
        (errno.EROFS, Refusal.READ_ONLY),
        (errno.EFBIG, Refusal.TOO_LARGE),
        (errno.EIO, None),
        (errno.ESTALE, None),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "rename", "close"])
def test_a_write_that_fails_leaves_nothing(connector, tmp_path, monkeypatch, call, code, refusal):
    """Also where a shared file system says so only when the file is closed."""
    real = getattr(os, call)

    def failing(*arguments):
        if call == "close":
            real(*arguments)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        if refusal is None:
            with pytest.raises(BackendError) as caught:
                connector.put(NAMES[:1], [VALUE], WAIT_S)
            assert isinstance(caught.value.__cause__, OSError)
        else:
            assert connector.put(NAMES[:1], [VALUE], WAIT_S) == [refusal]
    assert files(tmp_path) == []
    assert connector.sizes(NAMES[:1], WAIT_S) == [0]


@pytest.mark.parametrize("piece", [1, 255, 256, 257, 4000])
def test_short_reads_and_writes(connector, monkeypatch, piece):
    """The system may move less than it was asked to."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, part, offset: pwrite(fd, part[:piece], offset))
    monkeypatch.setattr(
        os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:piece]], offset)
    )
    value = random_value(1500)
    assert connector.put(NAMES[:1], [value], WAIT_S) == [None]
    assert read(connector, NAMES[:1]) == [bytes_of_value(value)]


def test_a_file_that_shrinks_while_it_is_read(connector, tmp_path):
    connector.put(NAMES[:1], [VALUE], WAIT_S)
    place = file_of(tmp_path, NAMES[0])

    class Cutting(TestingSink):
        def begin(self, header, size_bytes):
            os.truncate(place, 1000)
            return super().begin(header, size_bytes)

    sink = Cutting()
    connector.get(NAMES[:1], [sink], WAIT_S)
    assert (sink.is_finished, sink.failure) == (False, "truncated")


def test_readers_see_the_old_value_or_the_new_one(tmp_path):
    """Two machines write one name again and again; every read is one of both values, whole."""
    values = [random_value(300_000, 1), random_value(100_000, 2)]
    data = {bytes_of_value(value) for value in values}
    writers = [connect(tmp_path), connect(tmp_path)]
    writers[0].put(NAMES[:1], values[:1], WAIT_S)

    def write(number):
        for _ in range(40):
            writers[number].put(NAMES[:1], [values[number]], WAIT_S)

    with ThreadPoolExecutor(2) as threads:
        tasks = [threads.submit(write, number) for number in range(2)]
        reader = connect(tmp_path)
        while not all(task.done() for task in tasks):
            assert read(reader, NAMES[:1])[0] in data
        for task in tasks:
            task.result()
    assert len(files(tmp_path)) == 1


def test_what_dead_writers_left_is_removed_by_age(tmp_path):
    """The first put of a process looks for it."""
    (tmp_path / "kvkeep-tmp").mkdir()
    old, young, strange = (
        tmp_path / "kvkeep-tmp" / name for name in ("a-1.tmp", "b-1.tmp", "keep.txt")
    )
    for file in (old, young, strange):
        file.write_bytes(b"x")
    past = time.time() - TEMP_AGE_S - 60
    os.utime(old, (past, past))
    os.utime(strange, (past, past))
    connect(tmp_path).put(NAMES[:1], [VALUE], WAIT_S)
    assert [file.exists() for file in (old, young, strange)] == [False, True, True]


def test_a_time_to_live(tmp_path, connector):
    """Old files are no values, and go when they are met."""
    forgetful = connect(tmp_path, ttl_s=100.0)
    forgetful.put(NAMES[:2], [VALUE, VALUE], WAIT_S)
    past = time.time() - 200
    os.utime(file_of(tmp_path, NAMES[0]), (past, past))
    assert [data is not None for data in read(forgetful, NAMES[:2])] == [False, True]
    assert forgetful.sizes(NAMES[:2], WAIT_S) == [0, 5000]
    assert connector.sizes(NAMES[:2], WAIT_S) == [0, 5000]


def test_a_read_only_file_system_is_read(connector, monkeypatch):
    """Values come; puts are refused; removing is an error, since what is there stays."""
    connector.put(NAMES[:2], [VALUE, VALUE], WAIT_S)
    opened = os.open

    def read_only(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_(path, flags, *mode):
        return read_only() if flags & os.O_CREAT else opened(path, flags, *mode)

    for name in ("unlink", "rename", "mkdir"):
        monkeypatch.setattr(os, name, read_only)
    monkeypatch.setattr(os, "open", open_)
    assert read(connector, NAMES[:1]) == [bytes_of_value(VALUE)]
    assert connector.put(NAMES[2:3], [VALUE], WAIT_S) == [Refusal.READ_ONLY]
    with pytest.raises(BackendError):
        connector.remove(NAMES[:1], WAIT_S)
    assert read(connector, NAMES[:1]) == [bytes_of_value(VALUE)]


def test_deadlines_between_pieces(connector):
    """Fault 34, as far as system calls allow: a call that is late stops."""
    connector.put(NAMES, [VALUE] * 6, WAIT_S)
    for call in (
        lambda: connector.sizes(NAMES, -1),
        lambda: connector.put(NAMES, [VALUE] * 6, -1),
        lambda: connector.get(NAMES, [TestingSink() for _ in NAMES], -1),
        lambda: connector.remove(NAMES, -1),
    ):
        with pytest.raises(BackendTimeoutError):
            call()
    assert read(connector, NAMES) == [bytes_of_value(VALUE)] * 6
