from __future__ import annotations

import gc
import threading

import pytest
import torch

from kvkeep.backends.base import BackendHealth
from kvkeep.backends.reference import DictBackend
from kvkeep.errors import BackendError, MaskError
from kvkeep.gpu.paged import PagedGPUConnector
from support.engine_rig import EngineRig

TOKENS = list(range(1000, 1032))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]
LAYERS = 3


class FailingConnector(PagedGPUConnector):
    """Fails when layer ``fail_at`` is to be copied."""

    fail_at: int | None = None
    fail_chunk: int | None = None

    def _layer_jobs(self, transfer, layer):
        if layer == self.fail_at:
            raise RuntimeError("device lost")
        return super()._layer_jobs(transfer, layer)

    def batched_to_gpu(self, memory_objs, starts, ends, **more):
        if self.fail_chunk in starts:
            raise RuntimeError("device lost")
        super().batched_to_gpu(memory_objs, starts, ends, **more)


class FailingTier(DictBackend):
    """Raises whatever it is asked."""

    def contains(self, key, *, pin=None):
        raise BackendError("down", backend=self.name, operation="contains")

    def batched_submit_put_task(self, keys, objs, *, on_complete=None):
        raise BackendError("down", backend=self.name, operation="put")

    def batched_get_blocking(self, keys):
        raise BackendError("down", backend=self.name, operation="get")


def store_steps(rig: EngineRig, tokens=TOKENS, **more):
    slots = rig.model.slots(PAGES, len(tokens))
    return rig.engine.store_layer(tokens, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def load_steps(rig: EngineRig, tokens=TOKENS, **more):
    slots = rig.model.slots(PAGES, len(tokens))
    return rig.engine.retrieve_layer(tokens, kvcaches=rig.model.caches, slot_mapping=slots, **more)


def everything(rig: EngineRig) -> None:
    rig.fill(TOKENS, PAGES)


def nothing(rig: EngineRig) -> None:
    pass


def no_memory(rig: EngineRig) -> None:
    rig.fill(list(range(5000, 5128)), range(32))
    assert rig.engine.lookup(list(range(5000, 5128)), lookup_id="all", pin=True) == 128


def frozen(rig: EngineRig) -> None:
    rig.fill(TOKENS, PAGES)
    rig.engine.freeze(True)


def unhealthy(rig: EngineRig) -> None:
    rig.fill(TOKENS, PAGES)
    rig.cpu.health = lambda: BackendHealth(False, "broken")
    rig.engine.health()


def closed(rig: EngineRig) -> None:
    rig.engine.close()


def failed_copy(rig: EngineRig) -> None:
    rig.connector.fail_at = 1


def failed_first_copy(rig: EngineRig) -> None:
    rig.connector.fail_at = 0


STATES = [
    everything,
    nothing,
    no_memory,
    frozen,
    unhealthy,
    closed,
    failed_copy,
    failed_first_copy,
]


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:30], TOKENS[:5], []])
@pytest.mark.parametrize("tiers", [[], [FailingTier]])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_store_layer_yields_layers_plus_one_times(state, sync, tiers, tokens) -> None:
    """Fault 29: frozen, unhealthy or without memory, the protocol is the same."""
    rig = EngineRig(connector=FailingConnector, tiers=tiers)
    rig.model.prefill(TOKENS, PAGES)
    state(rig)
    assert list(store_steps(rig, tokens, sync=sync)) == [None] * (LAYERS + 1)
    rig.engine.lookup_unpin("all")
    if state is not closed:
        rig.check_idle()
    rig.engine.close()


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[:30], TOKENS[:5], []])
@pytest.mark.parametrize("tiers", [[], [FailingTier]])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("filled", [False, True])
def test_retrieve_layer_yields_layers_plus_two_times(state, tiers, tokens, filled) -> None:
    """Fault 29: no hit, frozen, unhealthy: the number, None per layer, the mask."""
    rig = EngineRig(connector=FailingConnector, tiers=tiers)
    if filled:
        rig.fill(TOKENS, PAGES)
    state(rig)
    rig.model.wipe(range(64))
    found, *layers, mask = list(load_steps(rig, tokens))
    assert isinstance(found, int)
    assert layers == [None] * LAYERS
    assert isinstance(mask, torch.Tensor)
    assert len(mask) == len(tokens)
    assert int(mask.sum()) == found  # here a failed copy of all is made good chunk by chunk
    right = rig.model.right_pages(tokens, PAGES) if tokens else []
    assert right == [bool(mask[4 * page]) for page in range(len(right))]
    rig.engine.lookup_unpin("all")
    if state is not closed:
        rig.check_idle()
    rig.engine.close()


@pytest.mark.parametrize("sync", [True, False])
def test_layers_are_copied_one_by_one_and_seen_at_the_end(sync: bool) -> None:
    with EngineRig() as rig:
        right = rig.model.kv_of(TOKENS)
        steps = store_steps(rig, sync=sync)
        next(steps)
        for layer in range(LAYERS):
            assert rig.engine.lookup(TOKENS) == 0
            rig.model.caches[layer].numpy()[PAGES] = right[layer]  # layer i is computed only now
            next(steps)
            if sync:
                rig.model.caches[layer][PAGES] = 0  # and its pages may change at once
        assert rig.engine.lookup(TOKENS) == 32  # before the generator is asked for its end
        with pytest.raises(StopIteration):
            next(steps)
        rig.model.wipe(range(64))
        rig.engine.retrieve(
            TOKENS, kvcaches=rig.model.caches, slot_mapping=rig.model.slots(PAGES, 32)
        )
        assert all(rig.model.right_pages(TOKENS, PAGES))


def test_without_sync_the_caller_does_not_wait_for_the_copy() -> None:
    go_on = threading.Event()

    class Slow(PagedGPUConnector):
        def _layer_jobs(self, transfer, layer):
            assert go_on.wait(10)
            return super()._layer_jobs(transfer, layer)

    with EngineRig(connector=Slow) as rig:
        rig.model.prefill(TOKENS, PAGES)
        steps = store_steps(rig, sync=False)
        next(steps)
        next(steps)  # returns while layer 0 waits
        go_on.set()
        assert len(list(steps)) == LAYERS - 1
        assert rig.engine.lookup(TOKENS) == 32


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_layer_is_in_the_pages_when_it_is_announced(layer: int) -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        right = rig.model.kv_of(TOKENS)
        steps = load_steps(rig)
        assert next(steps) == 32
        for _ in range(layer + 1):
            assert next(steps) is None
        assert (rig.model.caches[layer].numpy()[PAGES] == right[layer]).all()
        steps.close()


def test_the_next_layer_is_copied_while_one_is_used() -> None:
    """Layer i + 1 must begin although the caller never asks for it while layer i is in use."""
    begun = [threading.Event() for _ in range(LAYERS)]

    class Watched(PagedGPUConnector):
        def _layer_jobs(self, transfer, layer):
            jobs = super()._layer_jobs(transfer, layer)
            return [lambda: begun[layer].set(), *jobs]

    with EngineRig(connector=Watched) as rig:
        rig.fill(TOKENS, PAGES)
        for event in begun:
            event.clear()
        steps = load_steps(rig)
        next(steps)
        for layer in range(LAYERS):
            next(steps)
            if layer + 1 < LAYERS:
                assert begun[layer + 1].wait(10)
        assert bool(next(steps).all())


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("count", range(LAYERS + 1))
def test_a_dropped_store_leaves_nothing(sync: bool, count: int) -> None:
    """Fault 19: a generator that is abandoned gives everything back and shows nothing."""
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        steps = store_steps(rig, sync=sync)
        for _ in range(count):
            next(steps)
        steps.close()
        report = rig.engine.check()
        assert report.used_bytes == 0
        assert rig.engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("count", range(LAYERS + 2))
def test_a_dropped_load_leaves_nothing(count: int) -> None:
    """Fault 19: the references, the lease and the copy thread's work end with the generator."""
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.lookup(TOKENS, lookup_id="r", pin=True)
        steps = load_steps(rig, req_id="r")
        for _ in range(count):
            next(steps)
        del steps
        gc.collect()
        rig.engine.lookup_unpin("r")  # a generator that never began has claimed nothing
        rig.check_idle()


def test_a_model_that_raises_between_layers_leaves_nothing() -> None:
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)

        def forward() -> None:
            for layer, _ in enumerate(store_steps(rig)):
                if layer == 2:
                    raise RuntimeError("the model fails")

        with pytest.raises(RuntimeError, match="the model fails"):
            forward()
        gc.collect()
        assert rig.engine.check().used_bytes == 0


def test_a_generator_in_a_reference_cycle_is_collected() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        holder: list[object] = []
        steps = load_steps(rig)
        next(steps)
        next(steps)
        holder.extend([holder, steps])
        del steps, holder
        gc.collect()
        rig.check_idle()


def test_no_room_stores_the_chunks_that_have_it() -> None:
    with EngineRig(pool_chunks=3) as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert len(list(store_steps(rig))) == LAYERS + 1
        assert rig.engine.lookup(TOKENS) == 24
        rig.model.wipe(range(64))
        *_, mask = load_steps(rig)
        assert mask.tolist() == [True] * 24 + [False] * 8
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 6 + [False] * 2


def test_a_failed_layer_stores_nothing() -> None:
    """Fault 4: of a chunk that failed half-way nothing is visible."""
    with EngineRig(connector=FailingConnector) as rig:
        rig.model.prefill(TOKENS, PAGES)
        rig.connector.fail_at = 2
        assert len(list(store_steps(rig))) == LAYERS + 1
        assert rig.engine.lookup(TOKENS) == 0
        assert rig.engine.check().used_bytes == 0
        values = rig.metrics.snapshot()
        assert values['kvkeep_store_skipped_tokens_total{cause="failed"}'] == 32
        assert (
            "kvkeep_stored_tokens_total" not in values or not values["kvkeep_stored_tokens_total"]
        )


def test_a_chunk_that_cannot_be_copied_ends_the_prefix() -> None:
    """Spec 1.12: the mask is True up to the failed chunk, and says exactly what was written."""
    with EngineRig(connector=FailingConnector) as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        rig.connector.fail_at = 1
        rig.connector.fail_chunk = 16
        found, *layers, mask = list(load_steps(rig))
        assert found == 32
        assert layers == [None] * LAYERS
        assert mask.tolist() == [True] * 16 + [False] * 16
        assert rig.model.right_pages(TOKENS, PAGES)[:4] == [True] * 4


def test_wrong_arguments_raise_at_the_first_step() -> None:
    with EngineRig() as rig:
        rig.fill(TOKENS[:16], PAGES)
        caches = rig.model.caches
        slots = rig.model.slots(PAGES, 32)
        for verb in (rig.engine.store_layer, rig.engine.retrieve_layer):
            with pytest.raises(MaskError):
                next(verb(TOKENS, [True] * 3, kvcaches=caches, slot_mapping=slots))
            with pytest.raises(ValueError, match="has no slot"):
                next(verb(TOKENS, kvcaches=caches, slot_mapping=slots[:10]))
        rig.check_idle()


def test_stored_in_one_way_and_loaded_in_the_other() -> None:
    other = list(range(3000, 3032))
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert len(list(store_steps(rig))) == LAYERS + 1
        rig.fill(other, PAGES)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        assert rig.engine.retrieve(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots).all()
        assert all(rig.model.right_pages(TOKENS, PAGES))
        *_, mask = load_steps(rig, other)
        assert mask.all()
        assert all(rig.model.right_pages(other, PAGES))


def test_masked_and_skipped_tokens_layer_by_layer() -> None:
    mask = [False] * 8 + [True] * 24
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        slots = rig.model.slots(PAGES, 32)
        where = dict(kvcaches=rig.model.caches, slot_mapping=slots[8:], offset=8)
        assert len(list(rig.engine.store_layer(TOKENS, mask, **where))) == LAYERS + 1
        rig.model.wipe(range(64))
        slots[8:12] = -1
        found, *_, loaded = rig.engine.retrieve_layer(TOKENS, mask, **where)
        assert found == 24
        assert loaded.tolist() == [False] * 12 + [True] * 20
        assert rig.model.right_pages(TOKENS, PAGES) == [False] * 3 + [True] * 5
