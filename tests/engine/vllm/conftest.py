"""Real vLLM with the real model: one engine per module, compared with a run without kvkeep.

All prompts are cut from one document by token ids, so that prefixes are shared exactly as a test
says.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvkeep.config import load_settings
from kvkeep.lookup.client import LookupClient
from kvkeep.lookup.protocol import CheckReply

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

CHUNK = 256
BLOCK = 128
SHARED = 4 * CHUNK
NUM_CONCURRENT = 8
TRANSFER = {
    "kv_connector": "KVKeepConnector",
    "kv_connector_module_path": "kvkeep.connectors.vllm",
    "kv_role": "kv_both",
}
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


def _environment() -> None:
    cores = sorted(os.sched_getaffinity(0))[:8]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # tests look into the worker


@dataclass(frozen=True)
class Case:
    """A prompt, and how it is sampled."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    n: int = 1
    temperature: float = 0.0

    def params(self) -> Any:
        """vLLM's SamplingParams."""
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            n=self.n,
            temperature=self.temperature,
            seed=7 if self.temperature else None,
            ignore_eos=True,
        )


@dataclass(frozen=True)
class Cases:
    """Every prompt of the tests."""

    concurrent: tuple[Case, ...]
    by_length: dict[int, Case]
    growing: tuple[Case, ...]
    sampled: tuple[Case, ...]

    def all(self) -> list[Case]:
        """All of them, once."""
        return [*self.sampled, *self.by_length.values(), *self.growing, *self.concurrent]


@pytest.fixture(scope="session")
def engine_environment() -> None:
    """Environment variables of vLLM's."""
    _environment()


@pytest.fixture(scope="session")
def model_dir(engine_environment) -> Path:
    """The model's folder."""
    given = os.environ.get("KVKEEP_TEST_MODEL")
    if given:
        return Path(given)
    from kvkeep.demo.model import prepare_model

    return prepare_model()


@pytest.fixture(scope="session")
def cases(model_dir) -> Cases:
    """Prompts cut from the demo's document."""
    from transformers import AutoTokenizer

    from kvkeep.demo.model import read_document

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = tokenizer(read_document())["input_ids"]
    assert len(text) >= SHARED + 400
    shared = text[:SHARED]

    def piece(start: int, length: int) -> tuple[int, ...]:
        return tuple((text[start:] + text)[:length])

    tails = [piece(SHARED + 40 * i, 30 + i) for i in range(NUM_CONCURRENT)]
    concurrent = tuple(Case((*shared, *tail)) for tail in tails)
    lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK)
    by_length = {n: Case(piece(97 * i + 11, n)) for i, n in enumerate(lengths)}
    growing = tuple(Case(piece(131 * i + 5, 4 * BLOCK - 8), max_tokens=40) for i in range(4))
    sampled = (Case(by_length[2 * CHUNK].tokens, n=2, temperature=0.8),)
    return Cases(concurrent, by_length, growing, sampled)


@dataclass
class Engine:
    """A running vLLM engine, and a client of its worker's cache."""

    llm: Any
    client: LookupClient | None = None
    _ids: int = field(default=0)

    def generate(self, cases: Sequence[Case], *, salt: str | None = None) -> list[list[list[int]]]:
        """Run the cases together; the tokens of each of their samples."""
        prompts = [
            {"prompt_token_ids": list(case.tokens)} | ({"cache_salt": salt} if salt else {})
            for case in cases
        ]
        params = [case.params() for case in cases]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [[list(sample.token_ids) for sample in out.outputs] for out in outputs]

    def metric(self, name: str) -> float:
        """The sum of one of vLLM's counters."""
        values = [m.value for m in self.llm.get_metrics() if m.name == f"vllm:{name}"]
        assert values, name
        return sum(values)

    def external_hits(self) -> float:
        """Tokens that vLLM counts as found by the connector."""
        return self.metric("external_prefix_cache_hits")

    def report(self) -> CheckReply:
        """What the worker's cache holds and has counted."""
        assert self.client is not None
        return self.client.check()[0]

    def counter(self, name: str) -> float:
        """One of kvkeep's counters, summed over its labels."""
        found = {k: v for k, v in self.report().metrics.items() if k.partition("{")[0] == name}
        return sum(found.values())

    def check_nothing_held(self, *, chunk_bytes: int | None = None) -> CheckReply:
        """No lease open, free + used = pool, and nothing used but chunks."""
        report = self.report()
        assert report.open_leases == 0
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        if chunk_bytes is not None:
            assert report.used_bytes == report.num_chunks * chunk_bytes
        assert self.counter("kvkeep_failures_total") == 0
        assert self.counter("kvkeep_load_failed_tokens_total") == 0
        return report


def socket_of(llm: Any, extra: dict[str, Any]) -> Path:
    """The lookup socket of the engine's only worker."""
    from kvkeep.connectors.vllm.build import socket_paths

    engine_id = llm.llm_engine.vllm_config.kv_transfer_config.engine_id
    settings = load_settings(env=os.environ, extra=extra)
    return socket_paths(settings, os.environ, engine_id=engine_id, world_size=1)[0]


@contextmanager
def running_engine(
    model_dir: Path,
    extra: dict[str, Any] | None,
    transfer: dict[str, Any] | None = None,
    **engine_args: Any,
) -> Iterator[Engine]:
    """An engine; ``extra`` None runs it without kvkeep, ``transfer`` is told vLLM as well."""
    from vllm import LLM

    arguments: dict[str, Any] = ENGINE | engine_args
    if extra is not None:
        more = {"kv_connector_extra_config": extra, **(transfer or {})}
        arguments["kv_transfer_config"] = TRANSFER | more
    llm = LLM(str(model_dir), **arguments)
    engine = Engine(llm)
    socket: Path | None = None
    try:
        if extra is not None:
            socket = socket_of(llm, extra)
            engine.client = LookupClient([socket], timeout_s=30)
        yield engine
    finally:
        if engine.client is not None:
            engine.client.close()
        llm.llm_engine.engine_core.shutdown(timeout=60)
        engine.llm = None
        del llm
        gc.collect()
    assert socket is None or not socket.exists(), "the worker left its socket"


@pytest.fixture(scope="session")
def reference(model_dir, cases) -> dict[Case, list[list[int]]]:
    """Tokens of every case from an engine that has no cache at all, one request at a time.

    ``KVKEEP_TEST_REFERENCE`` may name a file to keep them in, for whoever runs these tests often.
    """
    keep = Path(os.environ.get("KVKEEP_TEST_REFERENCE", "/dev/null"))
    if keep.is_file():
        return pickle.loads(keep.read_bytes())
    with running_engine(model_dir, None) as engine:
        tokens = {case: engine.generate([case])[0] for case in cases.all()}
    keep.write_bytes(pickle.dumps(tokens))
    return tokens


@pytest.fixture(scope="session")
def running(model_dir) -> Callable[..., Any]:
    """``with running(extra, **engine_args) as engine``."""
    return lambda extra, **args: running_engine(model_dir, extra, **args)


@pytest.fixture(scope="session")
def running_model(engine_environment) -> Callable[..., Any]:
    """``with running_model(model_dir, extra, **engine_args) as engine``."""
    return running_engine


@pytest.fixture(scope="module")
def start_engine(model_dir, reference) -> Iterator[Callable[..., Engine]]:
    """``start_engine(extra, **engine_args)``; stopped at the module's end."""
    with ExitStack() as stack:
        yield lambda extra, **args: stack.enter_context(running_engine(model_dir, extra, **args))
