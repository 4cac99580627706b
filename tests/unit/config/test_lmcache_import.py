"""Settings of LMCache: what each becomes, and that nothing is dropped in silence."""

from __future__ import annotations

import pytest

from kvkeep.config import load_settings
from kvkeep.config.lmcache import Fate, translate, translate_file
from kvkeep.errors import ConfigError

EXAMPLE = {
    "chunk_size": 128,
    "local_cpu": True,
    "max_local_cpu_size": 5.5,
    "reserve_local_cpu_size": 2,
    "local_disk": "file:///var/cache/lm/",
    "max_local_disk_size": 100.0,
    "cache_policy": "LFU",
    "save_decode_cache": True,
    "save_unfull_chunk": True,
    "numa_mode": "manual",
    "lookup_timeout_ms": 3000,
    "extra_config": {"gpu_to_numa_mapping": {0: 0, 1: 1}},
}


def test_what_has_a_counterpart_becomes_it():
    done = translate(EXAMPLE)
    assert done.settings == {
        "chunk_size": 128,
        "cpu": {
            "size": "5632MiB",
            "reserve": "2GiB",
            "policy": "lfu",
            "numa": {0: 0, 1: 1},
        },
        "disk": {"path": "/var/cache/lm", "size": "100GiB", "policy": "lfu"},
        "store_decode": True,
        "save_unfull_chunk": True,
        "lookup": {"timeout": "3000ms"},
    }
    assert {note.fate for note in done.notes} == {Fate.TAKEN, Fate.NOT_NEEDED}
    settings = load_settings(extra=done.settings)
    assert settings.cpu.size == int(5.5 * (1 << 30))
    assert settings.lookup.timeout == 3.0


def test_every_key_gets_one_note_in_order():
    given = {
        **EXAMPLE,
        "remote_url": "redis://h:1",
        "enable_p2p": False,
        "p2p_host": "h",
        "use_layerwise": True,
        "nixl_backends": ["UCX"],
        "no_such_key": 1,
    }
    notes = [note.key for note in translate(given).notes]
    keys = [*given]
    keys[keys.index("extra_config")] = "extra_config.gpu_to_numa_mapping"
    assert notes == keys


@pytest.mark.parametrize(
    "key, value, fate, words",
    [
        ("remote_url", "lm://h:1", Fate.NO_COUNTERPART, "docs/remote.md"),
        ("remote_url", "mooncakestore://h:1", Fate.NO_COUNTERPART, "docs/remote.md"),
        ("remote_serde", "naive", Fate.NOT_NEEDED, "as they are"),
        ("remote_serde", "cachegen", Fate.NO_COUNTERPART, "remote.codec"),
        ("remote_url", None, Fate.NOT_NEEDED, "off"),
        ("enable_blending", True, Fate.NO_COUNTERPART, "blending"),
        ("enable_blending", False, Fate.NOT_NEEDED, "off"),
        ("blend_check_layers", 1, Fate.NO_COUNTERPART, "blending"),
        ("enable_pd", True, Fate.NO_COUNTERPART, "decode"),
        ("gds_path", "/x", Fate.NO_COUNTERPART, "GPUDirect"),
        ("lazy_memory_safe_size", 8, Fate.NOT_NEEDED, "committed"),
        ("local_cpu", False, Fate.NO_COUNTERPART, "always on"),
        ("local_disk", None, Fate.NOT_NEEDED, "off"),
        ("max_local_disk_size", 10, Fate.NOT_NEEDED, "no local_disk"),
        ("reserve_local_cpu_size", 0.0, Fate.NOT_NEEDED, "off"),
        ("max_local_cpu_size", 0, Fate.NO_COUNTERPART, "empty"),
        ("chunk_sice", 5, Fate.NO_COUNTERPART, "did you mean chunk_size?"),
        (5, 5, Fate.NO_COUNTERPART, "not a key"),
    ],
)
def test_what_has_none_says_why(key, value, fate, words):
    done = translate({key: value})
    [note] = done.notes
    assert (note.key, note.fate) == (str(key), fate)
    assert words in note.reason
    assert done.settings == {}


@pytest.mark.parametrize(
    "given, url",
    [
        ("redis://:hush@h:6379", "redis://:hush@h:6379"),
        ("valkey://h", "valkey://h"),
        ("fs://host:0/mnt/shared", "file:///mnt/shared"),
    ],
)
def test_remote_stores(given, url):
    done = translate({"remote_url": given, "remote_serde": "naive"})
    assert done.settings == {"remote": {"url": url}}
    assert "hush" not in str(done.notes)


def test_a_disk_without_a_size_keeps_the_default():
    done = translate({"local_disk": "relative/dir", "max_local_disk_size": 0.0})
    assert done.settings == {"disk": {"path": "relative/dir"}}
    assert [note.fate for note in done.notes] == [Fate.TAKEN, Fate.NO_COUNTERPART]


@pytest.mark.parametrize("mode, nodes", [(None, "off"), ("auto", "auto")])
def test_memory_nodes(mode, nodes):
    assert translate({"numa_mode": mode}).settings == {"cpu": {"numa": nodes}}


@pytest.mark.parametrize(
    "text, words",
    [
        ("chunk_size: many", "chunk_size = 'many'"),
        ("chunk_size: true", "chunk_size = True"),
        ("chunk_size: 0", "must be 1 at least"),
        ("max_local_cpu_size: 5GB", "max_local_cpu_size = '5GB': must be a number"),
        ("max_local_cpu_size: -1", "must be a number, 0 or more"),
        ("max_local_cpu_size: .nan", "must be a number"),
        ("local_cpu: 3", "local_cpu = 3: must be true or false"),
        ("local_disk: s3://bucket/", "one path like file:///path/"),
        ("local_disk: [a, b]", "one path like file:///path/"),
        ("cache_policy: best", "cpu.policy = 'best' (the translation)"),
        ("cache_policy: 1", "must be a name like LRU"),
        ("remote_url: 5", "remote_url must be a text"),
        ("remote_url: redis", "starts with its kind"),
        ("numa_mode: manual", "gpu_to_numa_mapping"),
        ("numa_mode: sideways", "numa_mode = 'sideways'"),
        ("extra_config: 1", "extra_config = 1: must be a mapping"),
        ("lookup_timeout_ms: 400000", "lookup.lease"),
        ("- a", "must be a mapping"),
        ("a: [", "no valid YAML"),
        ("chunk_size: 1\nchunk_size: 2", "given twice"),
    ],
)
def test_what_is_wrong_names_file_and_key(text, words, tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        translate_file(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)
