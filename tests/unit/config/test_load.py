"""Reading settings: which source wins, and how every mistake is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.config import Settings, load_settings, resolve_settings
from kvkeep.config.load import ENV_PREFIX, env_name, setting_fields
from kvkeep.errors import ConfigError

ALL = [path for path, _ in setting_fields()]
#: One value that is not the default, as YAML, per setting. A setting without one fails a test.
EXAMPLES = {
    "chunk_size": "128",
    "save_unfull_chunk": "true",
    "store_decode": "true",
    "remove_after_retrieve": "true",
    "ranks.save_only_first_rank": "false",
    "ranks.timeout": "7s",
    "cpu.size": "20GiB",
    "cpu.policy": "FIFO",
    "cpu.first_rank_size": "40GiB",
    "cpu.reserve": "2GB",
    "cpu.buffers": "0B",
    "cpu.allocator": "paged",
    "cpu.numa": "{0: 1, 1: 0}",
    "cpu.shared_name": "pool-a",
    "cpu.prefault": "1GiB",
    "cpu.alloc_timeout": "500ms",
    "cpu.huge_pages": "false",
    "cpu.copy_threads": "2",
    "lookup.timeout": "2s",
    "lookup.lease": "10min",
    "lookup.socket_dir": "/run/kvkeep",
    "prefetch.enabled": "true",
    "prefetch.timeout": "7s",
    "prefetch.memory": "3GiB",
    "load.asynchronous": "true",
    "identity.model": "example/model",
    "identity.revision": "r1",
    "identity.tags": "{team: search}",
    "health.interval": "1s",
    "health.timeout": "100ms",
    "metrics.listen": "127.0.0.1:9440",
    "metrics.token": "a-secret-of-length",
    "metrics.tls_cert": "/etc/kvkeep/cert.pem",
    "metrics.tls_key": "/etc/kvkeep/key.pem",
    "tracing.spans": "true",
    "log.format": "json",
    "plugins": "[{name: far, module: 'a.b:C', settings: {url: x}}]",
    "disk.path": "/var/cache/kvkeep",
    "disk.size": "7GiB",
    "disk.policy": "fifo",
    "disk.threads": "3",
    "disk.queue": "5MiB",
    "disk.load_timeout": "3s",
    "disk.codec": "zstd",
    "cost.enabled": "off",
    "cost.retry": "9s",
    "remote.url": "redis://user:hush@localhost:6379/1",
    "remote.codec": "zstd",
    "remote.threads": "3",
    "remote.queue": "5MiB",
    "remote.load_timeout": "3s",
    "remote.store_timeout": "4s",
    "remote.connect_timeout": "500ms",
    "remote.lookup_share": "0.5",
    "remote.ttl": "1h",
}
#: What a section's settings have no effect without, which is an error (fault 46).
_LISTEN = {"metrics.listen": "127.0.0.1:9440"}
NEEDED = {
    "disk": {"disk.path": "/var/cache/kvkeep"},
    "remote": {"remote.url": "file:///mnt/shared"},
    "metrics": _LISTEN,
    "prefetch": {"disk.path": "/var/cache/kvkeep"},
    "metrics.tls_cert": {**_LISTEN, "metrics.tls_key": "/etc/kvkeep/key.pem"},
    "metrics.tls_key": {**_LISTEN, "metrics.tls_cert": "/etc/kvkeep/cert.pem"},
}
NEEDED_BY_NONE = ("disk.path", "metrics.listen", "remote.url")


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str):
        path = tmp_path / "kvkeep.yaml"
        path.write_text(text)
        return path

    return write


def value_of(settings: Settings, path: str) -> object:
    value: object = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def as_yaml(path: str, value: str) -> str:
    section, _, name = path.rpartition(".")
    return f"{section}:\n  {name}: {value}\n" if section else f"{name}: {value}\n"


def test_no_settings_at_all_work():
    loaded = resolve_settings()
    assert loaded.settings == Settings()
    assert loaded.settings.chunk_size == 256
    assert loaded.settings.cpu.size is None
    assert loaded.origins == {}


def test_the_environment_of_the_process_is_not_read(monkeypatch):
    """Only what the caller passes in counts; importing and loading read no globals."""
    monkeypatch.setenv("KVKEEP_CHUNK_SIZE", "64")
    assert load_settings().chunk_size == 256
    assert load_settings(env=os.environ).chunk_size == 64


def test_every_setting_has_an_example_here():
    assert set(ALL) == set(EXAMPLES)


@pytest.mark.parametrize("path", ALL)
def test_every_setting_can_be_given_in_every_source(path, yaml_file):
    """Fault 45: what is set takes effect, from wherever it comes, and says where from."""
    text = EXAMPLES[path]
    of_section = NEEDED.get(path.partition(".")[0], {})
    needed = NEEDED.get(path, of_section) if path not in NEEDED_BY_NONE else {}
    needed_env = {env_name(name): value for name, value in needed.items()}
    from_yaml = resolve_settings(yaml_path=yaml_file(as_yaml(path, text)), env=needed_env)
    from_env = resolve_settings(env={env_name(path): text, **needed_env})
    values = [value_of(loaded.settings, path) for loaded in (from_yaml, from_env)]
    assert values[0] == values[1] != value_of(Settings(), path)
    with_needed = {name: f"environment variable {env_name(name)}" for name in needed}
    assert from_yaml.origins == {path: str(yaml_file(as_yaml(path, text))), **with_needed}
    assert from_env.origins == {path: f"environment variable {env_name(path)}", **with_needed}
    raw = {"identity.tags": {"team": "search"}}.get(path, values[0])
    for extra in ({path: raw}, nested(path, raw)):
        loaded = resolve_settings(extra=extra, env=needed_env)
        assert value_of(loaded.settings, path) == values[0]
        assert loaded.origins == {path: "extra config", **with_needed}


def nested(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_extra_beats_environment_beats_yaml(yaml_file):
    path = yaml_file("chunk_size: 1\ncpu:\n  size: 1GiB\n  policy: fifo\n  copy_threads: 3\n")
    env = {"KVKEEP_CONFIG": str(path), "KVKEEP_CPU_SIZE": "2GiB", "KVKEEP_CPU_POLICY": "lfu"}
    settings = load_settings(env=env, extra={"cpu.policy": "mru"})
    assert settings.chunk_size == 1
    assert settings.cpu.size == 2 << 30
    assert settings.cpu.policy == "mru"
    assert settings.cpu.copy_threads == 3
    assert load_settings(yaml_path=yaml_file("chunk_size: 5"), env=env).chunk_size == 5


@pytest.mark.parametrize(
    ("source", "name", "hint"),
    [
        ("env", "KVKEEP_CHUNKSIZE", "KVKEEP_CHUNK_SIZE"),
        ("env", "KVKEEP_CPU_SZIE", "KVKEEP_CPU_SIZE"),
        ("env", "KVKEEP_CONFG", "KVKEEP_CONFIG"),
        ("extra", "chunksize", "chunk_size"),
        ("extra", "cpu.sise", "cpu.size"),
        ("extra", "size", "cpu.size"),
        ("yaml", "save_unful_chunk", "save_unfull_chunk"),
        ("yaml", "lookup.time_out", "lookup.timeout"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(source, name, hint, yaml_file):
    """Fault 45: a misspelt setting stops the start; it is never ignored with a warning."""
    sources = {
        "env": lambda: load_settings(env={name: "1"}),
        "extra": lambda: load_settings(extra={name: "1"}),
        "yaml": lambda: load_settings(yaml_path=yaml_file(as_yaml(name, "1"))),
    }
    with pytest.raises(ConfigError, match=f"did you mean {hint}\\?") as caught:
        sources[source]()
    origin = {"env": "environment", "extra": "extra config", "yaml": "kvkeep.yaml"}[source]
    assert name in str(caught.value)
    assert origin in str(caught.value)


def test_an_unknown_key_that_is_near_to_nothing_lists_what_there_is():
    """Fault 45: an old or foreign setting."""
    expected = r"unknown setting zzz .* known are chunk_size, .*identity"
    with pytest.raises(ConfigError, match=expected):
        load_settings(extra={"zzz": 1})
    with pytest.raises(ConfigError, match="KVKEEP_ZZZ"):
        load_settings(env={"KVKEEP_ZZZ": "1"})


@given(st.text(st.characters(codec="ascii", categories=["Lu", "Nd"]), min_size=1, max_size=12))
def test_no_variable_of_ours_is_ever_ignored(tail):
    """Fault 45: any KVKEEP_ variable is a setting, a documented other one, or an error."""
    name = ENV_PREFIX + tail
    if name in {*map(env_name, ALL), "KVKEEP_CONFIG"}:
        return
    with pytest.raises(ConfigError, match=name):
        load_settings(env={name: "1"})


def test_variables_of_tests_and_of_the_demo_are_no_settings():
    env = {"KVKEEP_MODEL_DIR": "/m", "KVKEEP_TEST_X": "1", "KVKEEP_STRESS_SECONDS": "5", "HOME": ""}
    assert load_settings(env=env) == Settings()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"chunk_size": "256"}, r"chunk_size = '256' \(extra config\): .*whole number"),
        ({"chunk_size": None}, "chunk_size = None"),
        ({"chunk_size": 1.0}, "chunk_size = 1.0"),
        ({"chunk_size": True}, "chunk_size = True"),
        ({"chunk_size": 0}, "must be 1 at least"),
        ({"store_decode": 1}, "store_decode = 1"),
        ({"cpu.size": "20"}, "with its unit"),
        ({"cpu.size": "20 gallons"}, "with its unit"),
        ({"cpu.size": 20}, "4096"),
        ({"cpu.size": "-1GiB"}, "with its unit"),
        ({"cpu.size": [1]}, "with its unit"),
        ({"cpu.policy": "arc"}, "'fifo', 'lru', 'lfu', 'mru' or 'reuse'"),
        ({"cpu.policy": None}, "cpu.policy = None"),
        ({"cpu.copy_threads": 0}, "copy_threads"),
        ({"cpu.alloc_timeout": "5"}, "with its unit"),
        ({"cpu.alloc_timeout": 0}, "greater than 0"),
        ({"lookup.timeout": float("inf")}, "finite"),
        ({"lookup.timeout": float("nan")}, "greater than 0|finite"),
        ({"lookup.lease": "1 day"}, "with its unit"),
        ({"lookup.socket_dir": 5}, "socket_dir"),
        ({"identity.model": ""}, "identity.model = ''"),
        ({"identity.tags": {"a": 1}}, "identity.tags"),
        ({"identity.tags": "a"}, "mapping"),
        ({"cpu": 5}, "cpu in extra config is a section, not a value; it holds cpu.size"),
        ({"cpu": {"size": "1GiB"}, "cpu.size": "2GiB"}, "given twice"),
    ],
)
def test_a_bad_value_is_an_error_and_never_becomes_none(extra, message):
    """Fault 45: what cannot be read is told with its name, its source and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        load_settings(extra=extra)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVKEEP_CHUNK_SIZE", "many"),
        ("KVKEEP_CHUNK_SIZE", ""),
        ("KVKEEP_CHUNK_SIZE", "256.5"),
        ("KVKEEP_STORE_DECODE", "maybe"),
        ("KVKEEP_CPU_SIZE", "none"),
        ("KVKEEP_CPU_POLICY", ""),
        ("KVKEEP_IDENTITY_TAGS", "a"),
        ("KVKEEP_IDENTITY_TAGS", "{a"),
        ("KVKEEP_IDENTITY_TAGS", "{a: 1}"),
    ],
)
def test_a_bad_variable_is_an_error_that_names_it(name, text):
    """Fault 45: the same for the environment."""
    with pytest.raises(ConfigError, match=name):
        load_settings(env={name: text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: 1\nchunk_size: 2\n", "'chunk_size' is given twice"),
        ("cpu:\n  size: 1GiB\n  size: 2GiB\n", "'size' is given twice"),
        ("- 1\n", "must be a mapping"),
        ("cpu: [1]\n", "section"),
        ("chunk_size: [\n", "no valid YAML"),
        ("chunk_size: !!python/object/apply:os.getcwd []\n", "no valid YAML"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(text, message, yaml_file):
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(yaml_path=yaml_file(text))
    assert "kvkeep.yaml" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    """Fault 45: a file that was named and is not there is no reason to go on with defaults."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        load_settings(env={"KVKEEP_CONFIG": str(tmp_path / "none.yaml")})


def test_empty_files_and_sections_are_empty(yaml_file):
    assert load_settings(yaml_path=yaml_file("")) == Settings()
    assert load_settings(yaml_path=yaml_file("cpu:\nlookup: {}\n")) == Settings()


def test_null_takes_a_size_back_to_automatic():
    settings = load_settings(env={"KVKEEP_CPU_SIZE": "1GiB"}, extra={"cpu.size": None})
    assert settings.cpu.size is None


def test_two_mistakes_are_told_together():
    with pytest.raises(ConfigError) as caught:
        load_settings(extra={"chunk_size": 0, "cpu.size": "1"})
    assert "chunk_size" in str(caught.value)
    assert "cpu.size" in str(caught.value)


@pytest.mark.parametrize("text", ["auto", "off"])
def test_numa_without_a_map(text, yaml_file):
    """YAML reads off as false; it is off all the same."""
    for loaded in (
        load_settings(yaml_path=yaml_file(f"cpu: {{numa: {text}}}")),
        load_settings(env={"KVKEEP_CPU_NUMA": text}),
        load_settings(extra={"cpu.numa": text}),
    ):
        assert loaded.cpu.numa == text


def test_numa_as_a_map_of_json_has_numbers_as_texts():
    assert load_settings(extra={"cpu.numa": {"1": 0, "0": 1}}).cpu.numa == ((0, 1), (1, 0))


@pytest.mark.parametrize("value", [True, "close", {"gpu": 0}, {0: -1}, {0: None}, [[0, 1]]])
def test_what_numa_cannot_be(value):
    with pytest.raises(ConfigError, match=r"cpu\.numa"):
        load_settings(extra={"cpu.numa": value})


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"name": "far"}, "plugin far needs either module .* or entry_point"),
        ({"name": "far", "module": "a:B", "entry_point": "b"}, "needs either module"),
        ({"name": "far", "module": "a.b"}, r"plugins\.0\.module"),
        ({"name": "far away", "module": "a:B"}, r"plugins\.0\.name"),
        (
            {"name": "far", "modul": "a:B"},
            r"plugins\.0\.modul \(extra config\): there is no modul here",
        ),
        ({"module": "a:B"}, r"plugins\.0\.name \(extra config\): write a list like"),
    ],
)
def test_a_malformed_plugin_is_told_without_its_secrets(plugin, message):
    """Spec 13.2: the value of a setting that may hold secrets stands in no message."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(extra={"plugins": [{**plugin, "settings": {"password": "hunter2"}}]})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_settings(env={"KVKEEP_PLUGINS": "[{name: hunter2"})
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_plugins_do_not_show_their_settings_and_can_be_hashed():
    loaded = load_settings(
        extra={"plugins": [{"name": "far", "module": "a:B", "settings": {"password": "hunter2"}}]}
    )
    assert loaded.plugins[0].settings == {"password": "hunter2"}
    assert "hunter2" not in repr(loaded)
    assert hash(loaded) == hash(loaded.model_copy())


def test_two_plugins_need_two_names():
    plugin = {"name": "far", "module": "a:B"}
    with pytest.raises(ConfigError, match="plugins gives a name twice"):
        load_settings(extra={"plugins": [plugin, plugin]})


@pytest.mark.parametrize("how", ["env", "extra"])
def test_a_tilde_is_the_users_home(how, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of-somebody")
    given = {"env": {"KVKEEP_DISK_PATH": "~/kv"}, "extra": {"disk.path": "~/kv"}}
    assert load_settings(**{how: given[how]}).disk.path == Path("/home/of-somebody/kv")
