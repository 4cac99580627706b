"""``kvkeep inspect`` and ``kvkeep fsck`` over a directory that a disk tier has written."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.cli.main import app
from kvkeep.cli.output import about_size, ago
from kvkeep.cli.stores import MEANINGS
from kvkeep.codec.frame import HEADER_BYTES, FrameFault, writer_digest
from kvkeep.testing.chunks import CHUNK_BYTES, make_keys, make_pool, put
from support.disk import IDENTITY, chunk_path, make_disk

KEYS = make_keys(3)
KEY = KEYS[0]
SIZE = 3 * (HEADER_BYTES + CHUNK_BYTES)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def filled(tmp_path):
    pool = make_pool()
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    disk.close()
    pool.clear()
    assert pool.memcheck().num_objects == 0
    pool.close()
    return tmp_path


def damage(path):
    file = chunk_path(path, KEY)
    file.write_bytes(file.read_bytes()[:-1] + b"\xff\x00")
    (path / ROOT_NAME / "chunks" / "note.txt").write_text("a")


def test_fsck_of_whole_chunks_ends_with_0(run, filled):
    done = run("fsck", filled)
    assert done.exit_code == 0
    assert done.stdout == f"3 chunks are whole, {about_size(SIZE)}.\n"
    values = json.loads(run("fsck", filled, "--json").stdout)
    assert values == {
        "directory": str(filled / ROOT_NAME),
        "chunks": 3,
        "bytes": SIZE,
        "damages": [],
    }


def test_fsck_tells_damage_by_cause_and_removes_it_only_if_asked(run, filled):
    damage(filled)
    done = run("fsck", filled)
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    assert "length: the file is longer than its header says" in lines
    assert f"  {chunk_path(filled, KEY).relative_to(filled / ROOT_NAME)}" in lines
    assert "stranger: no name of a chunk" in lines
    assert "--repair removes" in lines[-1]
    assert max(map(len, lines)) <= 80
    assert chunk_path(filled, KEY).exists()
    repaired = run("fsck", filled, "--repair")
    assert repaired.exit_code == 1
    assert "2 files are no good, and removed or written anew." in repaired.stdout
    assert not chunk_path(filled, KEY).exists()
    assert run("fsck", filled).exit_code == 0


def test_fsck_as_json_says_what_was_repaired(run, filled):
    damage(filled)
    folder = filled / ROOT_NAME / "chunks" / "ab" / "theirs"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    for options, repaired in (([], [False] * 3), (["--repair"], [False, True, True])):
        done = run("fsck", filled, "--json", *options)
        damages = sorted(json.loads(done.stdout)["damages"], key=lambda one: one["repaired"])
        assert done.exit_code == 1
        assert [one["repaired"] for one in damages] == repaired
    assert damages[0]["path"] == str(folder)
    left = run("fsck", filled, "--repair")
    assert "1 file is no good; 1 of them could not be removed and stay." in left.stdout


def test_a_missing_ledger_is_mended(run, filled):
    (filled / ROOT_NAME / "ledger").unlink()
    done = run("fsck", filled, "--repair")
    assert done.exit_code == 1
    assert "missing: there is no ledger" in done.stdout
    assert "written anew" in done.stdout
    assert run("fsck", filled).exit_code == 0


def test_every_cause_has_a_meaning():
    of_an_engine = {FrameFault.WRONG_IDENTITY, FrameFault.WRONG_LAYOUT}
    assert {str(cause) for cause in set(FrameFault) - of_an_engine} <= set(MEANINGS)


def test_inspect_counts_by_identity(run, filled):
    digest = writer_digest(IDENTITY).hex()
    done = run("inspect", filled)
    assert done.exit_code == 0
    [row] = [line for line in done.stdout.splitlines() if line.startswith(digest[:16])]
    assert row.split()[1:6] == ["OPAQUE_PAGES", "uint8", "3", *about_size(SIZE).split()]
    assert "open in no engine" in done.stdout
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    values = json.loads(run("inspect", filled, "--json").stdout)
    [one] = values["identities"]
    assert (one["identity"], one["chunks"], one["bytes"]) == (digest, 3, SIZE)
    assert one["forms"][0]["chunks"] == 3
    assert values["ledger"]["members"] == 0


def test_inspect_says_who_has_it_open_and_what_is_no_good(run, filled):
    damage(filled)
    pool = make_pool()
    (filled / "other").mkdir()
    disk = make_disk(pool, filled / "other")
    put(disk, pool, KEYS[:1])
    done = run("inspect", filled / "other")
    assert "of 1.0 MiB; open in 1 engine(s)" in done.stdout
    disk.close()
    pool.clear()
    pool.close()
    assert "No good by their headers: " in run("inspect", filled).stdout
    assert json.loads(run("inspect", filled, "--json").stdout)["faults"] == {
        "length": 1,
        "stranger": 1,
    }


def test_inspect_of_an_empty_tier_and_a_damaged_ledger(run, filled):
    for key in KEYS:
        chunk_path(filled, key).unlink()
    (filled / ROOT_NAME / "ledger").write_bytes(b"x")
    done = run("inspect", filled)
    assert done.exit_code == 0
    assert "No chunks." in done.stdout
    assert "The ledger does not verify" in done.stdout


def test_inspect_shows_one_header(run, filled):
    done = run("inspect", filled, "--chunk", KEY.hex()[:12], "--json")
    values = json.loads(done.stdout)
    assert done.exit_code == 0
    assert values["key"] == KEY.hex()
    assert values["identity"] == writer_digest(IDENTITY).hex()
    assert (values["payload_bytes"], values["fault"]) == (CHUNK_BYTES, None)
    screen = run("inspect", filled, "--chunk", KEY.hex())
    assert "fault             none: header and payload verify" in screen.stdout.splitlines()


def test_inspect_of_a_damaged_chunk_ends_with_1(run, filled):
    damage(filled)
    done = run("inspect", filled, "--chunk", KEY.hex())
    assert done.exit_code == 1
    assert "fault             length" in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["fsck", "{path}/none"], "No such file or directory"),
        (["fsck", "{path}/empty"], "there is no disk tier"),
        (["inspect", "{path}/none"], "No such file or directory"),
        (["inspect", "{path}/file"], "there is no disk tier"),
        (["inspect", "{path}", "--chunk", "zz"], "not the beginning of a key"),
        (["inspect", "{path}", "--chunk", "0" * 64], "no chunk in"),
    ],
)
def test_what_cannot_run_is_one_message_and_2(run, filled, arguments, words):
    (filled / "empty").mkdir()
    (filled / "file").touch()
    done = run(*(argument.format(path=filled) for argument in arguments))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_beginning_of_several_keys_lists_some(run, filled):
    source = chunk_path(filled, KEY)
    name = KEY.hex()[:-1] + ("0" if KEY.hex()[-1] != "0" else "1") + ".kvc"
    source.with_name(name).write_bytes(source.read_bytes())
    done = run("inspect", filled, "--chunk", KEY.hex()[:-1])
    assert done.exit_code == 2
    assert "2 keys start with" in done.stderr


@pytest.mark.parametrize("command", ["inspect", "fsck"])
def test_help_has_an_example(run, command):
    assert f"Example: kvkeep {command} " in run(command, "--help").stdout


@pytest.mark.parametrize(
    "size, text", [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")]
)
def test_sizes_for_people(size, text):
    assert about_size(size) == text


@pytest.mark.parametrize(
    "seconds, text", [(-5, "now"), (0, "now"), (59, "59 s"), (7200, "2 h"), (90000, "1 d")]
)
def test_ages_for_people(seconds, text):
    assert ago(seconds * 10**9) == text
