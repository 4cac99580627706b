"""Models for the tests of the transformers connector: tiny ones, and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvkeep.config import load_settings
from kvkeep.connectors.hf import KVKeepModel, attach
from kvkeep.demo.model import prepare_model, quiet_transformers

TINY_CHUNK = 16
PAD = 0


def _tiny(kind: str = "Llama", *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random decoder with two layers, four heads and two KV heads, different for each seed."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # spread logits: no near ties that rounding could turn
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": PAD,
    }
    torch.manual_seed(config.pop("seed", 7))
    values.update(config)
    attention = values.pop("attn_implementation", None)
    made = getattr(transformers, f"{kind}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    model = model.to(dtype).eval()
    model.generation_config.pad_token_id = PAD
    return model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from several threads, which would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Makes tiny models: ``tiny("Qwen3", num_key_value_heads=1, seed=3)``."""
    return _tiny


def _assert_clean(kept: KVKeepModel) -> None:
    """No lease is open, used and free are the whole pool, and only stored chunks use it."""
    report = kept.engine.check()
    assert report.open_leases == 0
    assert report.used_bytes + report.free_bytes == report.capacity_bytes


@pytest.fixture
def keep() -> Callable[..., Any]:
    """``with keep(model, chunk_size=16) as kept``: attached, and checked for leaks at the end."""

    @contextmanager
    def attached(model: Any, **settings: Any) -> Iterator[KVKeepModel]:
        values = {"chunk_size": TINY_CHUNK, "cpu.size": "64MiB", **settings}
        with attach(model, load_settings(extra=values)) as kept:
            yield kept
            _assert_clean(kept)
            kept.engine.clear()
            _assert_clean(kept)
            assert kept.engine.check().used_bytes == 0

    return attached


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """``prompt(40, seed=1)``: random token ids [1, 40], no padding among them."""

    def make(length: int, seed: int = 0) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(3, 128, (1, length), generator=numbers)

    return make


@pytest.fixture
def left_pad() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Puts prompts [1, n] of any lengths into one batch: (input_ids, attention_mask)."""

    def pad(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(item.shape[1] for item in prompts)
        ids = torch.full((len(prompts), width), PAD)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for row, item in enumerate(prompts):
            ids[row, width - item.shape[1] :] = item[0]
            mask[row, width - item.shape[1] :] = 1
        return ids, mask

    return pad


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """Tokenizer and model of SmolLM2-135M-Instruct in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model()
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return tokenizer, model.eval()
