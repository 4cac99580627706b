"""Fault 9 through transformers: other weights, another RoPE, another salt share no KV."""

from __future__ import annotations

import copy

import pytest
import torch

from kvkeep.connectors.hf import attach
from kvkeep.connectors.hf.identity import config_digest, weights_fingerprint, weights_state
from kvkeep.errors import IdentityError, LayoutError

pytestmark = pytest.mark.engine

GREEDY = {"do_sample": False, "max_new_tokens": 4}


def test_fault_9_equal_weights_have_equal_fingerprints(tiny) -> None:
    assert weights_fingerprint(tiny(seed=1)) == weights_fingerprint(tiny(seed=1))
    assert weights_fingerprint(tiny(seed=1)) != weights_fingerprint(tiny(seed=2))
    assert weights_fingerprint(tiny()) != weights_fingerprint(tiny(dtype=torch.bfloat16))


def test_fault_9_every_single_weight_counts(tiny) -> None:
    model = tiny()
    before = weights_fingerprint(model)
    for name, tensor in model.named_parameters():
        flat = tensor.detach().reshape(-1)
        place = len(flat) // 3
        old = flat[place].item()
        flat[place] = old + 1.0
        assert weights_fingerprint(model) != before, name
        flat[place] = old
    assert weights_fingerprint(model) == before


def test_fault_9_rope_and_attention_are_in_the_config_digest(tiny) -> None:
    plain = tiny()
    other = tiny(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    eager = tiny(attn_implementation="eager")
    assert config_digest(plain) == config_digest(tiny())
    assert len({config_digest(item) for item in (plain, other, eager)}) == 3
    assert weights_fingerprint(plain) != weights_fingerprint(other)  # its inv_freq buffer


def test_fault_9_weights_that_change_after_attach_are_noticed(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        weight = model.model.layers[0].self_attn.k_proj.weight
        old = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(-1.5)
        changed = model.generate(ids, **GREEDY)
        assert torch.equal(kept.generate(ids, **GREEDY), changed)
        assert kept.last_call.num_found == 0
        assert torch.equal(kept.generate(ids, **GREEDY), changed)
        assert kept.last_call.num_found == 32
        with torch.no_grad():
            weight.copy_(old)
        kept.generate(ids, **GREEDY)
        assert kept.last_call.num_found == 32  # the first weights' KV, stored at the beginning


def test_fault_9_a_replaced_parameter_is_noticed(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        model.load_state_dict(tiny(seed=8).state_dict())
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert kept.last_call.num_found == 0
        layer = model.model.layers[1].self_attn
        layer.v_proj.weight = torch.nn.Parameter(layer.v_proj.weight.detach() * 2)
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert kept.last_call.num_found == 0


@pytest.mark.parametrize("is_inference", [False, True], ids=["data", "inference mode"])
def test_fault_9_weights_that_change_without_a_count_are_noticed(
    is_inference, tiny, keep, prompt
) -> None:
    """Fault 9: torch counts no write to ``.data``, nor to weights made in inference mode."""
    with torch.inference_mode(is_inference):
        model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        with torch.inference_mode(is_inference):
            for weight in model.parameters():
                weight.data.mul_(1.3)
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert kept.last_call.num_found == 0


def test_fault_9_a_changed_config_is_noticed(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        model.set_attn_implementation("eager")
        assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        assert kept.last_call.num_found == 0


def test_weights_state_is_stable_while_generating(tiny, prompt) -> None:
    model = tiny()
    state = weights_state(model)
    model.generate(prompt(20), **GREEDY)
    assert weights_state(model) == state
    assert weights_state(copy.deepcopy(model)) != state


def test_a_revision_takes_the_place_of_the_fingerprint(tiny, keep, prompt) -> None:
    model = tiny()
    with attach(model, revision="r1", name="a model", salt="tenant") as kept:
        kept.generate(prompt(4), **GREEDY)


def test_weights_that_are_not_there_need_a_revision() -> None:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
            )
        )
    with pytest.raises(IdentityError, match="revision"):
        weights_fingerprint(model)


def test_adapters_are_refused(tiny, keep, prompt) -> None:
    model = tiny()
    with keep(model) as kept:
        model._hf_peft_config_loaded = True
        with pytest.raises(LayoutError, match="adapters"):
            attach(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(LayoutError, match="adapters"):
            kept.generate(prompt(4), **GREEDY)
        model._hf_peft_config_loaded = False
