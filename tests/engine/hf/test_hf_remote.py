"""Two engine processes in turn over one remote store: the second finds what the first computed.

A tiny random Llama in float32, so tokens must be the same to the last one (spec 11.4).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.servers.mooncake import mooncake_pool
from support.servers.process import library_environment
from support.servers.redis import RedisOptions, redis_server
from support.servers.s3 import s3_server

pytestmark = pytest.mark.engine

CHUNK = 16
NEW_TOKENS = 8
#: Full chunks of each prompt; some tokens more follow.
LENGTHS = (5, 3, 8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A tiny Llama on the disk, for every process the same."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,  # spread logits: no near ties that rounding could turn
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("model")
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Random token ids."""
    numbers = torch.Generator().manual_seed(5)
    return [
        torch.randint(3, 128, (CHUNK * length + 3,), generator=numbers).tolist()
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def plain(model_dir, prompts) -> list[list[int]]:
    """What the model says without kvkeep."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def in_a_process(model_dir, prompts, url, **settings):
    """(tokens, found) of each prompt, from a process that has ended."""
    values = {
        "chunk_size": CHUNK,
        "cpu.size": "64MiB",
        "remote.url": url,
        "lookup.timeout": "20s",
        "cost.enabled": False,  # a model as tiny as this computes faster than a busy store loads
        **settings,
    }
    job = {
        "model": str(model_dir),
        "settings": values,
        "prompts": prompts,
        "max_new_tokens": NEW_TOKENS,
        "end": "close",
    }
    script = Path(__file__).with_name("restart_process.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(job)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_in_turn(model_dir, prompts, plain, url, **settings):
    first = in_a_process(model_dir, prompts, url, **settings)
    assert first == [[tokens, 0] for tokens in plain]
    second = in_a_process(model_dir, prompts, url, **settings)
    expected = [CHUNK * length for length in LENGTHS]
    assert second == [[tokens, found] for tokens, found in zip(plain, expected, strict=True)]


def test_two_processes_over_a_shared_directory(model_dir, prompts, plain, tmp_path):
    """What one machine computed another one finds, compressed without loss: the same tokens."""
    check_in_turn(model_dir, prompts, plain, f"file://{tmp_path}", **{"remote.codec": "zstd"})


def test_two_processes_over_redis_and_then_without_it(model_dir, prompts, plain):
    """The same over Redis with a password; with a server that is frozen or gone, the same tokens.

    Faults 33, 34: requests end by their deadlines, and find what memory has.
    """
    with redis_server(RedisOptions(password="hush")) as server:
        check_in_turn(model_dir, prompts, plain, server.url)
        twice, expected = [*prompts, *prompts], [*plain, *plain]
        found = [0] * len(prompts) + [CHUNK * length for length in LENGTHS]
        server.process.stop()
        frozen = in_a_process(model_dir, twice, server.url, **{"lookup.timeout": "1s"})
        server.process.cont()
        server.process.kill()
        gone = in_a_process(model_dir, twice, server.url)
        for answers in (frozen, gone):
            assert answers == [[*one] for one in zip(expected, found, strict=True)]
        server.process.start()


def test_two_processes_over_an_object_store(model_dir, prompts, plain):
    """The same over S3."""
    with s3_server() as server:
        check_in_turn(model_dir, prompts, plain, server.url(), **{"cost.enabled": False})


@pytest.mark.mooncake
def test_two_processes_over_mooncake(model_dir, prompts, plain, monkeypatch):
    """The same over Mooncake Store; then its master is frozen, and requests go on."""
    with mooncake_pool() as pool:
        # a process that is started finds its libraries so, if they are not the system's
        for name, value in library_environment().items():
            monkeypatch.setenv(name, value)
        check_in_turn(model_dir, prompts, plain, pool.url(), **{"cost.enabled": False})
        twice, expected = [*prompts, *prompts], [*plain, *plain]
        found = [0] * len(prompts) + [CHUNK * length for length in LENGTHS]
        pool.master.stop()
        frozen = in_a_process(model_dir, twice, pool.url(), **{"lookup.timeout": "1s"})
        pool.master.cont()
        assert frozen == [[*one] for one in zip(expected, found, strict=True)]
