"""Plugins: the documented one passes the contract, and is found by module and by entry point."""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from kvkeep.backends.plugins import build_plugin
from kvkeep.config import PluginSettings, load_settings
from kvkeep.engine.build import CacheManager
from kvkeep.errors import ConfigError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.testing.chunks import make_pool
from support.paged_engine import PagedEngine

DOCUMENT = Path(__file__).parents[2] / "docs" / "plugins.md"
SOURCE, TESTS = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
TOKENS = list(range(1000, 1024))


def _run(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, str(DOCUMENT), "exec"), module.__dict__)
    return module


try:
    _run("compressed_backend", SOURCE)
    TestCompressedBackend = _run("test_compressed_backend", TESTS).TestCompressedBackend
finally:
    sys.modules.pop("compressed_backend", None)
    sys.modules.pop("test_compressed_backend", None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder on sys.path as pip leaves it: the module, and metadata with an entry point."""
    (tmp_path / "compressed_backend.py").write_text(SOURCE)
    info = tmp_path / "kvkeep_compressed-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvkeep-compressed\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[kvkeep.backends]\n"
        "compressed = compressed_backend:CompressedBackend\n"
        "lost = no_such_module:Backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("compressed_backend", "strange", "helping"):
        sys.modules.pop(name, None)


def manager_with(*plugins: dict) -> tuple[PagedEngine, CacheManager]:
    model = PagedEngine(num_pages=16)
    settings = load_settings(
        extra={"chunk_size": 8, "cpu.size": "64KiB", "cpu.prefault": "0B", "plugins": plugins}
    )
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    return model, CacheManager.create(settings, identity, PagedGPUConnector(model.layout))


@pytest.mark.parametrize(
    "source",
    [{"module": "compressed_backend:CompressedBackend"}, {"entry_point": "compressed"}],
    ids=["module", "entry point"],
)
def test_a_plugin_is_a_tier_below_all_others(package, source) -> None:
    """Spec 9.6: found, built from its settings, filled by a store, read when memory has lost it."""
    model, manager = manager_with(
        {"name": "far", **source, "settings": {"level": 9}}, {"name": "farther", **source}
    )
    with manager:
        assert list(manager.storage.storage_backends) == ["LocalCPUBackend", "far", "farther"]
        assert [manager.storage.storage_backends[n]._level for n in ("far", "farther")] == [9, 1]
        slots = model.slots(range(6), 24)
        model.prefill(TOKENS, range(6))
        manager.engine.store(TOKENS, kvcaches=model.caches, slot_mapping=slots)
        manager.engine.clear(["LocalCPUBackend", "farther"])
        model.wipe(range(16))
        assert manager.engine.lookup(TOKENS, lookup_id="r", pin=True) == 24
        mask = manager.engine.retrieve(
            TOKENS, kvcaches=model.caches, slot_mapping=slots, req_id="r"
        )
        assert mask.all()
        assert model.right_pages(TOKENS, range(6)) == [True] * 6
        values = manager.metrics.snapshot()
        assert values['kvkeep_lookup_hit_tokens_total{tier="far"}'] == 24
        report = manager.engine.check()
        assert (report.open_leases, report.num_objects) == (0, report.num_chunks)
        far = manager.storage.storage_backends["far"]
    assert not far.health().healthy


STRANGE = """
from kvkeep.backends.base import StoragePluginInterface
from compressed_backend import CompressedBackend

nothing = 5

class Plain:
    pass

class Raises(CompressedBackend):
    @classmethod
    def from_settings(cls, settings, allocator_backend):
        raise OSError("hunter2 at 10.0.0.1")

class Nothing(CompressedBackend):
    @classmethod
    def from_settings(cls, settings, allocator_backend):
        return None

class Unfinished(StoragePluginInterface):
    @classmethod
    def from_settings(cls, settings, allocator_backend):
        return cls()

class Holder:
    Inner = CompressedBackend
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"entry_point": "compresed"},
            "no installed package has the entry point compresed in the "
            r"group kvkeep.backends \(there: .*compressed.*\); install",
        ),
        ({"entry_point": "lost"}, "entry point lost needs module no_such_module, which is not"),
        ({"module": "no_such_module:X"}, "no_such_module:X needs module no_such_module, which is"),
        ({"module": "strange:Missing"}, "module strange was found, Missing was not in it"),
        ({"module": "strange:nothing"}, "strange:nothing is an object of type int; it must"),
        ({"module": "strange:Plain"}, "is the class Plain; it must be a class that"),
        ({"module": "strange:Raises"}, r"Raises.from_settings raised OSError; see the exception"),
        ({"module": "strange:Nothing"}, "Nothing.from_settings returned an object of type None"),
        (
            {"module": "strange:Unfinished"},
            "strange:Unfinished has no batched_get_blocking, batched_submit_put_task",
        ),
        ({"module": "helping:X"}, "importing helping:X raised ZeroDivisionError: division by zero"),
        (
            {"module": "compressed_backend:CompressedBackend", "settings": {"level": 10}},
            "plugin far: the only setting is level, from 1 to 9",
        ),
    ],
)
def test_what_is_wrong_with_a_plugin_is_told(package, source, message) -> None:
    """Which plugin, what, and how to mend it; never a word of its settings."""
    (package / "strange.py").write_text(STRANGE)
    (package / "helping.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message) as caught:
        manager_with({"name": "far", "settings": {"password": "hunter2"}, **source})
    assert str(caught.value).startswith("plugin far: ")
    assert "hunter2" not in str(caught.value)


def test_a_class_inside_another_object(package) -> None:
    (package / "strange.py").write_text(STRANGE)
    _, manager = manager_with({"name": "far", "module": "strange:Holder.Inner"})
    manager.close()


def test_two_packages_with_one_entry_point_must_be_told_apart(package) -> None:
    other = package / "other-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 0.1\n")
    (other / "entry_points.txt").write_text("[kvkeep.backends]\ncompressed = strange:Plain\n")
    with pytest.raises(ConfigError, match=r"several packages have .* name the class by module"):
        manager_with({"name": "far", "entry_point": "compressed"})


def test_the_name_of_another_tier_is_refused(package) -> None:
    module = "compressed_backend:CompressedBackend"
    with pytest.raises(ConfigError, match="plugin LocalCPUBackend: another tier has this name"):
        manager_with({"name": "LocalCPUBackend", "module": module})


def test_what_was_built_is_closed_when_a_later_plugin_fails(package, monkeypatch) -> None:
    module = importlib.import_module("compressed_backend")
    closed = []
    monkeypatch.setattr(module.CompressedBackend, "close", lambda self: closed.append(self.name))
    path = "compressed_backend:CompressedBackend"
    with pytest.raises(ConfigError, match="plugin second"):
        manager_with(
            {"name": "first", "module": path},
            {"name": "second", "module": path, "settings": {"level": 0}},
        )
    assert closed == ["first"]


def test_a_plugin_gets_a_copy_of_its_settings(package) -> None:
    """It may change what it was handed; the settings stay frozen."""
    (package / "strange.py").write_text(
        "from compressed_backend import CompressedBackend\n"
        "class Greedy(CompressedBackend):\n"
        "    @classmethod\n"
        "    def from_settings(cls, settings, allocator_backend):\n"
        "        settings['deep'].clear()\n"
        "        return cls(allocator_backend, 1)\n"
    )
    plugin = PluginSettings(name="far", module="strange:Greedy", settings={"deep": {"a": 1}})
    pool = make_pool(1)
    assert build_plugin(plugin, pool, taken=[]).name == "far"
    assert plugin.settings == {"deep": {"a": 1}}
    pool.close()
