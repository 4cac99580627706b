"""Every setting has the effect that its page says: the test that shows it, by name.

A setting that nobody shows fails here, and so does a test that is gone or speaks of something else.
What no other test shows is shown below.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvkeep.config import load_settings
from kvkeep.config.load import setting_fields
from kvkeep.engine.build import CacheManager, open_ranks
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.memory.factory import initialize_allocator
from kvkeep.memory.placement import WorkerPlace
from kvkeep.metrics import Metrics
from support.paged_engine import PagedEngine

TESTS = Path(__file__).parents[2]
TOKENS = list(range(48))

_CODECS = "unit/test_manager_codecs.py"
_DISK = "unit/test_manager_disk.py"
_HF = "engine/hf/test_hf_options.py"
_OBSERVING = "unit/test_observing.py"
_POOL = "unit/test_manager_pool.py"
_REMOTE = "unit/test_manager_remote.py"
_VLLM = "unit/connectors/vllm/test_vllm_scheduler.py"
_WAITING = "unit/connectors/vllm/test_vllm_waiting.py"
_WIRED = "test_fault_46_every_setting_of_the_connector_has_its_effect"

#: Setting: file and name of the test that shows its effect.
SHOWN = {
    "save_unfull_chunk": ("unit/test_manager.py", "test_settings_have_an_effect"),
    "store_decode": (_HF, "test_store_decode_keeps_generated_tokens"),
    "remove_after_retrieve": ("unit/test_remove_after_retrieve.py", "test_it_is_a_setting"),
    "cpu.policy": ("unit/test_manager.py", "test_settings_have_an_effect"),
    "cpu.first_rank_size": (_POOL, "test_the_first_rank_of_a_latent_attention_model"),
    "cpu.reserve": (_POOL, "test_the_reserve_makes_it_smaller_or_is_an_error"),
    "cpu.buffers": (_POOL, "test_byte_buffers_have_a_pool_of_their_own_or_share_the_one_for_kv"),
    "cpu.allocator": (_POOL, "test_slots_that_can_be_registered"),
    "cpu.numa": (_POOL, "test_the_node_that_the_map_gives"),
    "cpu.shared_name": (_POOL, "test_memory_that_other_processes_can_map"),
    "cpu.prefault": (_POOL, "test_memory_is_committed_ahead_where_it_is_wanted"),
    "cpu.huge_pages": (_POOL, "test_huge_pages_are_asked_for_or_not"),
    "cpu.copy_threads": (_VLLM, _WIRED),
    "disk.path": (_DISK, "test_a_prompt_is_found_after_a_restart"),
    "disk.size": (_DISK, "test_clear_and_the_budget"),
    "disk.policy": (_DISK, "test_settings_of_the_disk"),
    "disk.threads": (_DISK, "test_settings_of_the_disk"),
    "disk.queue": (_DISK, "test_settings_of_the_disk"),
    "disk.codec": (_CODECS, "test_files_and_the_budget_count_encoded_bytes"),
    "remote.url": (_REMOTE, "test_a_prompt_is_found_by_another_engine"),
    "remote.codec": (_REMOTE, "test_a_prompt_is_found_by_another_engine"),
    "remote.threads": (_REMOTE, "test_settings_of_the_remote_tier"),
    "remote.queue": (_REMOTE, "test_settings_of_the_remote_tier"),
    "remote.load_timeout": (_REMOTE, "test_settings_of_the_remote_tier"),
    "remote.store_timeout": (_REMOTE, "test_settings_of_the_remote_tier"),
    "remote.connect_timeout": (_REMOTE, "test_settings_of_the_remote_tier"),
    "remote.lookup_share": (_REMOTE, "test_settings_of_the_remote_tier"),
    "lookup.timeout": (_VLLM, _WIRED),
    "lookup.lease": (_VLLM, _WIRED),
    "lookup.socket_dir": (_VLLM, _WIRED),
    "prefetch.enabled": (_WAITING, "test_prefetches_can_be_switched_off"),
    "prefetch.memory": (_WAITING, "test_fault_46_the_memory_of_waiting_requests_is_bounded"),
    "load.asynchronous": (_WAITING, "test_a_load_between_steps"),
    "identity.model": (_VLLM, _WIRED),
    "identity.tags": (_VLLM, _WIRED),
    "identity.revision": (
        "unit/connectors/vllm/test_vllm_identity.py",
        "test_a_given_revision_needs_no_files",
    ),
    "health.interval": (_POOL, "test_health_settings_reach_the_checks"),
    "health.timeout": (_POOL, "test_health_settings_reach_the_checks"),
    "metrics.listen": (_OBSERVING, "test_the_manager_serves_its_metrics_until_it_is_closed"),
    "metrics.token": (_OBSERVING, "test_token_and_certificate_reach_the_endpoint"),
    "metrics.tls_cert": (_OBSERVING, "test_token_and_certificate_reach_the_endpoint"),
    "metrics.tls_key": (_OBSERVING, "test_token_and_certificate_reach_the_endpoint"),
    "tracing.spans": (_OBSERVING, "test_spans_are_made_where_the_settings_ask_for_them"),
    "log.format": (_OBSERVING, "test_json_logs_are_one_object_per_line"),
    "plugins": ("unit/test_plugins.py", "test_a_plugin_is_a_tier_below_all_others"),
    "ranks.save_only_first_rank": (
        "unit/connectors/vllm/test_vllm_place.py",
        "test_it_can_be_switched_off",
    ),
}


def shows(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test below shows these settings."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            SHOWN[name] = ("unit/config/test_every_setting.py", test.__name__)
        return test

    return note


@contextmanager
def running(model: PagedEngine, **extra: object) -> Iterator[CacheManager]:
    """A manager over a small engine; ``__`` in a name stands for the dot."""
    given = {name.replace("__", "."): value for name, value in extra.items()}
    settings = load_settings(extra={"chunk_size": 8, "cpu.size": "64KiB", **given})
    connector = PagedGPUConnector(model.layout)
    connector.register_kv_caches(model.caches)
    identity = CacheIdentity("m", "1", model.layout, chunk_size=settings.chunk_size)
    with CacheManager.create(settings, identity, connector, place=WorkerPlace()) as manager:
        yield manager


def store(manager: CacheManager, model: PagedEngine, tokens: list[int] = TOKENS) -> int:
    model.prefill(tokens, range(model.num_pages_for(len(tokens))))
    slots = torch.arange(len(tokens))
    return manager.engine.store(tokens, kvcaches=None, slot_mapping=slots).num_tokens


@pytest.fixture
def model() -> PagedEngine:
    return PagedEngine(num_pages=16)


@shows("chunk_size")
@pytest.mark.parametrize(("size", "chunks"), [(8, 6), (12, 4), (16, 3)])
def test_a_chunk_has_so_many_tokens(model, size, chunks):
    with running(model, chunk_size=size) as manager:
        assert store(manager, model) == 48
        assert manager.engine.check().num_chunks == chunks


@shows("cpu.size")
def test_the_pool_has_this_size(model):
    for size in (64 << 10, 128 << 10):
        with running(model, cpu__size=size, cpu__buffers="0B") as manager:
            assert size // 2 < manager.engine.check().capacity_bytes <= size


@shows("cpu.alloc_timeout")
def test_a_load_waits_so_long_for_memory(model):
    """Nobody gives memory back here, so the time is over and the load is a miss."""
    with running(model, cpu__alloc_timeout="123ms") as manager:
        pool = manager.storage.allocator_backend
        shape, dtype, fmt = PagedGPUConnector(model.layout).chunk_shape(8)
        waited = []
        pool.allocator.wait_for_release = lambda seen, seconds: waited.append(seconds)
        held = []
        while (one := pool.allocate(shape, dtype, fmt, busy_loop=False)) is not None:
            held.append(one)
        assert pool.allocate(shape, dtype, fmt, busy_loop=True) is None
        assert 0 < max(waited) <= 0.123
        for obj in held:
            obj.ref_count_down()


@shows("disk.load_timeout")
def test_a_load_from_the_disk_that_takes_longer_is_a_miss(model, tmp_path, monkeypatch):
    gate = threading.Event()
    with running(model, disk__path=str(tmp_path), disk__load_timeout="50ms") as manager:
        store(manager, model)
        disk = manager.storage.storage_backends["LocalDiskBackend"]
        assert disk.flush(30)
        keys = disk.keys()
        monkeypatch.setattr(
            type(disk._catalog.io), "open_read", lambda io, path: (gate.wait(30), None)[1]
        )
        assert disk.batched_get_blocking(keys[:1]) == [None]
        gate.set()
        assert disk.flush(30)


@shows("remote.ttl")
@pytest.mark.parametrize(("ttl", "found"), [("1ms", 0), ("1h", 48)])
def test_the_store_forgets_a_chunk_after_this_time(model, tmp_path, ttl, found):
    with running(model, remote__url=f"file://{tmp_path}", remote__ttl=ttl) as manager:
        store(manager, model)
        assert manager.storage.storage_backends["RemoteBackend"].flush(30)
        manager.engine.clear(["LocalCPUBackend"])
        time.sleep(0.01)
        assert manager.engine.lookup(TOKENS, lookup_id="a", pin=True) == found
        manager.engine.lookup_unpin("a")


@shows("ranks.timeout")
def test_a_load_waits_so_long_for_another_rank(model, tmp_path):
    """The other rank never comes."""
    settings = load_settings(extra={"ranks.timeout": "50ms"})
    place = WorkerPlace(rank=0, num_ranks=2)
    identity = CacheIdentity("m", "1", model.layout, chunk_size=8)
    metrics = Metrics()
    allocator = initialize_allocator(64 << 10, chunk_bytes=4096, huge_pages=False)
    group = open_ranks(
        settings.ranks, place, tmp_path / "r", identity, allocator=allocator, metrics=metrics
    )
    assert group._options.timeout_s == 0.05
    group.close()
    allocator.close()


@shows("prefetch.timeout")
def test_a_request_waits_so_long_for_its_chunks(model, tmp_path):
    with running(model, disk__path=str(tmp_path), prefetch__timeout="7s") as manager:
        assert manager.storage.prefetcher._options.timeout_s == 7


@shows("cost.enabled", "cost.retry")
def test_the_rule_of_costs_is_told(model):
    with running(model, cost__retry="3s") as manager:
        assert manager.storage.cost._options.enabled
        assert manager.storage.cost._options.retry_s == 3
    with running(model, cost__enabled=False) as manager:
        cost = manager.storage.cost
        cost.note_prefill(1_000_000, 1.0)
        cost.note_load("LocalDiskBackend", 1, 100.0)
        assert cost.admits("LocalDiskBackend", 1, prompt=b"")


ALL = [name for name, _ in setting_fields()]


def test_every_setting_is_shown():
    assert set(ALL) == set(SHOWN), "a setting without a test of its effect, or one that is gone"


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_the_test_is_there_and_speaks_of_it(name):
    file, test = SHOWN[name]
    source = (TESTS / file).read_text(encoding="utf-8")
    functions = {
        node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
    }
    assert test in functions, f"{name}: there is no {test} in {file}"
    last = name.rpartition(".")[2]
    assert last in source, f"{file} says nothing of {last}"
