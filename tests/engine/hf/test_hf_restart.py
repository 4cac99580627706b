"""Spec 11.4 through transformers, after a restart: the same greedy tokens, from the disk.

A process of its own stores the prompts and ends; this one finds them. With a first tier that is
large, small, and emptied in part, with a slow disk, and with models that are not the same.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvkeep.backends.disk.directory import ROOT_NAME
from kvkeep.backends.disk.files import FileIO
from kvkeep.config import load_settings
from kvkeep.connectors.hf import KVKeepModel, attach
from kvkeep.demo.model import prepare_model, read_document
from kvkeep.prefix import LocatedRun
from support.disk import chunk_files, chunk_path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CHUNK = 64
#: A chunk of the real model: 30 layers, K and V, 3 heads of 64 float32.
CHUNK_BYTES = CHUNK * 30 * 2 * 3 * 64 * 4
#: Full chunks of each prompt; a few tokens more follow.
LENGTHS = (4, 4, 4, 6)
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
GREEDY = {"do_sample": False, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    """Pieces of the demo's document."""
    tokenizer, _ = smollm2
    text = tokenizer(read_document())["input_ids"]
    starts = [7 + 300 * number for number in range(len(LENGTHS))]
    return [
        text[start : start + CHUNK * length + 3 + number]
        for number, (start, length) in enumerate(zip(starts, LENGTHS, strict=True))
    ]


@pytest.fixture(scope="module")
def plain(smollm2, prompts) -> list[list[int]]:
    """What the model answers without kvkeep."""
    _, model = smollm2
    return [_answer(model, prompt) for prompt in prompts]


def _answer(side: Any, prompt: Sequence[int]) -> list[int]:
    return side.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()


def _values(disk: Path, **more: Any) -> dict[str, Any]:
    values = {
        "chunk_size": CHUNK,
        "cpu.size": "256MiB",
        "disk.path": str(disk),
        "lookup.timeout": "60s",
        "disk.load_timeout": "60s",
    }
    return {**values, **more}


def _other_process(disk: Path, prompts: list[list[int]], end: str) -> tuple[int, list[Any]]:
    """Answer the prompts in a process that has ended on return: (exit code, answers)."""
    job = {
        "model": str(prepare_model()),
        "settings": _values(disk),
        "prompts": prompts,
        "max_new_tokens": GREEDY["max_new_tokens"],
        "end": end,
    }
    script = Path(__file__).with_name("restart_process.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(job)], capture_output=True, text=True, timeout=300
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def left_behind(prompts, plain, tmp_path_factory) -> Path:
    """The directory of a process that stored every prompt and ended in order."""
    disk = tmp_path_factory.mktemp("left-behind")
    code, answers = _other_process(disk, prompts, "close")
    assert code == 0
    assert answers == [[tokens, 0] for tokens in plain]
    assert len(chunk_files(disk)) == sum(LENGTHS)
    return disk


@pytest.fixture
def disk(left_behind, tmp_path) -> Path:
    """A copy of it for each test."""
    return Path(shutil.copytree(left_behind, tmp_path / "disk"))


@contextmanager
def _attached(model: Any, disk: Path, **more: Any) -> Iterator[KVKeepModel]:
    """Attached, and checked at the end: no lease, and only chunks use the pool."""
    with attach(model, load_settings(extra=_values(disk, **more))) as kept:
        yield kept
        _check_clean(kept)
        assert not list((disk / ROOT_NAME / "tmp").iterdir())


def _check_clean(kept: KVKeepModel) -> None:
    report = kept.engine.check()
    assert report.open_leases == 0
    assert report.used_bytes + report.free_bytes == report.capacity_bytes
    assert report.num_objects == report.num_chunks


def _hits(kept: KVKeepModel, tier: str) -> int:
    """Tokens that lookups found in a tier."""
    return int(kept.stats().get(f'kvkeep_lookup_hit_tokens_total{{tier="{tier}"}}', 0))


def _read_bytes(kept: KVKeepModel) -> int:
    return int(kept.stats().get(f'kvkeep_transfer_bytes_sum{{tier="{DISK}",direction="load"}}', 0))


def _failures(kept: KVKeepModel) -> dict[str, float]:
    return {
        name: value
        for name, value in kept.stats().items()
        if name.startswith("kvkeep_failures_total") and value
    }


def test_a_new_process_answers_from_the_disk(smollm2, prompts, plain, disk) -> None:
    """The same tokens; each chunk is read once, and is in memory the second time."""
    _, model = smollm2
    with _attached(model, disk) as kept:
        for prompt, tokens, length in zip(prompts, plain, LENGTHS, strict=True):
            before = _hits(kept, DISK)
            assert _answer(kept, prompt) == tokens
            assert _hits(kept, DISK) - before == length * CHUNK == kept.last_call.num_found
        assert _hits(kept, CPU) == 0
        for prompt, tokens in zip(prompts, plain, strict=True):
            assert _answer(kept, prompt) == tokens
        assert _hits(kept, CPU) == _hits(kept, DISK) == sum(LENGTHS) * CHUNK
        assert _read_bytes(kept) == sum(LENGTHS) * CHUNK_BYTES
        assert _failures(kept) == {}


def test_a_process_that_was_killed_leaves_whole_chunks(smollm2, prompts, plain, tmp_path) -> None:
    """Fault 39: ``kill -9`` right after the last answer, while the disk is still written to."""
    _, model = smollm2
    code, answers = _other_process(tmp_path, prompts, "kill")
    assert code == -signal.SIGKILL
    assert [tokens for tokens, _ in answers] == plain
    whole = len(chunk_files(tmp_path))
    with _attached(model, tmp_path) as kept:
        found = 0
        for prompt, tokens in zip(prompts, plain, strict=True):
            assert _answer(kept, prompt) == tokens
            found += kept.last_call.num_found
        assert 0 < found == _hits(kept, DISK) <= whole * CHUNK
        assert _failures(kept) == {}


def test_a_first_tier_that_is_too_small(smollm2, prompts, plain, disk) -> None:
    """Five chunks of memory for eighteen: what is found is promoted and evicted again."""
    _, model = smollm2
    with _attached(model, disk, **{"cpu.size": 5 * CHUNK_BYTES}) as kept:
        for _ in range(2):
            for prompt, tokens, length in zip(prompts, plain, LENGTHS, strict=True):
                assert _answer(kept, prompt) == tokens
                assert kept.last_call.num_found == min(length, 5) * CHUNK
                _check_clean(kept)
                assert kept.engine.check().num_chunks <= 5
        assert kept.stats()[f'kvkeep_evictions_total{{tier="{CPU}"}}'] > 0
        assert _hits(kept, DISK) > sum(LENGTHS) * CHUNK
        assert _answer(kept, prompts[0]) == plain[0]
        before = _hits(kept, CPU)
        assert _answer(kept, prompts[0]) == plain[0]
        assert _hits(kept, CPU) - before == 4 * CHUNK, "promoted by the lookup before"


def test_a_load_without_a_lookup_writes_back(smollm2, prompts, disk) -> None:
    """Spec 4.5: what came from the disk is in the first tier then.

    Fault 47: and it is counted once, not by the disk and once more by the copy out of the pool.
    """
    _, model = smollm2
    tokens = torch.tensor(prompts[0])
    with _attached(model, disk) as kept:
        caches = kept._caches.allocate(len(tokens))
        slots = torch.arange(len(tokens))
        mask = kept.engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots)
        assert int(mask.sum()) == 4 * CHUNK
        assert kept.stats()[f'kvkeep_loaded_tokens_total{{tier="{DISK}"}}'] == 4 * CHUNK
        assert kept.engine.lookup(tokens, search_range=[CPU]) == 4 * CHUNK
        again = kept._caches.allocate(len(tokens))
        kept.engine.retrieve(tokens, kvcaches=again, slot_mapping=slots)
        for first, second in zip(caches, again, strict=True):
            for one, other in zip(first, second, strict=True):
                assert torch.equal(one[: 4 * CHUNK], other[: 4 * CHUNK])
        assert _read_bytes(kept) == 4 * CHUNK_BYTES


def test_a_prefix_that_is_split_over_memory_disk_and_memory(smollm2, prompts, plain, disk) -> None:
    """Spec 4.6, with the disk having all of it, and with the disk lacking the last part."""
    _, model = smollm2
    with _attached(model, disk) as kept:
        storage = kept._manager.storage
        keys = kept.engine.token_database.process_tokens(prompts[0]).keys
        assert _answer(kept, prompts[0]) == plain[0]
        splits = {
            (): [LocatedRun(CPU, 0, 1), LocatedRun(DISK, 1, 4)],
            (3,): [LocatedRun(CPU, 0, 1), LocatedRun(DISK, 1, 3), LocatedRun(CPU, 3, 4)],
        }
        for lacking, runs in splits.items():
            storage.batched_remove(keys[1:3], [CPU])
            storage.batched_remove([keys[number] for number in lacking], [DISK])
            assert storage.get_block_mapping(keys) == runs
            on_disk = sum(run.end - run.start for run in runs if run.location == DISK)
            before = _hits(kept, CPU), _hits(kept, DISK), _read_bytes(kept)
            assert _answer(kept, prompts[0]) == plain[0]
            assert kept.last_call.num_found == 4 * CHUNK
            assert _hits(kept, CPU) - before[0] == (4 - on_disk) * CHUNK
            assert _hits(kept, DISK) - before[1] == on_disk * CHUNK
            assert _read_bytes(kept) - before[2] == 2 * CHUNK_BYTES
            assert kept.stats()[f'kvkeep_loaded_tokens_total{{tier="{CPU}"}}'] > 0
            _check_clean(kept)


def test_a_slow_disk_shortens_the_prefix(smollm2, prompts, plain, disk, monkeypatch) -> None:
    """Fault 42: what has not been read by the deadline is not in the answer, and is not wrong."""
    _, model = smollm2
    goes_on = threading.Event()
    really_open = FileIO.open_read
    slow: set[Path] = set()

    def open_read(self: FileIO, path: Path | str) -> int:
        if Path(path) in slow:
            assert goes_on.wait(60)
        return really_open(self, path)

    monkeypatch.setattr(FileIO, "open_read", open_read)
    # Always asked: that a tier as slow as this is left alone for a while is another test's.
    given = {"lookup.timeout": "4s", "cost.enabled": False}
    with _attached(model, disk, **given) as kept:
        keys = kept.engine.token_database.process_tokens(prompts[0]).keys
        slow.add(chunk_path(disk, keys[2]))
        assert _answer(kept, prompts[0]) == plain[0]
        assert kept.last_call.num_found == 2 * CHUNK
        assert [name for name in _failures(kept) if 'cause="timeout"' in name]
        goes_on.set()
        assert kept._manager.storage.storage_backends[DISK].flush(60)
        kept.engine.clear([CPU])
        assert _answer(kept, prompts[0]) == plain[0]
        assert kept.last_call.num_found == 4 * CHUNK


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "weights": ({"seed": 8}, {}, {}),
    "dtype": ({"dtype": torch.bfloat16}, {}, {}),
    "rope": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}, {}),
    "attention": ({"attn_implementation": "eager"}, {}, {}),
    "layers": ({"num_hidden_layers": 3}, {}, {}),
    "heads": ({"num_key_value_heads": 1}, {}, {}),
    "chunk size": ({}, {"chunk_size": 32}, {}),
    "tags": ({}, {"identity.tags": {"team": "a"}}, {}),
    "salt": ({}, {}, {"salt": "tenant"}),
    "name": ({}, {}, {"name": "another"}),
    "revision": ({}, {}, {"revision": "r1"}),
}


def test_fault_9_other_models_share_a_directory_and_no_chunk(tiny, prompt, tmp_path) -> None:
    """Fault 9: the same model is found again after a restart, any other never is."""
    ids = prompt(50)

    def ask(config: dict[str, Any], values: dict[str, Any], names: dict[str, Any]) -> int:
        model = tiny(**config)  # new objects every time: only the directory is the same
        settings = load_settings(
            extra={"chunk_size": 16, "cpu.size": "16MiB", "disk.path": str(tmp_path), **values}
        )
        with attach(model, settings, **names) as kept:
            assert torch.equal(kept.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
            _check_clean(kept)
            return kept.last_call.num_found

    assert ask({}, {}, {}) == 0
    assert ask({}, {}, {}) == 48
    for number, (name, other) in enumerate(OTHERS.items()):
        assert ask(*other) == 0, name
        assert ask(*other) >= 32, name
        assert ask({}, {}, {}) == 48, f"after {number + 1} others"
