"""KVKeepConnector: the class that vLLM loads, once in the scheduler's process and once per worker.

It only forwards vLLM's hooks to :class:`SchedulerSide` and :class:`WorkerSide`. Every hook is the
top of a task: what goes wrong in kvkeep is counted, logged and a miss, and the engine goes on. A
model or layout that kvkeep cannot keep switches it off, with the reason in the log. Only a wrong
setting is an error, at the engine's start.

share_log: what kvkeep says below the connector appears where vLLM's own log does.

vLLM configures its logger alone, so what other loggers say is dropped, or shown bare without time
and level if it is a warning. Called by the connector in each of its processes, by one thread.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.config import Settings
from kvkeep.connectors.vllm.build import (
    build_scheduler,
    build_worker,
    check_codecs,
    engine_settings,
)
from kvkeep.connectors.vllm.identity import block_size_of, stores_on_first_rank_only
from kvkeep.connectors.vllm.messages import SaveSpec, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.scheduler import SchedulerSide
from kvkeep.connectors.vllm.stats import KVKeepPromMetrics, KVKeepStats
from kvkeep.connectors.vllm.worker import WorkerSide
from kvkeep.errors import KVKeepError, LayoutError
from kvkeep.logs import json_logs

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


def share_log() -> None:
    """Hand kvkeep's log to vLLM's handlers, unless somebody shows it already.

    Somebody is a handler of the logger ``kvkeep`` or of the root, as ``VLLM_LOGGING_CONFIG_PATH``
    or the program around vLLM may set. A second call does nothing.
    """
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())


logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that it is shown

F = TypeVar("F", bound=Callable[..., object])


def _hook(otherwise: Callable[[], object]) -> Callable[[F], F]:
    """Make a method the top of a task: an exception is counted, logged and ``otherwise()``."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: KVKeepConnector, *args: object, **kwargs: object) -> object:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  the engine must live
                self.note_failure(method.__name__, error)
                return otherwise()

        return cast("F", guarded)

    return decorate


def _nothing() -> None:
    return None


class KVKeepConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is untyped here
    """kvkeep's cache for a vLLM engine; see docs/vllm.md."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Called by vLLM.

        Raises:
            ConfigError: a setting is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        share_log()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._lost_blocks: set[int] = set()  # promised to this step by mistake
        self._lost_requests: set[str] = set()  # that wait for a load that nobody carries out
        self.failures: Counter[str] = Counter()
        self._settings: Settings | None = None
        self._opened = ExitStack()
        try:
            block_size = block_size_of(kv_cache_config)
        except LayoutError as error:
            logger.warning("kvkeep is off: %s", error)
            return
        self._settings = engine_settings(
            self._kv_transfer_config.kv_connector_extra_config, os.environ, block_size=block_size
        )
        check_codecs(self._settings, kv_cache_config)
        stores_on_first_rank_only(vllm_config, self._settings)  # refuses a wrong setting
        if role is KVConnectorRole.SCHEDULER:
            if self._settings.log.format == "json":  # the worker's log is its cache's affair
                self._opened.enter_context(json_logs())
            self._start_scheduler()

    @_hook(_nothing)
    def _start_scheduler(self) -> None:
        if self._settings is not None:
            self._scheduler = build_scheduler(
                self._vllm_config, self._kv_cache_config, self._settings, os.environ
            )

    def note_failure(self, hook: str, error: Exception) -> None:
        """Count and log an exception that a hook caught."""
        self.failures[hook] += 1
        if self._worker is not None:
            self._worker.count_failure(hook, error)
            return
        logger.warning(
            "kvkeep: %s failed: %s", hook, error, exc_info=not isinstance(error, KVKeepError)
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache is best effort: a store that is dropped is a later miss."""
        return False

    # --- worker ---

    @_hook(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Declare the layout, test it, build the cache and answer lookups from now on."""
        if self._settings is not None and self._worker is None:
            self._worker = build_worker(
                self._vllm_config, self._kv_cache_config, self._settings, os.environ, kv_caches
            )

    @_hook(_nothing)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load everything that this step was promised, and begin what requests wait for."""
        meta = self._step()
        if self._worker is not None:
            self._worker.load(meta)
        else:
            for spec in meta.loads:
                self._lost_blocks.update(spec.block_ids)
                if spec.is_waited_for:
                    self._lost_requests.add(spec.req_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass starts."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Saves happen at once after the forward pass."""

    @_hook(_nothing)
    def wait_for_save(self) -> None:
        """Store what the step completed, unless its forward pass is just failing."""
        if self._worker is not None and sys.exception() is None:
            self._worker.save(self._step())

    @_hook(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load between steps has ended, also where it failed. Stores are done."""
        finished, self._lost_requests = self._lost_requests, set()
        if self._worker is not None:
            self._worker.forget(finished_req_ids)
            finished |= self._worker.take_finished_loads()
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that lack what this step was promised."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost | (self._worker.take_invalid_blocks() if self._worker is not None else set())

    @_hook(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Failed loads so far."""
        return self._worker.report() if self._worker is not None else None

    @_hook(_nothing)
    def get_kv_connector_stats(self) -> KVKeepStats | None:
        """Counters since the last step."""
        return self._worker.take_stats() if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVKeepStats:
        """Counters that travelled as ``data``."""
        return KVKeepStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVKeepPromMetrics:
        """The same metrics in vLLM's own /metrics."""
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler ---

    @_hook(_nothing)
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """The engine's own prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.use_prefix_cache(self._own_tokens)

    @_hook(lambda: 0)
    def _own_tokens(self, request: Request) -> int:
        manager = self._kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        hit = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(hit[1])

    @_hook(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded, None for "not yet"; and whether the request waits for that."""
        if self._scheduler is None:
            return 0, False
        num_external = self._scheduler.match(request, num_computed_tokens)
        return num_external, bool(num_external) and self._scheduler.loads_between_steps

    @_hook(dict)
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """In which tiers the tokens are that will be loaded."""
        if self._scheduler is None or num_external_tokens <= 0:
            return {}
        return self._scheduler.sources(request, num_external_tokens)

    @_hook(_nothing)
    def on_new_request(self, request: Request) -> None:
        """The request is in the queue."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request has its blocks, and counts on ``num_external_tokens``."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.allocated(request, blocks, num_external_tokens)
        except Exception as error:  # noqa: BLE001  the engine must live
            self.note_failure("update_state_after_alloc", error)
            if num_external_tokens > 0:
                self._scheduler.break_promise(request, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers do in this step. The loads it promised are in it whatever fails."""
        if self._scheduler is None:
            return StepMeta()
        meta = self._scheduler.take_loads()
        meta.saves = self._plan_saves(self._scheduler, scheduler_output)
        meta.prefill_tokens = self._prefill_tokens(scheduler_output)
        return meta

    @_hook(list)
    def _plan_saves(self, side: SchedulerSide, output: SchedulerOutput) -> list[SaveSpec]:
        return side.plan_saves(output)

    @_hook(int)
    def _prefill_tokens(self, output: SchedulerOutput) -> int:
        """Tokens of the step that are not the next one of an answer."""
        return sum(count for count in output.num_scheduled_tokens.values() if count > 1)

    @_hook(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers report."""
        meta = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(meta, WorkerMeta):
            self._scheduler.heard(meta)

    @_hook(lambda: (False, None))
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks may go at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    @_hook(lambda: False)
    def reset_cache(self) -> bool:
        """Forget every chunk; a worker may take its time to remove them."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # --- both ---

    @_hook(_nothing)
    def shutdown(self) -> None:
        """Release sockets, threads and memory; a second call does nothing."""
        scheduler, self._scheduler = self._scheduler, None
        worker, self._worker = self._worker, None
        if scheduler is not None:
            scheduler.close()
        if worker is not None:
            worker.close()
        self._opened.close()

    def _step(self) -> StepMeta:
        """This step's metadata; nothing to do where vLLM bound none or another connector's."""
        meta = self._connector_metadata
        return meta if isinstance(meta, StepMeta) else StepMeta()
