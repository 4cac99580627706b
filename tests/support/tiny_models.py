"""Tiny models with random weights, for tests of engines. Needs transformers.

What they say is nonsense, but always the same, and depends on every token before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
_LAYERS = 2
_MAX_TOKENS = 2048


def make_llama(directory: Path) -> Path:
    """Grouped attention: 4 heads, 2 of them for keys and values, so that 2 ranks have one each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=_MAX_TOKENS,
    )
    return _save(LlamaForCausalLM, config, directory)


def make_latent(directory: Path) -> Path:
    """Latent attention as in DeepSeek-V2, with the sizes that vLLM's CPU build has kernels for."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=_LAYERS,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        max_position_embeddings=_MAX_TOKENS,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
    )
    return _save(DeepseekV2ForCausalLM, config, directory)


def _save(kind: Any, config: Any, directory: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).to(torch.float32).save_pretrained(directory)
    return directory
