"""What the transformers connector refuses, and that the message names it (fault 6)."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache

from kvkeep.config import load_settings
from kvkeep.connectors.hf import attach
from kvkeep.errors import LayoutError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "kind, config, words",
    [
        ("Mistral", {"sliding_window": 32}, "DynamicSlidingWindowLayer"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "LinearAttentionLayer"),
        ("Gemma2", {"sliding_window": 32}, "DynamicSlidingWindowLayer"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
    ],
)
def test_other_caches_are_refused(tiny, kind, config, words) -> None:
    with pytest.raises(LayoutError, match=words):
        attach(tiny(kind, **config))


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(LayoutError):
        attach(transformers.MambaForCausalLM(config).eval())


def test_fault_9_attention_that_is_not_causal_is_refused(tiny) -> None:
    """Fault 9: the KV of a prefix would differ with what follows it."""
    with pytest.raises(LayoutError, match="not causal"):
        attach(tiny(is_causal=False))


def test_a_model_that_counts_padding_as_positions_takes_no_padded_batch(prompt, left_pad) -> None:
    """Its KV behind padding is not that of the prompt alone."""
    config = transformers.TrOCRConfig(
        vocab_size=128,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        eos_token_id=None,
        pad_token_id=0,
        init_std=0.3,
    )
    model = transformers.TrOCRForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids, mask = left_pad([prompt(40), prompt(20)])
    with attach(model, load_settings(extra={"chunk_size": 16, "cpu.size": "16MiB"})) as kept:
        with pytest.raises(ValueError, match="padded"):
            kept.generate(ids, attention_mask=mask, max_new_tokens=4)
        for _ in range(2):
            plain = model.generate(prompt(40), do_sample=False, max_new_tokens=4)
            assert torch.equal(kept.generate(prompt(40), do_sample=False, max_new_tokens=4), plain)
        assert kept.last_call.num_found == 32


def test_a_wrapper_without_generate_is_refused(tiny) -> None:
    with pytest.raises(LayoutError, match=r"OptimizedModule .* the model itself"):
        attach(torch.compile(tiny(), backend="eager"))


def test_a_model_that_keeps_no_cache_is_refused() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(LayoutError, match="NoneType"):
        attach(transformers.OpenAIGPTLMHeadModel(config).eval())


def test_a_model_in_training_mode_is_attached_and_stays_in_it(tiny) -> None:
    model = tiny(attention_dropout=0.5).train()
    model.lm_head.eval()
    attach(model).close()
    assert model.training
    assert model.model.layers[0].training
    assert not model.lm_head.training


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_fault_9_hooks_are_refused(kind, tiny, keep, prompt) -> None:
    """Fault 9: a hook steers the model, with the same weights and the same config."""

    def steer(module, args, output=None):
        changed = args[0] if output is None else output
        return (changed + 0.5, *args[1:]) if output is None else changed + 0.5

    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, max_new_tokens=2)
        hook = getattr(model.model.layers[0].mlp, kind)(steer)
        with pytest.raises(LayoutError, match=r"layers\.0\.mlp has a forward hook"):
            kept.generate(ids, max_new_tokens=2)
        with pytest.raises(LayoutError, match="forward hook"):
            attach(model)
        hook.remove()
        model.generate(ids, max_new_tokens=2, output_hidden_states=True)  # with hooks of its own
        expected = model.generate(ids, do_sample=False, max_new_tokens=4)
        assert torch.equal(kept.generate(ids, do_sample=False, max_new_tokens=4), expected)
        assert kept.last_call.num_found == 32


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4
    )
    with pytest.raises(LayoutError, match="encoder-decoder"):
        attach(transformers.T5ForConditionalGeneration(config).eval())


def test_k_and_v_of_different_sizes_are_refused() -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=1,
    )
    with pytest.raises(LayoutError, match="layer 0 of DeepseekV3ForCausalLM keeps"):
        attach(transformers.DeepseekV3ForCausalLM(config).eval())


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"past_key_values": DynamicCache()}, LayoutError, "past_key_values"),
        ({"cache_implementation": "static"}, LayoutError, "cache_implementation='static'"),
        ({"cache_implementation": "quantized"}, LayoutError, "cache_implementation='quantized'"),
        ({"use_cache": False}, LayoutError, "use_cache"),
        ({"inputs_embeds": torch.zeros(1, 4, 64)}, ValueError, "inputs_embeds"),
        ({"position_ids": torch.arange(4)[None]}, ValueError, "position_ids"),
        ({"token_type_ids": torch.zeros(1, 4)}, ValueError, "token_type_ids"),
        ({"max_new_tokns": 4}, ValueError, "max_new_tokns"),
        ({"output_attentions": True}, ValueError, "output_attentions"),
        ({"output_hidden_states": True}, ValueError, "output_hidden_states"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "prompt_lookup_num_tokens"),
        ({"prefill_chunk_size": 8}, ValueError, "prefill_chunk_size"),
        ({"negative_prompt_ids": torch.ones(1, 4)}, ValueError, "negative_prompt_ids"),
        ({"guidance_scale": 1.5}, ValueError, "guidance_scale"),
        ({"custom_generate": lambda: None}, ValueError, "custom_generate"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, ValueError, "padded on the right"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, ValueError, "holes"),
        ({"attention_mask": torch.zeros(1, 4)}, ValueError, "nothing but padding"),
        ({"attention_mask": torch.ones(1, 5)}, ValueError, "attention_mask has the shape"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.long)}, ValueError, "once"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_are_refused(tiny, keep, prompt, options, error, words) -> None:
    with keep(tiny()) as kept:
        with pytest.raises(error, match=words):
            kept.generate(prompt(4), **options)
        assert kept.engine.check().used_bytes == 0


@pytest.mark.parametrize(
    "ids, words",
    [
        (None, "needs the prompt"),
        (torch.ones(4, dtype=torch.long), "rows, tokens"),
        (torch.ones((1, 0), dtype=torch.long), "not empty"),
        (torch.ones((1, 4)), "integers"),
        ([[1, 2, 3]], "list"),
    ],
)
def test_prompts_that_are_refused(tiny, keep, ids, words) -> None:
    with keep(tiny()) as kept, pytest.raises(ValueError, match=words):
        kept.generate(ids)


def test_an_assistant_model_is_refused(tiny, keep, prompt) -> None:
    with keep(tiny()) as kept, pytest.raises(LayoutError, match="assistant_model"):
        kept.generate(prompt(4), assistant_model=tiny(seed=2))


def test_options_that_are_off_are_not_refused(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(20)
    options = {
        "output_attentions": False,
        "guidance_scale": 1.0,
        "assistant_model": None,
        "use_cache": True,
        "do_sample": False,
        "max_new_tokens": 3,
    }
    with keep(model) as kept:
        assert torch.equal(kept.generate(ids, **options), model.generate(ids, **options))
