"""The URL of a remote store: taken apart, and never shown with its secrets."""

from __future__ import annotations

import pytest

from kvkeep.config import load_settings
from kvkeep.config.base import RemoteURL
from kvkeep.config.explain import explain
from kvkeep.config.load import resolve_settings
from kvkeep.errors import ConfigError

HUSH = "h%75sh"  # "hush", written so that only the whole text holds it as it is


def test_the_parts_of_a_url():
    url = RemoteURL.parse(" RediSS://me:a%2Fb@one:1,two:2/3?ssl_ca_certs=/ca.pem&client_name=x ")
    assert (url.scheme, url.user, url.password) == ("rediss", "me", "a/b")
    assert (url.hosts, url.path) == ("one:1,two:2", "/3")
    assert dict(url.options) == {"ssl_ca_certs": "/ca.pem", "client_name": "x"}


@pytest.mark.parametrize(
    ("text", "user", "password", "hosts", "path"),
    [
        ("file:///mnt/a%20b", None, None, "", "/mnt/a b"),
        ("redis://host", None, None, "host", ""),
        ("redis://:secret@host", None, "secret", "host", ""),
        ("redis://user@host", "user", None, "host", ""),
        ("redis://a@b:c%40d@host", "a@b", "c@d", "host", ""),
        ("redis://[::1]:7/0", None, None, "[::1]:7", "/0"),
    ],
)
def test_forms_of_urls(text, user, password, hosts, path):
    url = RemoteURL.parse(text)
    assert (url.user, url.password, url.hosts, url.path) == (user, password, hosts, path)


@pytest.mark.parametrize(
    "text",
    [
        f"redis://user:{HUSH}@host:1/0",
        f"redis-sentinel://host/service?sentinel_password={HUSH}",
        f"rediss://host?ssl_password={HUSH}&client_name=shown",
        f"s3://bucket/place?secret_access_key={HUSH}&endpoint=http://shown",
        f"s3://bucket/place?endpoint=http://me:{HUSH}@host:1&proxy_url=http://shown",
        f"s3://bucket/place?proxy_url=http%3A%2F%2Fme%3A{HUSH}%40proxy%3A1&region=shown",
        f"mooncake://host?token={HUSH}",
    ],
)
def test_no_text_of_a_url_shows_a_secret(text):
    """Fault 48: neither as it was written nor decoded."""
    url = RemoteURL.parse(text)
    for shown in (str(url), repr(url), url.masked, f"{url}"):
        assert HUSH not in shown
        assert "hush" not in shown
        assert "***" in shown
    assert url.text == text


def test_what_is_no_secret_is_shown():
    text = "rediss://me@host:1/2?ssl_ca_certs=/ca.pem&ssl_keyfile=/key.pem"
    assert RemoteURL.parse(text).masked == text


@pytest.mark.parametrize(
    "text", ["", "host:6379", "redis:host", "/mnt/shared", "redis://h?a=1&a=2"]
)
def test_what_is_no_url(text):
    with pytest.raises(ConfigError):
        RemoteURL.parse(text)


def test_settings_show_the_url_masked():
    """Fault 48: explain, messages and repr."""
    secret = f"redis://me:{HUSH}@host/1"
    loaded = resolve_settings(env={"KVKEEP_REMOTE_URL": secret})
    assert loaded.settings.remote.url == secret
    assert HUSH not in repr(loaded.settings)
    (shown,) = [one for one in explain(loaded) if one.name == "remote.url"]
    assert (shown.value, shown.text) == ("redis://me:***@host/1",) * 2
    assert shown.origin == "environment variable KVKEEP_REMOTE_URL"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"remote.url": f"redis:me:{HUSH}@host"}, ["remote.url", "redis://"]),
        ({"remote.url": f"redis://me:{HUSH}@host?x"}, ["remote.url", "cannot be read"]),
        ({"remote.threads": 2}, ["remote.threads", "no effect without remote.url"]),
        ({"remote.url": f"redis://:{HUSH}@h", "remote.threads": 1}, ["remote.threads", "2"]),
        ({"remote.url": f"redis://:{HUSH}@h", "remote.ttl": 0}, ["remote.ttl", "0"]),
        ({"remote.url": f"redis://:{HUSH}@h", "remote.lookup_share": 1.0}, ["lookup_share", "0.9"]),
        (
            {"remote.url": f"redis://:{HUSH}@h", "remote.connect_timeout": "20s"},
            ["remote.connect_timeout (20 s)", "10 s"],
        ),
        ({"remote.url": f"redis://:{HUSH}@h", "remote.codec": "gzip"}, ["remote.codec", "zstd"]),
    ],
)
def test_wrong_settings_say_so_without_the_secret(given, words):
    """Faults 45, 46."""
    with pytest.raises(ConfigError) as caught:
        load_settings(extra=given)
    for word in words:
        assert word in str(caught.value)
    assert HUSH not in str(caught.value)
