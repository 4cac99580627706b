"""A vLLM scheduler with a toy model: real scheduling, real connector, pages that prove themselves.

The KV of a token is a hash of all tokens up to it (and of the request's salt), written to the page
that vLLM's block table names. So every page that is loaded, shared or read can be checked byte by
byte against the tokens it stands for, whatever the scheduler did before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvkeep.connectors.vllm import KVKeepConnector
from kvkeep.errors import LookupServiceError
from kvkeep.testing.chunks import wait_until

BLOCK = 4
CHUNK = 8
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
HEAD_SIZE = 64
TOKEN_BYTES = 2 * HEAD_SIZE * 4
VOCABULARY = 50
CHUNK_BYTES = CHUNK * TOKEN_BYTES * len(LAYERS)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A folder with a model's config and nothing else; the scheduler needs no weights."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("tiny-model")
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    config.save_pretrained(path)
    return path


@pytest.fixture
def engine_config(tiny_model_dir) -> Callable[..., VllmConfig]:
    """vLLM's configuration for the toy model."""

    def make(**engine_args: Any) -> VllmConfig:
        arguments = {
            "model": str(tiny_model_dir),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enforce_eager": True,
            "async_scheduling": False,
            "enable_prefix_caching": False,
        }
        return EngineArgs(**(arguments | engine_args)).create_engine_config()

    return make


def kv_cache_config(num_blocks: int) -> KVCacheConfig:
    """One group of two layers."""
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        kv_cache_layout="LBHNC",
    )


class Truth:
    """What the toy model computes for a prompt: its tokens to come and the KV of each."""

    def __init__(self, prompt: list[int], salt: str) -> None:
        self.tokens = list(prompt)
        self._states = [hashlib.sha256(salt.encode()).digest()]
        self._rows: list[np.ndarray] = []

    def rows(self, start: int, end: int) -> np.ndarray:
        """KV of tokens [start, end): uint8 [layers, tokens, TOKEN_BYTES]."""
        while len(self._rows) < end:
            if len(self._rows) == len(self.tokens):
                self.tokens.append(self.next_token(len(self.tokens)))
            token = self.tokens[len(self._rows)]
            self._states.append(hashlib.sha256(self._states[-1] + bytes([token])).digest())
            state = np.frombuffer(self._states[-1], np.uint8)
            layers = [np.resize(state + layer, TOKEN_BYTES) for layer in range(len(LAYERS))]
            self._rows.append(np.stack(layers))
        empty = np.zeros((len(LAYERS), 0, TOKEN_BYTES), np.uint8)
        return np.stack(self._rows[start:end], axis=1) if end > start else empty

    def next_token(self, num_tokens: int) -> int:
        """The token after the first ``num_tokens``."""
        if num_tokens < len(self.tokens):
            return self.tokens[num_tokens]
        self.rows(0, num_tokens)
        return self._states[num_tokens][0] % VOCABULARY


@dataclass
class Step:
    """One scheduled step and, once it ran, what the runner answered."""

    scheduled: Any
    failures_known: int
    answer: ModelRunnerOutput | None = None
    failed: bool = False


class ToyEngine:
    """Scheduler, worker connector and toy model in one process, advanced move by move."""

    def __init__(self, config: VllmConfig, *, num_blocks: int) -> None:
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = BLOCK
        caches = kv_cache_config(num_blocks)
        shape = (len(LAYERS), num_blocks, 1, BLOCK, 2 * HEAD_SIZE)
        self.pages = torch.zeros(shape, dtype=torch.float32)
        self._bytes = self.pages.numpy().view(np.uint8).reshape(len(LAYERS), -1, TOKEN_BYTES)
        self.worker = KVKeepConnector(config, KVConnectorRole.WORKER, caches)
        self.worker.register_kv_caches(dict(zip(LAYERS, self.pages, strict=True)))
        init_none_hash(sha256)
        kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self._hasher = (
            get_request_block_hasher(BLOCK, sha256)
            if config.cache_config.enable_prefix_caching
            else None
        )
        self.connector: KVKeepConnector = self.scheduler.connector
        self._max_steps = 2 if config.scheduler_config.async_scheduling else 1
        self._queue: deque[Step] = deque()
        self._tables: dict[str, list[int]] = {}
        self._loading: dict[str, Any] = {}  # loads between steps, by request
        self.truths: dict[str, Truth] = {}
        self.requests: dict[str, Request] = {}
        self.loaded_tokens = 0
        self.num_failed_steps = 0
        self._failures_known = 0

    @property
    def client(self):
        """The scheduler side's lookup client."""
        return self.connector._scheduler._client

    @property
    def engine(self):
        """The worker's CacheEngine."""
        return self.worker._worker._engine

    @property
    def backend(self):
        """The CPU tier."""
        return self.engine._storage.allocator_backend

    def metric(self, name: str) -> float:
        """One of the worker's counters, with what the scheduler has counted so far."""
        if self.connector._scheduler is not None:
            with contextlib.suppress(LookupServiceError):
                self.client.check()  # answered after the messages before it
        return self.engine.metrics.snapshot().get(name, 0.0)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests so far."""
        return sum(request.num_preemptions for request in self.requests.values())

    def add(self, req_id: str, prompt: list[int], *, max_tokens: int = 3, salt: str = "", **more):
        """Queue a request."""
        self.truths[req_id] = Truth(prompt, salt)
        self.requests[req_id] = Request(
            req_id,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            cache_salt=salt or None,
            block_hasher=self._hasher,
            **more,
        )
        self.scheduler.add_request(self.requests[req_id])

    def abort(self, req_id: str) -> None:
        """End a request now."""
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def advance(self, choose: Callable[[int], int] = lambda n: 0) -> bool:
        """Schedule, run or settle one step; ``choose`` picks among what is possible."""
        moves: list[Callable[[], None]] = []
        waiting = [step for step in self._queue if step.answer is None]
        if waiting:
            moves.append(lambda: self._run(waiting[0]))
        if self._queue and self._queue[0].answer is not None:
            moves.append(self._settle)
        if len(self._queue) < self._max_steps and self.scheduler.has_requests():
            moves.append(self.schedule)
        if not moves:
            return False
        moves[choose(len(moves))]()
        return True

    def run_all(self, choose: Callable[[int], int] = lambda n: 0) -> None:
        """Advance until nothing is left to do."""
        for _ in range(5000):
            if not self.advance(choose):
                return
        raise AssertionError("the scheduler makes no progress")

    def generate(self, req_id: str, prompt: list[int], **more: Any) -> list[int]:
        """Run one request to its end; its tokens."""
        self.add(req_id, prompt, **more)
        self.run_all()
        return self.outputs(req_id)

    def planned_loads(self) -> int:
        """Loads of steps that were scheduled and did not run yet."""
        steps = [step for step in self._queue if step.answer is None]
        return sum(len(step.scheduled.kv_connector_metadata.loads) for step in steps)

    def outputs(self, req_id: str) -> list[int]:
        """Tokens generated so far."""
        return list(self.requests[req_id].output_token_ids)

    def num_output(self, req_id: str) -> int:
        """How many tokens were generated so far."""
        return self.requests[req_id].num_output_tokens

    def true_outputs(self, req_id: str) -> list[int]:
        """Tokens that the toy model generates."""
        truth, request = self.truths[req_id], self.requests[req_id]
        start = request.num_prompt_tokens
        return [truth.next_token(n) for n in range(start, start + request.max_tokens)]

    def finish(self) -> None:
        """Check what is stored and that nothing is held; release everything."""
        self.run_all()
        self.check_stored()
        backend = self.backend
        wait_until(lambda: backend.memcheck().num_objects == len(backend.keys()))
        report = self.client.check()[0]
        assert report.open_leases == 0
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        assert report.num_chunks * CHUNK_BYTES == report.used_bytes
        assert not self.connector.failures
        assert not self.connector._scheduler._tracked
        assert not len(self.connector._scheduler._asking)
        assert not self._loading
        prefetcher = self.engine._storage.prefetcher
        wait_until(lambda: prefetcher.num_lookups == prefetcher.num_chunks_held == 0)
        assert len(prefetcher.events) == 0
        assert self.worker._connector_metadata is None
        self.close()

    def close(self) -> None:
        """Release everything."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    def schedule(self) -> None:
        self._queue.append(Step(self.scheduler.schedule(), self._failures_known))

    def _settle(self) -> None:
        step = self._queue.popleft()
        self._failures_known += step.failed
        self.scheduler.update_from_output(step.scheduled, step.answer)

    def _run(self, step: Step) -> None:
        output = step.scheduled
        meta = output.kv_connector_metadata
        worker = self.worker
        worker.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            worker.start_load_kv(None)
        self._update_tables(output)
        self._loading.update({spec.req_id: spec for spec in meta.loads if spec.is_waited_for})
        invalid = set(worker._worker._invalid_blocks)
        self._check_loads([spec for spec in meta.loads if not spec.is_waited_for], invalid)
        self.num_failed_steps += bool(invalid)
        answer = self._forward(output, explained=step.failures_known < self.num_failed_steps)
        if not output.has_sync_kv_loads:
            worker.start_load_kv(None)
        worker.wait_for_save()
        _, finished = worker.get_finished(output.finished_req_ids)
        reported = worker.get_block_ids_with_load_errors()
        self._check_loads([self._loading.pop(name) for name in finished or ()], reported)
        answer.kv_connector_output = KVConnectorOutput(
            finished_sending=set(),
            finished_recving=finished or set(),
            invalid_block_ids=reported,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        assert reported >= invalid
        assert finished or reported == invalid
        worker.clear_connector_metadata()
        step.failed = bool(invalid)
        step.answer = answer

    def _update_tables(self, output) -> None:
        for data in output.scheduled_new_reqs:
            self._tables[data.req_id] = list(data.block_ids[0])
        cached = output.scheduled_cached_reqs
        for req_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                self._tables[req_id] = []
            self._tables[req_id] += new[0] if new is not None else []

    def _check_loads(self, loads, invalid: set[int]) -> None:
        """Every block that was loaded and not reported holds exactly what was promised."""
        for spec in loads:
            for index in range(spec.start // BLOCK, -(-spec.end // BLOCK)):
                if spec.block_ids[index] in invalid:
                    continue
                truth = self.truths[spec.req_id]
                end = min((index + 1) * BLOCK, spec.end)
                self.loaded_tokens += end - index * BLOCK
                rows = self._rows(spec.block_ids, index * BLOCK, end)
                expected = truth.rows(index * BLOCK, end)
                assert np.array_equal(rows, expected), f"wrong KV loaded by {spec.lookup_id}"

    def _slots(self, table, start: int, end: int) -> list[int]:
        return [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, end)]

    def _rows(self, table, start: int, end: int) -> np.ndarray:
        return self._bytes[:, self._slots(table, start, end)]

    def _forward(self, output, *, explained: bool) -> ModelRunnerOutput:
        """Write every scheduled token's KV, check everything it attends to, sample.

        Args:
            explained: a load failed that the scheduler had not heard of when it planned this step.
        """
        starts = {d.req_id: (d.num_computed_tokens, 0) for d in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        for req_id, start, num_out in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            starts[req_id] = (start, num_out)
        order = list(output.num_scheduled_tokens)
        spans = {r: (starts[r][0], starts[r][0] + output.num_scheduled_tokens[r]) for r in order}
        for req_id, (start, end) in spans.items():
            self._write(req_id, start, self.truths[req_id].rows(start, end))
        garbage: set[str] = set()
        for _ in order:
            for req_id, (start, end) in spans.items():
                rows = self._rows(self._tables[req_id], 0, start)
                if req_id in garbage or np.array_equal(rows, self.truths[req_id].rows(0, start)):
                    continue
                assert explained, f"{req_id} attends to KV of other tokens"
                garbage.add(req_id)
                self._write(
                    req_id, start, np.full((len(LAYERS), end - start, TOKEN_BYTES), 0xEE, np.uint8)
                )
        sampled: list[list[int]] = []
        for req_id, (_, end) in spans.items():
            known = self.requests[req_id].num_prompt_tokens + starts[req_id][1]
            token = 0 if req_id in garbage else self.truths[req_id].next_token(end)
            sampled.append([token] if end >= known else [])
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={req_id: index for index, req_id in enumerate(order)},
            sampled_token_ids=sampled,
        )

    def _write(self, req_id: str, start: int, rows: np.ndarray) -> None:
        slots = self._slots(self._tables[req_id], start, start + rows.shape[1])
        self._bytes[:, slots] = rows

    def check_stored(self) -> None:
        """Whatever can still be found of any prompt is the KV of exactly its tokens."""
        from kvkeep.connectors.vllm.request import LoraNames, scope_of

        for req_id, request in self.requests.items():
            truth = self.truths[req_id]
            tokens = truth.tokens[: request.num_prompt_tokens + request.max_tokens]
            scope = scope_of(request, LoraNames())
            if scope is None:
                continue
            shape = (len(tokens) // BLOCK + 2, TOKEN_BYTES * BLOCK)
            caches = [torch.zeros(shape, dtype=torch.uint8) for _ in LAYERS]
            mask = self.engine.retrieve(
                tokens, kvcaches=caches, slot_mapping=torch.arange(len(tokens)), scope=scope
            )
            found = int(mask.sum())
            rows = np.stack([cache.numpy().reshape(-1, TOKEN_BYTES)[:found] for cache in caches])
            assert np.array_equal(rows, truth.rows(0, found)), f"wrong KV is stored of {req_id}"


@pytest.fixture
def toy_engine(engine_config, tmp_path) -> Iterator[Callable[..., ToyEngine]]:
    """``toy_engine(num_blocks=, pool_chunks=, policy=, extra=, **engine_args)``.

    ``pool_chunks`` may be 0.5, the least that the settings allow.
    """
    made: list[ToyEngine] = []

    def make(
        *,
        num_blocks: int = 200,
        pool_chunks: float = 100,
        policy: str = "fail",
        extra: dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> ToyEngine:
        settings = {
            "chunk_size": CHUNK,
            "cpu.size": int(pool_chunks * CHUNK_BYTES),
            "identity.revision": "toy",
            "lookup.socket_dir": str(tmp_path),
            "lookup.timeout": "20s",
        }
        transfer = KVTransferConfig(
            kv_connector="KVKeepConnector",
            kv_connector_module_path="kvkeep.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=settings | (extra or {}),
        )
        config = engine_config(kv_transfer_config=transfer, **engine_args)
        engine = ToyEngine(config, num_blocks=num_blocks)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
