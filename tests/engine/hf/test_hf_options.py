"""What generate can be asked for besides greedy tokens: the results are the model's."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

pytestmark = pytest.mark.engine

GREEDY = {"do_sample": False, "max_new_tokens": 6}


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "max_new_tokens": 8, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 3},
        {"num_beams": 3, "max_new_tokens": 6},
        {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 6},
        {"do_sample": False, "max_length": 60},
        {"do_sample": False, "max_new_tokens": 6, "repetition_penalty": 1.3},
        {"do_sample": False, "max_new_tokens": 1},
        {"generation_config": GenerationConfig(max_new_tokens=5, num_beams=2, pad_token_id=0)},
    ],
    ids=lambda options: "-".join(options),
)
def test_the_same_result_as_without(tiny, keep, prompt, left_pad, options) -> None:
    model = tiny()
    ids, mask = left_pad([prompt(40), prompt(17, seed=1), prompt(48, seed=2)])
    torch.manual_seed(5)
    plain = model.generate(ids, attention_mask=mask, **options)
    with keep(model) as kept:
        for found in ([0, 0, 0], [32, 16, 48]):
            torch.manual_seed(5)
            assert torch.equal(kept.generate(ids, attention_mask=mask, **options), plain)
            assert [row.num_found for row in kept.last_call.rows] == found


def test_the_model_s_own_config_is_read(tiny, keep, prompt) -> None:
    model = tiny()
    model.generation_config.num_beams = 2
    model.generation_config.max_new_tokens = 5
    ids = prompt(40)
    plain = model.generate(ids)
    with keep(model) as kept:
        assert torch.equal(kept.generate(ids), plain)
        assert torch.equal(kept.generate(input_ids=ids), plain)


def test_streamer_gets_the_same_tokens(tiny, keep, prompt) -> None:
    class Collector:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.ended = True

    model = tiny()
    ids = prompt(40)
    plain = model.generate(ids, **GREEDY)
    with keep(model) as kept:
        for _ in range(2):
            collector = Collector()
            kept.generate(ids, streamer=collector, **GREEDY)
            assert collector.tokens == plain[0].tolist()
            assert collector.ended


def test_scores_and_processors_go_through(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    calls: list[int] = []

    def forbid_five(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(tokens.shape[1])
        scores[:, 5] = -torch.inf
        return scores

    options = {
        **GREEDY,
        "logits_processor": [forbid_five],
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    plain = model.generate(ids, **options)
    calls.clear()
    with keep(model) as kept:
        kept.generate(ids, **options)
        warm = kept.generate(ids, **options)
    assert calls == [40, 41, 42, 43, 44, 45] * 2
    assert torch.equal(warm.sequences, plain.sequences)
    for ours, theirs in zip(warm.scores, plain.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_end_tokens_end_rows_at_different_steps(tiny, keep, prompt, left_pad) -> None:
    model = tiny()
    ids, mask = left_pad([prompt(40), prompt(20, seed=1)])
    free = model.generate(ids, attention_mask=mask, **GREEDY)
    end = int(free[0, ids.shape[1] + 2])
    plain = model.generate(ids, attention_mask=mask, eos_token_id=end, **GREEDY)
    assert (plain[0] == 0).any()
    with keep(model, store_decode=True) as kept:
        for _ in range(2):
            ours = kept.generate(ids, attention_mask=mask, eos_token_id=end, **GREEDY)
            assert torch.equal(ours, plain)


def test_store_decode_keeps_generated_tokens(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    with keep(model, store_decode=True) as kept:
        turn = kept.generate(ids, do_sample=False, max_new_tokens=30)
        following = torch.cat([turn, prompt(5, seed=3)], dim=1)  # 75 tokens, 69 have KV
        answer = kept.generate(following, **GREEDY)
        assert kept.last_call.num_found == 64
        assert torch.equal(answer, model.generate(following, **GREEDY))
    with keep(model) as kept:
        kept.generate(ids, do_sample=False, max_new_tokens=30)
        kept.generate(following, **GREEDY)
        assert kept.last_call.num_found == 32


def test_store_decode_with_several_sequences_of_a_row(tiny, keep, prompt, left_pad) -> None:
    model = tiny()
    ids, mask = left_pad([prompt(20), prompt(7, seed=1)])
    with keep(model, store_decode=True) as kept:
        turns = kept.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            num_return_sequences=2,
            max_new_tokens=30,
        )
        for number, padding in enumerate((0, 0, 13, 13)):
            following = turns[number : number + 1, padding:]
            options = {**GREEDY, "attention_mask": torch.ones_like(following)}
            answer = kept.generate(following, **options)
            assert kept.last_call.num_found == (following.shape[1] - 1) // 16 * 16
            assert torch.equal(answer, model.generate(following, **options))


def test_unfull_tail_is_stored_when_asked_for(tiny, keep, prompt) -> None:
    model = tiny()
    ids = prompt(40)
    plain = model.generate(ids, **GREEDY)
    with keep(model, save_unfull_chunk=True) as kept:
        assert torch.equal(kept.generate(ids, **GREEDY), plain)
        assert kept.last_call.rows[0].num_stored == 40
        assert torch.equal(kept.generate(ids, **GREEDY), plain)
        assert kept.last_call.rows[0].num_found == 40
        assert kept.last_call.rows[0].num_loaded == 39
        longer = torch.cat([ids, prompt(3, seed=1)], dim=1)
        assert torch.equal(kept.generate(longer, **GREEDY), model.generate(longer, **GREEDY))


def test_everything_else_is_the_model_s(tiny, keep, prompt) -> None:
    model = tiny()
    with keep(model) as kept:
        assert kept.config is model.config
        assert kept.model is model
        assert torch.equal(kept(prompt(4)).logits, model(prompt(4)).logits)
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = kept.no_such_thing
        assert kept.last_call is None
        kept.generate(prompt(40), **GREEDY)
        kept.generate(prompt(40), **GREEDY)
        assert kept.stats()["kvkeep_lookup_tokens_total"] == 80
