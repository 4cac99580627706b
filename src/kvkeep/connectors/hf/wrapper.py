"""attach and KVKeepModel: ``generate`` that loads the KV of a known prefix instead of computing it.

A call goes through each prompt of the batch by itself (docs/architecture.md): strip the padding,
look up, load what is stored, compute the rest up to the last token but one, store the new chunks;
then join the prompts into one left-padded cache and let the model's own generate go on from there.
So it computes the last token of each prompt first, whatever was found, and a batch may hit
different lengths.

One thread at a time may call ``generate``, as with the model itself; the copying is locked.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from types import TracebackType
from typing import Any

import torch

from kvkeep.config import Settings, load_settings
from kvkeep.config.settings import given_for_vllm
from kvkeep.connectors.hf.arguments import GenerateCall, check_call
from kvkeep.connectors.hf.caches import (
    CallReport,
    LayerPair,
    ModelCaches,
    PromptRow,
    RowReport,
    declare_caches,
    fill_cache,
    join_rows,
    new_cache,
    row_pairs,
    split_rows,
)
from kvkeep.connectors.hf.identity import ModelWeights, refuse_adapters, refuse_hooks
from kvkeep.engine.build import CacheManager
from kvkeep.engine.engine import CacheEngine
from kvkeep.errors import LayoutError, MissingExtraError
from kvkeep.gpu.dense import DenseGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.memory.placement import WorkerPlace
from kvkeep.tokens import RequestScope

_log = logging.getLogger(__name__)

#: Tokens of the caches on which the layout is tried out when a model is attached.
SELF_TEST_TOKENS = 8


def attach(
    model: Any,
    settings: Settings | None = None,
    *,
    name: str | None = None,
    revision: str | None = None,
    salt: str = "",
) -> KVKeepModel:
    """Give a transformers model a KV cache that outlives its calls.

    Args:
        model: a decoder of transformers with ``generate``, on any device, in any dtype.
        settings: None reads the ``KVKEEP_...`` environment and its YAML file.
        name: name of the model in the identity; None for the settings' or the model's own.
        revision: what tells these weights from others; None for the settings' or a fingerprint of
            all weights, which takes about a second per gigabyte. Who passes it promises that equal
            texts mean equal weights.
        salt: keeps this cache apart from others that have the same model.

    Returns:
        The model in a wrapper: ``generate`` uses the cache, everything else is the model's.

    Raises:
        LayoutError: the model's cache is not plain attention KV, its attention is not causal, or
            it carries adapters or hooks.
        IdentityError: the weights cannot be read and no revision was given.
        ConfigError: the environment or its file has a wrong setting.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("kvkeep.connectors.hf", "hf") from error
    if settings is None:
        settings = load_settings(env=os.environ)
    for setting in given_for_vllm(settings):
        _log.warning("%s was given, and has no effect under transformers", setting)
    if not hasattr(type(model), "generate"):
        raise LayoutError(
            f"{type(model).__name__} has no generate of its own, as what torch.compile returns has "
            "none; attach the model itself, its forward may be compiled"
        )
    refuse_adapters(model)
    refuse_hooks(model)
    caches = declare_caches(model)
    weights = ModelWeights(model, revision or settings.identity.revision)
    identity = CacheIdentity(
        model=name or settings.identity.model or model.name_or_path or model.config.model_type,
        revision=weights.revision,
        layout=caches.layout,
        chunk_size=settings.chunk_size,
        salt=salt,
        tags=settings.identity.tags,
    )
    connector = DenseGPUConnector(caches.layout, copy_threads=settings.cpu.copy_threads)
    connector.register_kv_caches(caches.allocate(SELF_TEST_TOKENS))
    device = torch.device(model.device)
    place = WorkerPlace(cuda_device=device.index if device.type == "cuda" else None)
    manager = CacheManager.create(settings, identity, connector, place=place)
    return KVKeepModel(model, manager, caches, weights)


class KVKeepModel:
    """A transformers model whose ``generate`` keeps the KV of prompts. Made by :func:`attach`.

    Attributes that are not listed here are the model's.

    Attributes:
        model: the model itself; its own ``generate`` runs without the cache.
        last_call: what the last ``generate`` found, loaded and stored; None before the first.
    """

    def __init__(
        self, model: Any, manager: CacheManager, caches: ModelCaches, weights: ModelWeights
    ) -> None:
        self.model = model
        self.last_call: CallReport | None = None
        self._manager = manager
        self._caches = caches
        self._weights = weights
        self._lock = threading.Lock()  # one copy at a time: a connector serves one caller
        self._ids = itertools.count()
        self._closed = False

    @property
    def engine(self) -> CacheEngine:
        """The engine, for lookup, freeze, clear and health."""
        return self._manager.engine

    def stats(self) -> dict[str, float]:
        """All metrics by name and labels, as ``Metrics.snapshot`` gives them."""
        return self._manager.metrics.snapshot()

    def generate(
        self, inputs: torch.Tensor | None = None, generation_config: Any = None, **options: Any
    ) -> Any:
        """``model.generate``, with the same arguments and the same result.

        Padding is on the left, as models that decode need it. Without ``attention_mask`` the
        padding is taken from the pad token as transformers does it.

        Args:
            inputs: token ids [rows, tokens]; or pass ``input_ids``.
            generation_config: as in transformers.
            options: all other arguments of the model's generate (it is its interface, not ours).

        Raises:
            LayoutError: the call brings or chooses a cache of its own.
            ValueError: an argument cannot be honoured, or the batch is not padded on the left.
            RuntimeError: the wrapper was closed, the model is in training mode, or autocast is on.
        """
        if self._closed:
            raise RuntimeError("generate was called on a kept model that was closed")
        if self.model.training:
            raise RuntimeError("in training mode KV is random; call the model's eval() first")
        if torch.is_autocast_enabled(self.model.device.type):
            raise RuntimeError("under autocast KV has another dtype than the model; leave it first")
        call = check_call(self.model, inputs, {"generation_config": generation_config, **options})
        rows = split_rows(call.input_ids, call.attention_mask)
        if not self._caches.takes_padding and any(row.padding for row in rows):
            raise ValueError(
                f"the batch is padded, and {type(self.model).__name__} counts padding as "
                "positions, so that KV would depend on it; pass prompts of one length"
            )
        scope = self._weights.scope()
        clock = _Clock()
        with torch.no_grad():
            prepared = [self._prepare(row, scope, clock) for row in rows]
            cache = join_rows(self.model, self._caches, rows, [item[0] for item in prepared])
            if call.num_copies > 1:
                cache.batch_repeat_interleave(call.num_copies)
        reports = [item[1] for item in prepared]
        self.last_call = CallReport(reports, clock.load_s, clock.prefill_s, clock.store_s)
        result = self.model.generate(
            call.input_ids,
            attention_mask=call.attention_mask,
            past_key_values=cache,
            **call.options,
        )
        if self._manager.settings.store_decode:
            self._store_decoded(call, rows, cache, result, scope)
        return result

    def close(self) -> None:
        """Give the memory back; the model itself stays usable. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._manager.close()

    def __enter__(self) -> KVKeepModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, without the cache."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # before __init__, or while being unpickled
            raise AttributeError(name)
        return getattr(self.model, name)

    def _prepare(self, row: PromptRow, scope: RequestScope, clock: _Clock) -> tuple[Any, RowReport]:
        """A cache with the row's tokens, but perhaps the last one, and what was done for it."""
        settings = self._manager.settings
        total = row.num_tokens
        fills_chunk = total % settings.chunk_size == 0 or settings.save_unfull_chunk
        wanted = total if fills_chunk else total - 1
        cache = new_cache(self.model)
        started = clock.now()
        found, pairs = self._load(row.tokens, scope)
        loaded = len(pairs[0][0]) if pairs else 0
        if loaded:
            fill_cache(cache, pairs)
        clock.load_s += clock.now() - started
        started = clock.now()
        if loaded < wanted:
            self._prefill(row.tokens, cache, loaded, wanted)
        prefill_s = clock.now() - started
        clock.prefill_s += prefill_s
        started = clock.now()
        stored = found
        if wanted > loaded:
            stored = self._store(row.tokens[:wanted], row_pairs(cache, 0, 0, wanted), scope)
        store_s = clock.now() - started
        clock.store_s += store_s
        if wanted > loaded:
            # Other devices compute behind the thread, and the store waits for them.
            computed_s = prefill_s + (0.0 if self.model.device.type == "cpu" else store_s)
            self._manager.storage.cost.note_prefill(wanted - loaded, computed_s)
        return cache, RowReport(total, found, min(loaded, total - 1), stored)

    def _load(self, tokens: torch.Tensor, scope: RequestScope) -> tuple[int, list[LayerPair]]:
        """Tokens found, and K and V of those that could be loaded (an empty list for none)."""
        lookup_id = f"generate-{next(self._ids)}"
        with self._lock:
            try:
                found = self.engine.lookup(tokens, lookup_id=lookup_id, pin=True, scope=scope)
                if not found:
                    return 0, []
                pairs = self._caches.allocate(found)
                mask = self.engine.retrieve(
                    tokens[:found],
                    kvcaches=pairs,
                    slot_mapping=torch.arange(found),
                    req_id=lookup_id,
                    scope=scope,
                )
            finally:
                self.engine.lookup_unpin(lookup_id)
        loaded = int(mask.sum())
        if not loaded:
            return found, []
        return found, [(keys[:loaded], values[:loaded]) for keys, values in pairs]

    def _prefill(self, tokens: torch.Tensor, cache: Any, first: int, last: int) -> None:
        """Compute tokens [first, last) into ``cache``, which holds the tokens before them."""
        device = self.model.device
        inputs: dict[str, Any] = {"input_ids": tokens[first:last][None].to(device)}
        if self._caches.takes_positions:
            inputs["position_ids"] = torch.arange(first, last, device=device)[None]
        if self._caches.takes_logits_to_keep:
            inputs["logits_to_keep"] = 1
        self.model(**inputs, past_key_values=cache, use_cache=True)

    def _store(self, tokens: torch.Tensor, pairs: list[LayerPair], scope: RequestScope) -> int:
        """Store what is not stored yet; how many tokens of the prompt are stored now."""
        with self._lock:
            result = self.engine.store(
                tokens, kvcaches=pairs, slot_mapping=torch.arange(len(tokens)), scope=scope
            )
        return result.num_tokens

    def _store_decoded(
        self,
        call: GenerateCall,
        rows: list[PromptRow],
        cache: Any,
        result: Any,
        scope: RequestScope,
    ) -> None:
        """Store the KV of generated tokens, where the cache's rows are still the result's rows.

        Beam search leaves its cache in another order than its result, so it is left out. The last
        token of a sequence has no KV yet, and the pad tokens behind a finished one are not worth
        storing.
        """
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        if call.num_beams > 1:
            return
        held = cache.get_seq_length()
        for number, sequence in enumerate(sequences.detach().to("cpu", torch.long)):
            row = rows[number // call.num_copies]
            end = min(held, len(sequence) - 1)
            first_new = row.padding + row.num_tokens
            while end > first_new and int(sequence[end - 1]) == call.pad_token_id:
                end -= 1
            if end > first_new:
                pairs = row_pairs(cache, number, row.padding, end)
                self._store(sequence[row.padding : end], pairs, scope)


class _Clock:
    """Seconds spent in the parts of a call."""

    def __init__(self) -> None:
        self.load_s = 0.0
        self.prefill_s = 0.0
        self.store_s = 0.0

    def now(self) -> float:
        return time.perf_counter()
