"""``kvkeep inspect URL`` over real stores."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvkeep.backends.remote.base import HEADER_BYTES, Value
from kvkeep.cli.main import app
from kvkeep.codec.frame import writer_digest
from kvkeep.testing.chunks import CHUNK_BYTES, make_keys, make_pool, put
from kvkeep.testing.remote_stores import read
from support.disk import IDENTITY
from support.remote import make_connector, make_remote, name_of
from support.servers.redis import RedisOptions, redis_server

KEYS = make_keys(3)
SIZE = HEADER_BYTES + CHUNK_BYTES
DIGEST = writer_digest(IDENTITY).hex()


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def url(tmp_path):
    """A directory with three chunks, and one of another model."""
    pool = make_pool()
    url = f"file://{tmp_path}"
    for identity, keys in ((IDENTITY, KEYS), (replace(IDENTITY, model="other"), KEYS[:1])):
        remote = make_remote(pool, url, identity=identity)
        put(remote, pool, keys)
        remote.close()
    pool.clear()
    pool.close()
    return url


def test_what_a_store_holds(run, url):
    done = run("inspect", url)
    assert done.exit_code == 0, done.output
    assert DIGEST[:32] in done.stdout
    values = json.loads(run("inspect", url, "--json").stdout)
    assert values["store"] == url
    assert values["identities"][0] == {"identity": DIGEST[:32], "chunks": 3, "bytes": 3 * SIZE}
    assert [one["chunks"] for one in values["identities"]] == [3, 1]


def test_one_chunk_and_a_damaged_one(run, url):
    key = KEYS[1].hex()
    values = json.loads(run("inspect", url, "--chunk", key[:12], "--json").stdout)
    assert (values["name"], values["fault"], values["codec"]) == (name_of(KEYS[1]), None, "raw")
    assert (values["identity"], values["payload_bytes"]) == (DIGEST, CHUNK_BYTES)
    assert "header and payload verify" in run("inspect", url, "--chunk", key).stdout
    connector = make_connector(url)
    (data,) = read(connector, [name_of(KEYS[1])])
    for bad, fault in (
        (data[:-1] + bytes([data[-1] ^ 1]), "payload_checksum"),
        (data[:-1], "truncated"),
        (data + b"x", "length"),
        (b"no frame", "truncated"),
    ):
        connector.put([name_of(KEYS[1])], [Value(bad[:HEADER_BYTES], bad[HEADER_BYTES:])], 5.0)
        done = run("inspect", url, "--chunk", key, "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["fault"] == fault
    connector.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gopher://me:hush@host"], "no remote store of the kind gopher://"),
        (["redis://me:hush@127.0.0.1:1"], "127.0.0.1:1"),
        (["file:///nowhere/at/all"], "No such file"),
    ],
)
def test_what_cannot_be_looked_at(run, arguments, words):
    """Fault 48: and no message shows a password."""
    done = run("inspect", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "hush" not in done.output


def test_a_chunk_that_is_not_there(run, url):
    assert "no chunk" in run("inspect", url, "--chunk", "00ff").stderr
    assert "several chunks" in run("inspect", url, "--chunk", "").stderr


def test_redis_with_a_password(run):
    with redis_server(RedisOptions(password="hush")) as server:
        done = run("inspect", server.url)
        assert done.exit_code == 0, done.output
        assert f"redis://:***@127.0.0.1:{server.port}" in done.stdout
        assert "No chunks." in done.stdout
        assert "hush" not in done.output
