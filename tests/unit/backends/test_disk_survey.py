"""Looking at a cache directory from outside: it finds all damage, and changes nothing unasked."""

from __future__ import annotations

import os
import shutil

import pytest

from kvkeep.backends.base import PutOutcome
from kvkeep.backends.disk.catalog import FoundChunk
from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.disk.inspect import Damage, Inspector, summarize
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, writer_digest
from kvkeep.errors import ConfigError
from kvkeep.testing.chunks import CHUNK_BYTES, check_found, make_keys, make_pool, put
from support.disk import IDENTITY, FaultyIO, chunk_path, file_bytes, make_disk

KEYS = make_keys(4)
KEY, OTHER = KEYS[:2]


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()


@pytest.fixture
def filled(pool, tmp_path):
    """A directory with four chunks, in which no engine is open."""
    disk = make_disk(pool, tmp_path)
    assert put(disk, pool, KEYS) == [PutOutcome.STORED] * 4
    disk.close()
    pool.clear()
    return tmp_path


def content(path):
    """Every name with its bytes and time of change."""
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in path.rglob("*")
        if file.is_file()
    }


def damages_of(path, **options):
    return [item for item in Inspector(path, **options).verify() if isinstance(item, Damage)]


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def append(path):
    path.write_bytes(path.read_bytes() + b"x")


def make_directory(path):
    path.unlink()
    path.mkdir()


def make_link(path):
    path.unlink()
    path.symlink_to("/etc/hostname")


DAMAGE = {
    FrameFault.TRUNCATED: lambda path: os.truncate(path, HEADER_BYTES + CHUNK_BYTES - 1),
    FrameFault.LENGTH: append,
    FrameFault.MAGIC: lambda path: flip(path, 0),
    FrameFault.VERSION: lambda path: flip(path, 8),
    FrameFault.HEADER_CHECKSUM: lambda path: flip(path, 40),
    FrameFault.PAYLOAD_CHECKSUM: lambda path: flip(path, HEADER_BYTES + CHUNK_BYTES - 1),
    FrameFault.WRONG_KEY: lambda path: shutil.copy(chunk_path(path.parents[3], OTHER), path),
}


def test_whole_chunks_are_found_and_nothing_changes(filled):
    before = content(filled)
    items = list(Inspector(filled).verify())
    assert items[0] is None, "the ledger verifies"
    assert {item.header.key for item in items[1:]} == set(KEYS)
    assert all(isinstance(item, FoundChunk) for item in items[1:])
    assert content(filled) == before


def test_short_reads_are_finished(filled):
    assert damages_of(filled, io=FaultyIO(piece=7)) == []


@pytest.mark.parametrize("cause", DAMAGE)
def test_damage_is_told_by_cause_and_repaired_only_if_asked(cause, filled, pool):
    DAMAGE[cause](chunk_path(filled, KEY))
    before = content(filled)
    survey = Inspector(filled)
    [damage] = [item for item in survey.verify() if isinstance(item, Damage)]
    assert (damage.path, damage.cause) == (chunk_path(filled, KEY), cause)
    assert content(filled) == before
    assert survey.repair([damage]) == []
    assert not chunk_path(filled, KEY).exists()
    assert damages_of(filled) == []
    assert Inspector(filled).ledger().used_bytes == file_bytes(filled)
    disk = make_disk(pool, filled)
    assert check_found(KEYS[1:], disk.batched_get_blocking(KEYS[1:])) == [True] * 3
    disk.close()


@pytest.mark.parametrize("make", [make_directory, make_link])
def test_what_is_no_file_is_removed_without_being_followed(make, filled):
    make(chunk_path(filled, KEY))
    survey = Inspector(filled)
    [damage] = [item for item in survey.verify() if isinstance(item, Damage)]
    assert damage.cause == FrameFault.NOT_A_FILE
    assert survey.repair([damage]) == []
    assert not os.path.lexists(chunk_path(filled, KEY))


def test_strangers_are_told_and_a_full_folder_of_theirs_stays(filled):
    chunks = filled / ROOT_NAME / "chunks"
    (chunks / "note.txt").write_text("a")
    folder = chunks / "ab" / "folder"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "theirs").write_text("b")
    survey = Inspector(filled)
    damages = [item for item in survey.verify() if isinstance(item, Damage)]
    assert [damage.cause for damage in damages] == ["stranger"] * 2
    assert survey.repair(damages) == [folder]
    assert (folder / "theirs").exists()
    assert not (chunks / "note.txt").exists()


def test_a_damaged_ledger_is_written_anew(filled):
    ledger = filled / ROOT_NAME / "ledger"
    flip(ledger, 20)
    survey = Inspector(filled)
    assert survey.ledger() is None
    damages = [item for item in survey.verify() if isinstance(item, Damage)]
    assert [(item.path, item.cause) for item in damages] == [(ledger, "ledger")]
    assert survey.repair(damages) == []
    assert Inspector(filled).ledger().used_bytes == file_bytes(filled)


def test_a_ledger_that_is_missing_is_told(filled):
    (filled / ROOT_NAME / "ledger").unlink()
    [damage] = damages_of(filled)
    assert (damage.cause, damage.removable) == ("missing", False)
    assert Inspector(filled).repair([damage]) == []
    assert damages_of(filled) == []


def test_what_cannot_be_read_is_told_and_never_removed(filled):
    io = FaultyIO()
    survey = Inspector(filled, io)

    def fail(operation):
        if operation == "open_read" and io.calls["open_read"] > 1:  # the first one is the ledger's
            raise OSError(5, "broken")

    io.before = fail
    damages = [item for item in survey.verify() if isinstance(item, Damage)]
    assert {damage.cause for damage in damages} == {"io_error"}
    assert len(damages) == 4
    assert survey.repair(damages) == []
    assert len(content(filled)) == 5


def test_a_chunk_that_was_replaced_meanwhile_stays(filled):
    path = chunk_path(filled, KEY)
    good = path.read_bytes()
    flip(path, 300)
    survey = Inspector(filled)
    damages = [item for item in survey.verify() if isinstance(item, Damage)]
    fresh = path.with_suffix(".new")
    fresh.write_bytes(good)
    fresh.rename(path)
    survey.repair(damages)
    assert path.read_bytes() == good


def test_chunks_that_go_meanwhile_are_no_damage(filled):
    survey = Inspector(filled)
    chunk_path(filled, KEY).unlink()
    assert sum(item is None for item in survey.verify()) == 2  # the ledger's, and this one's


def test_repair_beside_a_running_engine_keeps_its_budget(filled, pool):
    disk = make_disk(pool, filled)
    assert check_found([OTHER], disk.batched_get_blocking([OTHER])) == [True]
    flip(chunk_path(filled, KEY), 300)
    survey = Inspector(filled)
    survey.repair([item for item in survey.verify() if isinstance(item, Damage)])
    state = Inspector(filled).ledger()
    assert [member.budget_bytes for member in state.members.values()] == [1 << 20]
    disk.close()
    assert damages_of(filled) == []


def test_keys_are_found_by_their_beginning(filled):
    survey = Inspector(filled / ROOT_NAME)
    assert survey.find(KEY.hex()) == [KEY]
    assert survey.find(KEY.hex()[:8].upper()) == [KEY]
    assert survey.find("0" * 64) == []
    assert survey.examine(KEY).header.key == KEY
    for wrong in ("", "xyz", "0" * 65, "../etc"):
        with pytest.raises(ConfigError, match="hex digits"):
            survey.find(wrong)


def test_a_summary_counts_by_identity(filled):
    flip(chunk_path(filled, KEY), 0)
    summary = summarize(Inspector(filled))
    [holding] = summary.holdings
    assert holding.identity == writer_digest(IDENTITY)
    assert holding.chunks == 3
    assert holding.size_bytes == 3 * (HEADER_BYTES + CHUNK_BYTES)
    assert sum(holding.forms.values()) == 3
    assert holding.oldest_ns <= holding.newest_ns
    assert dict(summary.causes) == {"magic": 1}


def test_what_is_no_disk_tier_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no disk tier"):
        Inspector(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="no disk tier"):
        Inspector(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        Inspector(tmp_path / "nothing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"], "nothing was made"
