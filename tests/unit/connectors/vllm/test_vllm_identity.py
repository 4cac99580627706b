"""What a vLLM worker's KV belongs to, and which layouts are kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from kvkeep.config import IdentitySettings, Settings
from kvkeep.connectors.vllm import KVKeepConnector, identity
from kvkeep.connectors.vllm import identity as layout
from kvkeep.connectors.vllm.build import engine_settings, socket_paths
from kvkeep.connectors.vllm.identity import (
    check_supported,
    declare_layout,
    engine_text,
    fingerprint_files,
    worker_identity,
)
from kvkeep.errors import ConfigError, IdentityError, LayoutError, LookupServiceError

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
PER_TOKEN = KVQuantMode.INT8_PER_TOKEN_HEAD
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)


def caches_config(spec=SPEC, groups: int = 1, **more) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec) for _ in range(groups)],
        kv_cache_layout=more.pop("kv_cache_layout", "LBHNC"),
        **more,
    )


def caches(num_blocks: int = 10, shape=(2, 16, 16), dtype=torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.zeros((num_blocks, *shape), dtype=dtype) for name in LAYERS}


@pytest.fixture
def make_identity(engine_config, tiny_model_dir, tmp_path):
    """The identity of a worker of the tiny model, which has weights for this test."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path)
    (path / "pytorch_model.bin").write_bytes(b"weights")

    def make(settings: IdentitySettings | None = None, *, cache_config=None, **engine_args):
        config = engine_config(model=str(path), **engine_args)
        declared, _ = declare_layout(config, cache_config or caches_config(), caches())
        return worker_identity(
            config, declared, chunk_size=32, settings=settings or IdentitySettings()
        )

    make.path = path
    return make


def test_the_same_worker_has_the_same_identity(make_identity):
    assert make_identity() == make_identity()


def test_fault_9_two_revisions_of_the_weights(make_identity):
    """Fault 9: the folder's name stays, the weights change."""
    before = make_identity()
    (make_identity.path / "pytorch_model.bin").write_bytes(b"Weights")
    assert make_identity().root() != before.root()


def test_fault_9_two_rope_settings(make_identity):
    """Fault 9: RoPE given by the model's config, or on the command line."""
    roots = [make_identity().root()]
    rope = {"rope_type": "default", "rope_theta": 5e5}
    roots.append(make_identity(hf_overrides={"rope_parameters": rope}).root())
    config_path = make_identity.path / "config.json"
    config = json.loads(config_path.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 6e5}
    config_path.write_text(json.dumps(config))
    roots.append(make_identity().root())
    assert len(set(roots)) == 3


def test_fault_9_what_the_engine_runs_with(make_identity):
    """Fault 9: the model's dtype and parallelism change KV as well."""
    roots = {
        make_identity().root(),
        make_identity(dtype="bfloat16").root(),
        make_identity(IdentitySettings(tags=(("a", "b"),))).root(),
        make_identity(IdentitySettings(model="other")).root(),
        make_identity(IdentitySettings(revision="r1")).root(),
        make_identity(cache_config=caches_config(kv_cache_layout="BLHNC")).root(),
    }
    assert len(roots) == 6


def test_a_given_revision_needs_no_files(make_identity):
    settings = IdentitySettings(revision="r1")
    before = make_identity(settings)
    (make_identity.path / "pytorch_model.bin").write_bytes(b"Weights")
    assert make_identity(settings) == before


def test_a_hub_model_is_named_by_its_commit(engine_config):
    config = engine_config()
    config.model_config.model = "org/name-that-is-no-folder"
    with pytest.raises(IdentityError, match=r"identity\.revision"):
        identity.weights_revision(config)
    config.model_config.hf_config._commit_hash = "abc123"
    assert identity.weights_revision(config) == "commit:abc123"


def test_fault_9_dummy_weights_belong_to_one_engine(engine_config):
    """Fault 9: a trainer replaces them, so those of the next start are others."""
    config = engine_config(load_format="dummy")
    assert identity.weights_revision(config) == identity.weights_revision(config)
    again = engine_config(load_format="dummy")
    assert identity.weights_revision(config) != identity.weights_revision(again)


def test_large_folders_are_sampled(tmp_path, monkeypatch):
    """Every sampled byte, every size and every time of change counts."""
    monkeypatch.setattr(identity, "FULL_HASH_BYTES", 1000)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 16)
    file = tmp_path / "model.safetensors"
    content = bytearray(5000)
    file.write_bytes(content)
    seen = {fingerprint_files(tmp_path), fingerprint_files(file)}
    assert len(seen) == 1
    for position in (0, 4999):
        content[position] = 1
        file.write_bytes(content)
        seen.add(fingerprint_files(tmp_path))
    assert len(seen) == 3
    (tmp_path / "notes.txt").write_text("no part of the model")
    assert fingerprint_files(tmp_path) in seen


def test_a_folder_without_a_model_has_no_fingerprint(tmp_path):
    with pytest.raises(IdentityError, match="no file of a model"):
        fingerprint_files(tmp_path)


def test_fault_8_the_instruction_set_is_part_of_the_layout(engine_config, monkeypatch):
    """Fault 8: page bytes of hosts with and without AMX differ at the same size."""
    config = engine_config()
    texts = set()
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda value=has_amx: value)
        texts.add(engine_text(config, caches_config(), caches()[LAYERS[0]]))
    packed = SimpleNamespace(isa="amx", get_attn_backend=lambda: SimpleNamespace(get_name=str))
    config.compilation_config.static_forward_context["layer"] = packed
    texts.add(engine_text(config, caches_config(), caches()[LAYERS[0]]))
    assert len(texts) == 3


def test_fault_6_layouts_of_one_shape_differ(engine_config):
    """Fault 6: the order of the dimensions in memory is declared, not seen in a shape."""
    config = engine_config()
    plain = torch.zeros(10, 2, 16, 16)
    turned = torch.zeros(10, 16, 2, 16).transpose(1, 2)
    assert plain.shape == turned.shape
    texts = {engine_text(config, caches_config(), tensor) for tensor in (plain, turned)}
    texts.add(engine_text(config, caches_config(kv_cache_layout="LBNHC"), plain))
    texts.add(engine_text(config, caches_config(), plain.to(torch.int32)))
    assert len(texts) == 4


def test_declared_layout(engine_config):
    declared, tensors = declare_layout(engine_config(), caches_config(), caches())
    assert declared.page_size == 16
    assert declared.groups[0].num_layers == len(tensors) == 2
    assert declared.groups[0].layer_page_bytes == 2 * 16 * 16 * 4
    assert "layout=LBHNC" in declared.engine


@pytest.mark.parametrize(
    ("cache_config", "reason"),
    [
        (caches_config(groups=2), "one group"),
        (
            caches_config(
                SlidingWindowSpec(
                    block_size=16,
                    num_kv_heads=2,
                    head_size=8,
                    dtype=torch.float32,
                    sliding_window=32,
                )
            ),
            "no full attention",
        ),
        (caches_config(replace(SPEC, non_causal=True)), "not causal"),
        (caches_config(replace(SPEC, tokens_per_state=2)), "single token"),
        (caches_config(replace(SPEC, kv_quant_mode=PER_TOKEN)), "a scale per token"),
    ],
    ids=["groups", "sliding", "non-causal", "states", "scales"],
)
def test_what_kvkeep_cannot_keep_is_refused(engine_config, cache_config, reason):
    with pytest.raises(LayoutError, match=reason):
        check_supported(engine_config(), cache_config)


def test_a_diffusion_model_is_refused(engine_config):
    """It attends to a canvas whose tokens it goes on changing."""
    config = engine_config()
    config.model_config.__dict__["is_diffusion"] = True
    with pytest.raises(LayoutError, match="not causal"):
        check_supported(config, caches_config())


def test_a_parallel_engine_that_splits_blocks_is_refused(engine_config):
    config = engine_config()
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(LayoutError, match="context parallelism"):
        check_supported(config, caches_config())


@pytest.mark.parametrize(
    ("registered", "reason"),
    [
        ({LAYERS[0]: torch.zeros(10, 2, 16, 16)}, "no KV cache for model.layers.1"),
        (caches(num_blocks=20, shape=(2, 8, 16)), "declares 10 blocks"),
    ],
    ids=["missing", "split"],
)
def test_caches_that_are_not_as_declared_are_refused(engine_config, registered, reason):
    with pytest.raises(LayoutError, match=reason):
        declare_layout(engine_config(), caches_config(), registered)


def connector(engine_config, role, cache_config, extra):
    transfer = KVTransferConfig(
        kv_connector="KVKeepConnector",
        kv_connector_module_path="kvkeep.connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    return KVKeepConnector(engine_config(kv_transfer_config=transfer), role, cache_config)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unsupported_model_runs_without_kvkeep(engine_config, role, tmp_path, caplog):
    """No exception; the reason is in the log; every hook works."""
    extra = {"lookup.socket_dir": str(tmp_path)}
    off = connector(engine_config, role, caches_config(groups=2), extra)
    off.register_kv_caches(caches())
    assert off.get_num_new_matched_tokens(None, 0) == (0, False)
    off.update_state_after_alloc(None, None, 0)
    off.bind_connector_metadata(off.build_connector_meta(None))
    off.start_load_kv(None)
    off.wait_for_save()
    assert off.get_block_ids_with_load_errors() == set()
    assert off.get_finished({"r"}) == (None, None)
    assert off.request_finished(None, []) == (False, None)
    assert off.reset_cache()
    assert off.build_connector_worker_meta() is None
    assert off.get_kv_connector_stats() is None
    off.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_pages_that_are_not_contiguous_switch_kvkeep_off(engine_config, tmp_path):
    extra = {"lookup.socket_dir": str(tmp_path), "identity.revision": "r", "chunk_size": 32}
    off = connector(engine_config, KVConnectorRole.WORKER, caches_config(), extra)
    strided = {name: torch.zeros(10, 2, 16, 32)[..., ::2] for name in LAYERS}
    off.register_kv_caches(strided)
    assert off.failures == {"register_kv_caches": 1}
    assert off._worker is None
    off.shutdown()


def test_a_scheduler_without_workers_is_off(engine_config, tmp_path, monkeypatch):
    monkeypatch.setattr("kvkeep.connectors.vllm.build.HELLO_TIMEOUT_S", 0.1)
    extra = {"lookup.socket_dir": str(tmp_path), "chunk_size": 32}
    off = connector(engine_config, KVConnectorRole.SCHEDULER, caches_config(), extra)
    assert off.failures == {"_start_scheduler": 1}
    assert off.get_num_new_matched_tokens(None, 0) == (0, False)
    off.shutdown()


@pytest.mark.parametrize("role", list(KVConnectorRole))
@pytest.mark.parametrize(
    "extra", [{"chunk_sise": 32}, {"chunk_size": "many"}, {"cpu": {"sise": "1GiB"}}], ids=str
)
def test_fault_45_a_wrong_setting_stops_the_start(engine_config, role, extra):
    """Fault 45: a misspelt setting was ignored with a warning."""
    with pytest.raises(ConfigError):
        connector(engine_config, role, caches_config(), extra)


@pytest.mark.parametrize(
    ("block_size", "chunk_size"), [(1, 256), (16, 256), (128, 256), (48, 288), (544, 544)]
)
def test_the_default_chunk_is_a_whole_number_of_blocks(block_size, chunk_size):
    assert engine_settings({}, {}, block_size=block_size).chunk_size == chunk_size


def test_a_chunk_size_that_was_asked_for_is_never_changed():
    for extra, env in (({"chunk_size": 200}, {}), ({}, {"KVKEEP_CHUNK_SIZE": "200"})):
        with pytest.raises(ConfigError, match=r"chunk_size = 200 .* 256 is"):
            engine_settings(extra, env, block_size=128)


def test_extra_config_wins_over_the_environment():
    env = {"KVKEEP_CHUNK_SIZE": "128", "KVKEEP_STORE_DECODE": "true"}
    settings = engine_settings({"chunk_size": 512}, env, block_size=128)
    assert (settings.chunk_size, settings.store_decode) == (512, True)


def test_socket_paths_are_one_per_rank(tmp_path):
    settings = Settings.model_validate({"lookup": {"socket_dir": str(tmp_path)}})
    paths = socket_paths(settings, {}, engine_id="e", world_size=4)
    assert len(set(paths)) == 4
    long = Settings.model_validate({"lookup": {"socket_dir": "/" + "d" * 120}})
    with pytest.raises(LookupServiceError):
        socket_paths(long, {}, engine_id="e", world_size=1)


def test_the_layout_module_names_every_backend(engine_config):
    config = engine_config()
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"))
    config.compilation_config.static_forward_context["layer"] = layer
    assert layout._backend_names(config) == {"CPU_ATTN"}
