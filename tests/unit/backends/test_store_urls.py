"""URLs of object stores and of Mooncake Store: what is taken, what is an error, what is shown."""

from __future__ import annotations

import time

import pytest

from kvkeep.backends.remote import create_connector
from kvkeep.backends.remote.base import ConnectorOptions
from kvkeep.backends.remote.calls import DetachedCalls
from kvkeep.backends.remote.mooncake_url import MooncakeOptions
from kvkeep.config.base import RemoteURL
from kvkeep.errors import ConfigError

KEYS = "access_key_id=AKIA-me&secret_access_key=hush-hush"


def connect(text, **options):
    return create_connector(RemoteURL.parse(text), ConnectorOptions(**options))


@pytest.mark.parametrize(
    "text",
    [
        f"s3://bucket/prefix?region=eu-west-1&{KEYS}",
        "s3://AKIA-me:hush-hush@bucket?region=eu-west-1&endpoint=http%3A%2F%2Flocalhost%3A1",
        "gs://bucket?skip_signature=true",
        "az://container/prefix?account_name=me&account_key=aHVzaA==",
        "http://localhost:1/store",
    ],
)
def test_object_stores_that_are_taken(text):
    """Made without asking anybody, and shown without secrets."""
    connector = connect(text)
    try:
        assert "hush" not in connector.description
        assert "aHVzaA" not in connector.description
    finally:
        connector.close()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"s3://bucket?regoin=x&{KEYS}", "regoin"),
        (f"s3://bucket?unsigned_payload=perhaps&{KEYS}", "perhaps"),
        (f"s3://bucket?region=x&ca_file=/not/there&{KEYS}", "/not/there"),
        ("http://me:hush-hush@localhost/store", "user"),
        (f"s3://bucket?region=x&endpoint=http://me:hush@localhost:1&{KEYS}", "endpoint"),
    ],
)
def test_object_stores_that_are_refused(text, word):
    """Fault 45: the message names what is wrong, and shows no secret."""
    with pytest.raises(ConfigError) as caught:
        connect(text)
    assert word in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://bucket?region=x&{KEYS}",
        pytest.param("mooncake://localhost:1", marks=pytest.mark.mooncake),
    ],
)
def test_a_time_to_live_that_the_store_does_not_have(text):
    """Fault 46: it is refused, not ignored. (What Mooncake's client needs is not loaded for it.)"""
    if text.startswith("mooncake"):
        from support.servers.mooncake import load_mooncake_libraries

        load_mooncake_libraries()
    with pytest.raises(ConfigError, match="time to live"):
        connect(text, ttl_s=60.0)


def mooncake(text):
    return MooncakeOptions.of(RemoteURL.parse(text), ConnectorOptions(max_value_bytes=1 << 20))


def test_a_pool_is_found_by_its_master():
    """With what is usual for the rest."""
    options = mooncake("mooncake://master?lend=8GiB&protocol=rdma")
    assert (options.master, options.lend_bytes) == ("master:50051", 8 << 30)
    assert options.metadata_server == "http://master:8080/metadata"
    assert options.admin == "master:9003"
    assert options.buffer_bytes >= 16 << 20


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("mooncake://", "master"),
        ("mooncake://one:1,two:2", "master"),
        ("mooncake://master/path", "path"),
        ("mooncake://master?lent=8GiB", "lent"),
        ("mooncake://master?lend=8", "lend"),
        ("mooncake://master?protocol=udp", "udp"),
    ],
)
def test_pools_that_are_refused(text, word):
    """Fault 45: by name."""
    with pytest.raises(ConfigError, match=word):
        mooncake(text)


def test_a_call_that_does_not_end_keeps_what_it_uses():
    """Its caller goes on at the deadline; too many of them are a fault; they end at last."""
    import threading

    calls, end, kept = DetachedCalls("kvkeep-test", most_late=1), threading.Event(), []
    assert calls.call(lambda: 7, time.monotonic() + 10.0) == 7
    with pytest.raises(TimeoutError):
        calls.call(end.wait, time.monotonic() + 0.01, lambda: [lambda: kept.append("given back")])
    assert (calls.num_late, kept) == (1, [])
    with pytest.raises(ConnectionError, match="do not end"):
        calls.call(lambda: 7, time.monotonic() + 10.0)
    end.set()
    for thread in threading.enumerate():
        if thread.name == "kvkeep-test":
            thread.join(10.0)
    assert (calls.num_late, kept) == (0, ["given back"])
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, time.monotonic() + 10.0)
