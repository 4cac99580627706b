"""Which settings of vLLM are part of the identity: all that KV depends on, and no other."""

from __future__ import annotations

import dataclasses

import pytest
from vllm.config import ModelConfig
from vllm.config.lora import LoRAConfig
from vllm.config.multimodal import MultiModalConfig

from kvkeep.connectors.vllm import identity
from kvkeep.connectors.vllm.identity import (
    adapter_facts,
    are_inputs_hashed,
    config_digest,
    weights_revision,
)
from kvkeep.errors import IdentityError

#: What KV does not depend on, or what stands in the identity by itself.
OTHER_MODEL_FIELDS = {
    "allow_deprecated_quantization",
    "allowed_local_media_path",
    "allowed_media_domains",
    "disable_cascade_attn",
    "enable_cumem_allocator",
    "enable_nccl_comm_suspend",
    "enable_prompt_embeds",
    "enable_sleep_mode",
    "enable_trace_replay",
    "enforce_eager",
    "generation_config",
    "hf_config",  # whole, by itself
    "hf_config_path",
    "hf_overrides",  # they are in hf_config
    "hf_text_config",
    "hf_token",
    "io_processor_plugin",
    "is_submodel_config",
    "logits_processors",
    "logprobs_mode",
    "max_logprobs",
    "max_model_len",  # where it chooses RoPE's factors
    "model",  # by itself
    "model_weights",
    "multimodal_config",  # see below
    "override_generation_config",
    "pooler_config",
    "renderer_num_workers",
    "return_sampling_mask",
    "revision",  # by the commit
    "seed",
    "served_model_name",
    "skip_tokenizer_init",
    "sleep_mode_backend",
    "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names",
    "spec_target_max_model_len",
    "tokenizer",
    "tokenizer_mode",
    "tokenizer_revision",
    "trust_remote_code",
    "use_fp64_gumbel",
    "word_embeddings_untied_by_checkpoint",
}
OTHER_INPUT_FIELDS = {
    "allow_missing_mm_embeddings",
    "enable_mm_embeds",
    "interleave_mm_strings",
    "limit_per_prompt",
    "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path",
    "mm_encoder_only",
    "mm_encoder_tp_mode",
    "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
}
OTHER_ADAPTER_FIELDS = {
    "default_mm_loras",  # the request names it
    "enable_mixed_moe_lora_format",  # the request says it
    "enable_moe_shared_loras",
    "fully_sharded_loras",
    "max_cpu_loras",
    "max_lora_cls_labels",
    "max_lora_rank",
    "max_loras",
    "specialize_active_lora",
}
LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "original_max_position_embeddings": 128,
    }
}


@pytest.mark.parametrize(
    ("config", "named", "others"),
    [
        (ModelConfig, identity.MODEL_FIELDS, OTHER_MODEL_FIELDS),
        (MultiModalConfig, identity.INPUT_FIELDS, OTHER_INPUT_FIELDS),
        (LoRAConfig, identity.ADAPTER_FIELDS, OTHER_ADAPTER_FIELDS),
    ],
    ids=["model", "inputs", "adapters"],
)
def test_every_setting_is_in_the_identity_or_known_not_to_matter(config, named, others):
    """A setting that a release of vLLM adds has to be looked at."""
    fields = {field.name for field in dataclasses.fields(config)}
    assert set(named) <= fields
    assert fields - set(named) == others


@pytest.mark.parametrize("field", identity.MODEL_FIELDS)
def test_fault_9_how_the_model_is_made(field, engine_config):
    """Fault 9: the same weights, quantised otherwise while they are loaded, say."""
    config = engine_config()
    before = config_digest(config)
    setattr(config.model_config, field, "another")
    assert config_digest(config) != before


@pytest.mark.parametrize("field", identity.INPUT_FIELDS)
def test_fault_9_how_images_are_read(field, engine_config):
    """Fault 9: vLLM's hash of an image says nothing of the engine's own processor settings."""
    config = engine_config()
    config.model_config.multimodal_config = MultiModalConfig()
    before = config_digest(config)
    setattr(config.model_config.multimodal_config, field, "another")
    assert config_digest(config) != before


def test_fault_9_the_length_chooses_the_factors_of_long_rope(engine_config):
    """Fault 9: vLLM takes the long factors where ``max_model_len`` is beyond the original one."""
    roots = {
        config_digest(engine_config(hf_overrides=LONG_ROPE, max_model_len=length))
        for length in (128, 256)
    }
    assert len(roots) == 2


def test_the_length_alone_changes_no_identity(engine_config):
    roots = {config_digest(engine_config(max_model_len=length)) for length in (128, 256)}
    assert len(roots) == 1


@pytest.mark.parametrize("load_format", ["tensorizer", "modelexpress", "ipc_cache"])
def test_fault_9_weights_from_elsewhere_need_a_revision(load_format, engine_config):
    """Fault 9: the folder of the model is not where the weights come from."""
    config = engine_config()
    config.load_config.load_format = load_format
    with pytest.raises(IdentityError, match=r"identity\.revision"):
        weights_revision(config)


def test_fault_9_an_object_store_needs_a_revision(engine_config):
    """Fault 9: vLLM mirrors the config of a model in S3, and streams its weights."""
    config = engine_config()
    assert weights_revision(config).startswith("files:")
    config.load_config.load_format = "runai_streamer"
    assert weights_revision(config).startswith("files:")
    config.model_config.model_weights = "s3://bucket/model"
    with pytest.raises(IdentityError, match=r"identity\.revision"):
        weights_revision(config)


def test_fault_9_the_commit_of_another_config_is_not_that_of_the_weights(engine_config):
    """Fault 9: ``--hf-config-path`` names the repository that the commit belongs to."""
    config = engine_config()
    config.model_config.model = "org/name-that-is-no-folder"
    config.model_config.hf_config._commit_hash = "abc123"
    assert weights_revision(config) == "commit:abc123"
    config.model_config.hf_config_path = "org/other"
    with pytest.raises(IdentityError, match=r"identity\.revision"):
        weights_revision(config)


def test_adapters_are_named_with_the_settings_that_apply_them(engine_config):
    config = engine_config()
    assert adapter_facts(config) == ""
    texts = set()
    for targets in (None, ["q_proj"]):
        config.lora_config = LoRAConfig(target_modules=targets)
        texts.add(adapter_facts(config))
    assert len(texts) == 2


def test_vllm_counts_images_where_nobody_needs_their_hash(engine_config):
    config = engine_config(enable_prefix_caching=False)
    assert are_inputs_hashed(config)
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=0)
    assert not are_inputs_hashed(config)
    config.cache_config.enable_prefix_caching = True
    assert are_inputs_hashed(config)
