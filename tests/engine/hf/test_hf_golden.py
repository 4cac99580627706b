"""Spec 11.4 through transformers: the same greedy tokens without kvkeep, cold and warm."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.engine

CHUNK = 16
BORDERS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 100]
GREEDY = {"do_sample": False, "max_new_tokens": 5}


def _full_chunks(length: int, chunk: int = CHUNK) -> int:
    return length // chunk * chunk


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_tiny_llama_at_every_border(tiny, keep, prompt, kv_heads) -> None:
    model = tiny(num_key_value_heads=kv_heads)
    with keep(model) as kept:
        for length in BORDERS:
            ids = prompt(length, seed=length)
            plain = model.generate(ids, **GREEDY)
            cold = kept.generate(ids, **GREEDY)
            assert kept.last_call.rows[0].num_found == 0, length
            assert kept.last_call.rows[0].num_stored == _full_chunks(length), length
            warm = kept.generate(ids, **GREEDY)
            assert torch.equal(cold, plain), length
            assert torch.equal(warm, plain), length
            assert kept.last_call.rows[0].num_found == _full_chunks(length), length
            assert kept.last_call.rows[0].num_loaded == min(_full_chunks(length), length - 1)


@pytest.mark.parametrize(
    "kind, config",
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": None}),
        ("Olmo2", {}),
        ("GPT2", {"n_inner": 96, "num_key_value_heads": 4}),
        ("GPTNeoX", {"num_key_value_heads": 4}),
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}),
    ],
)
def test_other_decoders(tiny, keep, prompt, kind, config) -> None:
    model = tiny(kind, **config)
    with keep(model) as kept:
        for length in (17, 48, 50):
            ids = prompt(length, seed=length)
            plain = model.generate(ids, **GREEDY)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)
            assert kept.last_call.num_found == _full_chunks(length)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(tiny, keep, prompt, attention) -> None:
    model = tiny(attn_implementation=attention)
    with keep(model) as kept:
        for length in (16, 40):
            ids = prompt(length)
            plain = model.generate(ids, **GREEDY)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)
            assert torch.equal(kept.generate(ids, **GREEDY), plain)


def test_shared_prefix_is_found_by_other_prompts(tiny, keep, prompt) -> None:
    model = tiny()
    shared = prompt(40)
    with keep(model) as kept:
        kept.generate(shared, **GREEDY)
        for seed in range(1, 4):
            ids = torch.cat([shared, prompt(3 * seed, seed=seed)], dim=1)
            assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
            assert kept.last_call.num_found == 32
        other = prompt(40, seed=9)
        kept.generate(other, **GREEDY)
        assert kept.last_call.num_found == 0


def test_batch_whose_rows_hit_different_lengths(tiny, keep, prompt, left_pad) -> None:
    model = tiny()
    long, middle = prompt(70, seed=1), prompt(40, seed=2)
    rows = [
        torch.cat([long, prompt(5, seed=3)], dim=1),  # 64 of 75 found
        torch.cat([middle[:, :20], prompt(9, seed=4)], dim=1),  # 16 of 29
        prompt(33, seed=5),  # nothing
        long[:, :48],  # all 48, of which 47 are used
        prompt(1, seed=6),
        prompt(1, seed=7),
    ]
    ids, mask = left_pad(rows)
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    with keep(model) as kept:
        kept.generate(long, **GREEDY)
        kept.generate(middle, **GREEDY)
        first = kept.generate(ids, attention_mask=mask, **GREEDY)
        assert [row.num_found for row in kept.last_call.rows] == [64, 16, 0, 48, 0, 0]
        assert [row.num_loaded for row in kept.last_call.rows] == [64, 16, 0, 47, 0, 0]
        assert [row.num_tokens for row in kept.last_call.rows] == [75, 29, 33, 48, 1, 1]
        second = kept.generate(ids, attention_mask=mask, **GREEDY)
        assert [row.num_found for row in kept.last_call.rows] == [64, 16, 32, 48, 0, 0]
        without_mask = kept.generate(ids, **GREEDY)  # the pad token is no end token: inferred
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert torch.equal(without_mask, plain)
    for row, item in enumerate(rows):
        alone = model.generate(item, **GREEDY)
        assert torch.equal(second[row, -5:], alone[0, -5:])


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_a_single_row_with_padding(tiny, keep, prompt, left_pad, length) -> None:
    model = tiny()
    ids, mask = left_pad([prompt(length), prompt(48)])
    ids, mask = ids[:1], mask[:1]
    plain = model.generate(ids, attention_mask=mask, **GREEDY)
    with keep(model) as kept:
        for _ in range(2):
            assert torch.equal(kept.generate(ids, attention_mask=mask, **GREEDY), plain)
        assert kept.last_call.num_found == _full_chunks(length)


def test_rows_of_one_batch_share_what_the_first_computed(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40).repeat(3, 1)
    with keep(model) as kept:
        out = kept.generate(ids, **GREEDY)
        assert [row.num_found for row in kept.last_call.rows] == [0, 32, 32]
        assert torch.equal(out, model.generate(ids, **GREEDY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_loaded_kv_is_the_stored_kv_bit_for_bit(tiny, keep, prompt, dtype) -> None:
    model = tiny(dtype=dtype)
    ids = prompt(53)
    options = {**GREEDY, "return_dict_in_generate": True}
    with keep(model) as kept:
        cold = kept.generate(ids, **options).past_key_values
        warm = kept.generate(ids, **options).past_key_values
        assert kept.last_call.num_found == 48
    for before, after in zip(cold.layers, warm.layers, strict=True):
        assert after.keys.dtype == dtype
        assert torch.equal(before.keys[:, :, :48], after.keys[:, :, :48])
        assert torch.equal(before.values[:, :, :48], after.values[:, :, :48])


def test_bfloat16_tokens_are_those_of_a_prefill_split_at_the_same_place(tiny, keep, prompt) -> None:
    from transformers import DynamicCache

    model = tiny(dtype=torch.bfloat16)
    ids = prompt(53)
    split = DynamicCache(config=model.config)
    with torch.no_grad():
        # The document, cut where the cold run cuts it: its KV is what the cache holds.
        whole = DynamicCache(config=model.config)
        model(ids[:, :52], past_key_values=whole, logits_to_keep=1)
        for layer, source in zip(split.layers, whole.layers, strict=True):
            layer.update(source.keys[:, :, :48], source.values[:, :, :48])
        model(ids[:, 48:52], past_key_values=split, logits_to_keep=1)
    expected = model.generate(ids, past_key_values=split, **GREEDY)
    with keep(model) as kept:
        kept.generate(ids, **GREEDY)
        assert torch.equal(kept.generate(ids, **GREEDY), expected)
        assert kept.last_call.num_found == 48


def test_real_model_at_every_border(smollm2, keep) -> None:
    tokenizer, model = smollm2
    chunk = 32
    text = "The harbour of the island has one lighthouse, two boats and a dog called Rex. " * 12
    words = tokenizer(text, return_tensors="pt")["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 6}
    with keep(model, chunk_size=chunk, **{"cpu.size": "256MiB"}) as kept:
        for length in (1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 1):
            kept.engine.clear()
            ids = words[:, :length]
            plain = model.generate(ids, **options)
            assert torch.equal(kept.generate(ids, **options), plain), length
            assert torch.equal(kept.generate(ids, **options), plain), length
            assert kept.last_call.num_found == _full_chunks(length, chunk)


def test_real_model_in_a_batch(smollm2, keep) -> None:
    tokenizer, model = smollm2
    story = "Anna sails to the lighthouse every Sunday and brings bread, oil and letters. " * 6
    questions = ["Who sails?", "What does she bring to the lighthouse?", "When?"]
    texts = [f"{story} {question}" for question in questions] + ["The capital of France is"]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"do_sample": False, "max_new_tokens": 6}
    plain = model.generate(**batch, **options)
    with keep(model, chunk_size=32, **{"cpu.size": "256MiB"}) as kept:
        cold = kept.generate(**batch, **options)
        assert [row.num_found > 0 for row in kept.last_call.rows] == [False, True, True, False]
        warm = kept.generate(**batch, **options)
        assert [row.num_found > 0 for row in kept.last_call.rows] == [True, True, True, False]
    assert torch.equal(cold, plain)
    assert torch.equal(warm, plain)
