"""The doctor at a remote store: one that works, one that refuses, one that is not there."""

from __future__ import annotations

import socket
import time

import pytest

from kvkeep.backends.remote.directory import DirectoryConnector
from kvkeep.config import load_settings
from kvkeep.doctor import tiers
from kvkeep.doctor.base import Level, Patient
from support.servers.redis import RedisOptions, redis_server


def look(url=None, **extra):
    values = {"remote.url": url, **extra} if url is not None else {}
    found = tiers.store(Patient(load_settings(extra=values), {}, None))
    return {finding.topic: finding for finding in found}


def test_a_folder_keeps_a_value_and_nothing_stays(tmp_path):
    found = look(f"file://{tmp_path}")
    assert {one.level for one in found.values()} == {Level.FINE}
    assert found["round trip"].values["seconds"] > 0
    assert found["value"].values["put_bytes_per_s"] > 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "doctor" in path.name]


def test_a_redis_server_keeps_a_value_and_its_password_is_not_shown():
    with redis_server(RedisOptions(password="hush-hush")) as server:
        found = look(server.url)
        assert {one.level for one in found.values()} == {Level.FINE}
        assert b"0" in server.command("DBSIZE")
        wrong = look(server.url.replace("hush-hush", "guessed"))
    assert wrong["store"].level is Level.ERROR
    shown = " ".join(f"{one.text} {one.advice}" for one in [*found.values(), *wrong.values()])
    assert "hush-hush" not in shown
    assert "guessed" not in shown


def test_a_store_that_is_not_there_is_an_error_that_names_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = look(f"redis://:secret@127.0.0.1:{port}/0")
    assert found["store"].level is Level.ERROR
    assert f"127.0.0.1:{port}" in found["store"].text
    assert "secret" not in found["store"].text
    assert "Start the store" in found["store"].advice.text


def test_a_store_that_says_nothing_is_given_up():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        begin = time.monotonic()
        found = look(
            f"redis://127.0.0.1:{silent.getsockname()[1]}/0", **{"remote.connect_timeout": "200ms"}
        )
    assert found["store"].level is Level.ERROR
    assert time.monotonic() - begin < 4 * tiers.CALL_TIMEOUT_S  # it ends, not how fast


def test_a_kind_of_store_that_there_is_not_is_an_error_that_lists_them():
    found = look("memcached://a")
    assert found["store"].level is Level.ERROR
    assert "redis" in found["store"].text


@pytest.mark.parametrize("change", ["header", "payload", "nothing"])
def test_another_value_than_was_put_is_an_error(tmp_path, monkeypatch, change):
    whole = DirectoryConnector.put

    def spoil(self, names, values, timeout_s):
        [value] = values
        if change == "nothing":
            return [None]
        header, payload = bytearray(value.header), bytearray(value.payload)
        (header if change == "header" else payload)[3] ^= 1
        return whole(self, names, [tiers.Value(bytes(header), payload)], timeout_s)

    monkeypatch.setattr(DirectoryConnector, "put", spoil)
    found = look(f"file://{tmp_path}")
    assert found["value"].level is Level.ERROR


def test_without_a_store_there_is_none():
    assert look()["store"].level is Level.FINE
