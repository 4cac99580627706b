"""``kvkeep clear`` of a directory and of a store."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.disk.inspect import Inspector
from kvkeep.cli.main import app
from kvkeep.codec.frame import writer_digest
from kvkeep.testing.chunks import make_keys, make_pool, put
from support.disk import IDENTITY, chunk_path, make_disk
from support.remote import make_remote

KEYS = make_keys(4)
OTHER = replace(IDENTITY, model="other")
DIGITS = writer_digest(IDENTITY).hex()
OTHER_DIGITS = writer_digest(OTHER).hex()


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments, input=None: CliRunner().invoke(app, [*map(str, arguments)], input)


@pytest.fixture(params=["directory", "store"])
def place(request, tmp_path):
    """Three chunks of one model, and one of another."""
    pool = make_pool()
    place = str(tmp_path) if request.param == "directory" else f"file://{tmp_path}"
    for identity, keys in ((IDENTITY, KEYS[:3]), (OTHER, KEYS[3:])):
        if request.param == "directory":
            tier = make_disk(pool, tmp_path, identity=identity)
        else:
            tier = make_remote(pool, place, identity=identity)
        put(tier, pool, keys)
        tier.close()
    pool.clear()
    pool.close()
    return place


def held(run, place):
    """Chunks by identity, as the other command shows them."""
    found = json.loads(run("inspect", place, "--json").stdout)["identities"]
    return {one["identity"][:32]: one["chunks"] for one in found}


def test_everything_goes(run, place):
    done = run("clear", place, "--yes")
    assert (done.exit_code, done.stdout) == (0, "Removed 4 chunks.\n")
    assert held(run, place) == {}
    again = run("clear", place, "--yes", "--json")
    assert json.loads(again.stdout) == {"place": place, "removed": 0, "left": 0}


@pytest.mark.parametrize("digits", [DIGITS[:6], DIGITS[:6].upper(), DIGITS])
def test_one_model_goes_and_the_others_stay(run, place, digits):
    done = run("clear", place, "--identity", digits, "--yes", "--json")
    assert json.loads(done.stdout) == {"place": place, "removed": 3, "left": 0}
    assert held(run, place) == {OTHER_DIGITS[:32]: 1}


@pytest.mark.parametrize(("answer", "num_left"), [("y\n", 0), ("n\n", 4), ("", 4)])
def test_it_asks_first(run, place, answer, num_left):
    done = run("clear", place, input=answer)
    assert "Remove 4 chunks" in done.stderr
    assert done.exit_code == (1 if num_left else 0)
    assert sum(held(run, place).values()) == num_left


@pytest.mark.parametrize(
    ("identity", "words"),
    [("xyz", "no hex digits"), ("", "no hex digits"), ("0" * 20, "no identity in")],
)
def test_an_identity_that_is_none_removes_nothing(run, place, identity, words):
    done = run("clear", place, "--identity", identity, "--yes")
    assert done.exit_code == 2
    assert words in done.stderr
    assert sum(held(run, place).values()) == 4


def test_a_place_that_is_none(run, tmp_path):
    done = run("clear", tmp_path, "--yes")
    assert done.exit_code == 2
    assert "there is no disk tier" in done.stderr


def test_damaged_chunks_go_with_all_and_strangers_stay(run, tmp_path):
    pool = make_pool()
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    disk.close()
    pool.clear()
    pool.close()
    chunk_path(tmp_path, KEYS[0]).write_bytes(b"no chunk")
    stranger = tmp_path / ROOT_NAME / "chunks" / "note.txt"
    stranger.write_text("mine")
    assert run("clear", tmp_path, "--identity", DIGITS, "--yes").stdout == "Removed 3 chunks.\n"
    assert run("clear", tmp_path, "--yes").stdout == "Removed 1 chunk.\n"
    assert stranger.read_text() == "mine"
    ledger = Inspector(tmp_path).ledger()
    assert ledger is not None
    assert ledger.stored_bytes == os.stat(stranger).st_blocks * 512


def test_an_engine_goes_on_beside_it(run, tmp_path):
    """What was removed under it is a miss, and is stored again."""
    pool = make_pool()
    disk = make_disk(pool, tmp_path)
    put(disk, pool, KEYS)
    pool.clear()
    assert run("clear", tmp_path, "--yes").exit_code == 0
    assert disk.batched_get_blocking(KEYS) == [None] * 4
    put(disk, pool, KEYS)
    pool.clear()
    assert disk.batched_contains(KEYS) == 4
    disk.close()
    pool.clear()
    pool.close()
