"""Faults that caches of this kind have had, tried on the whole engine. See docs/faults.md."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from kvkeep.backends.reference import DictBackend
from kvkeep.engine.engine import StoreResult, StoreStop
from kvkeep.errors import BackendError, LayoutError
from kvkeep.gpu.paged import PagedGPUConnector
from kvkeep.identity import CacheIdentity
from kvkeep.tokens import ChunkedTokenDatabase
from support.engine_rig import EngineRig

TOKENS = list(range(1000, 1032))  # four chunks, eight pages
OTHER = list(range(2000, 2032))
PAGES = [9, 3, 60, 22, 1, 40, 17, 8]


def store(rig: EngineRig, tokens=TOKENS, pages=PAGES) -> StoreResult:
    slots = rig.model.slots(pages, len(tokens))
    return rig.engine.store(tokens, kvcaches=rig.model.caches, slot_mapping=slots)


def retrieve(rig: EngineRig, tokens=TOKENS, *, pages=PAGES, req_id=None) -> torch.Tensor:
    slots = rig.model.slots(pages, len(tokens))
    where = dict(kvcaches=rig.model.caches, slot_mapping=slots)
    return rig.engine.retrieve(tokens, req_id=req_id, **where)


def assert_mask_is_what_was_written(rig: EngineRig, mask: torch.Tensor, tokens=TOKENS) -> None:
    """The pages were wiped before: each holds the right KV where the mask is True, or nothing."""
    right = rig.model.right_pages(tokens, PAGES)
    assert right == [bool(value) for value in mask[::4]]
    missing = [page for page, is_right in zip(PAGES, right, strict=True) if not is_right]
    assert all(rig.model.wiped_pages(missing))


class Vanishing(DictBackend):
    """Its chunks vanish between the lookup and the load."""

    vanished: frozenset[bytes] = frozenset()

    def batched_get_blocking(self, keys):
        answer = super().batched_get_blocking([k for k in keys if k not in self.vanished])
        left = iter(answer)
        return [None if key in self.vanished else next(left) for key in keys]


@pytest.mark.parametrize("chunk", range(4))
def test_a_chunk_that_vanishes_ends_the_prefix(chunk: int) -> None:
    """Fault 3: the mask says exactly what was written, and the chunks behind it are released."""
    with EngineRig(tiers=[Vanishing]) as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.clear(["LocalCPUBackend"])
        keys = rig.engine.token_database.process_tokens(TOKENS).keys
        assert rig.engine.lookup(TOKENS) == 32
        rig.storage.storage_backends["DictBackend"].vanished = frozenset({keys[chunk]})
        rig.model.wipe(range(64))
        mask = retrieve(rig)
        assert mask.tolist() == [True] * (8 * chunk) + [False] * (32 - 8 * chunk)
        assert_mask_is_what_was_written(rig, mask)
        lost = rig.metrics.snapshot()['kvkeep_load_failed_tokens_total{cause="missing"}']
        assert lost == 32 - 8 * chunk


class Failing(PagedGPUConnector):
    """Raises when a chunk is copied that begins at one of the tokens in ``bad``."""

    bad: frozenset[int] = frozenset()

    def batched_from_gpu(self, memory_objs, starts, ends, **more):
        if self.bad.intersection(starts):
            raise RuntimeError("device lost")
        super().batched_from_gpu(memory_objs, starts, ends, **more)

    def batched_to_gpu(self, memory_objs, starts, ends, **more):
        good = next((i for i, start in enumerate(starts) if start in self.bad), len(starts))
        super().batched_to_gpu(memory_objs[:good], starts[:good], ends[:good], **more)
        if good < len(starts):
            raise RuntimeError("device lost")


@pytest.mark.parametrize("chunk", range(4))
def test_a_copy_that_fails_half_way_ends_the_prefix(chunk: int) -> None:
    """Fault 3: a copy that raises after some chunks is no reason to promise more than those."""
    with EngineRig(connector=Failing) as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.lookup(TOKENS, lookup_id="r", pin=True)
        rig.model.wipe(range(64))
        rig.connector.bad = frozenset({8 * chunk})
        mask = retrieve(rig, req_id="r")
        assert mask.tolist() == [True] * (8 * chunk) + [False] * (32 - 8 * chunk)
        assert_mask_is_what_was_written(rig, mask)
        lost = rig.metrics.snapshot()['kvkeep_load_failed_tokens_total{cause="copy"}']
        assert lost == 32 - 8 * chunk


def test_a_store_that_fails_half_way_is_a_miss_and_can_be_done_again() -> None:
    """Fault 4: nothing of a failed store is visible."""
    with EngineRig(connector=Failing) as rig:
        rig.model.prefill(TOKENS, PAGES)
        rig.connector.bad = frozenset({16})
        assert store(rig) == StoreResult(0, 0, StoreStop.FAILED)
        assert rig.engine.lookup(TOKENS) == 0
        rig.model.wipe(range(64))
        assert not retrieve(rig).any()
        rig.connector.bad = frozenset()
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 32, None)


class BadTier(DictBackend):
    """Takes nothing in, with an exception."""

    def batched_submit_put_task(self, keys, objs, *, on_complete=None):
        raise BackendError("disk full", backend=self.name, operation="put")


def test_a_tier_that_fails_to_store_makes_nobody_believe_in_its_chunk() -> None:
    """Fault 4: the failed tier does not have it, the others do."""
    with EngineRig(tiers=[BadTier]) as rig:
        rig.model.prefill(TOKENS, PAGES)
        assert store(rig) == StoreResult(32, 32, None)
        assert rig.engine.lookup(TOKENS, search_range=["DictBackend"]) == 0
        assert rig.engine.lookup(TOKENS) == 32


def test_an_engine_with_another_layout_than_the_identity_does_not_start() -> None:
    """Fault 6: the layout that names the chunks is the one that is copied, or nothing is."""
    rig = EngineRig()
    other = EngineRig(num_layers=4)
    with pytest.raises(LayoutError, match="num_layers=4"):
        type(rig.engine)(
            token_database=rig.engine.token_database,
            gpu_connector=other.connector,
            storage_manager=rig.storage,
            metrics=rig.metrics,
        )
    for made in (rig, other):
        made.check_idle()
        made.engine.close()


def test_layouts_with_one_shape_share_no_chunk() -> None:
    """Fault 7: equal shapes and sizes, another declared order: another identity, a miss."""
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        layout = rig.model.layout
        keys = set(rig.engine.token_database.process_tokens(TOKENS).keys)
        other = type(layout)(
            layout.fmt,
            layout.dtype,
            layout.page_size,
            layout.groups,
            layout.num_kv_heads,
            layout.head_size,
            "another order of heads and tokens",
        )
        identity = CacheIdentity("rig", "1", other, chunk_size=8)
        assert not keys & set(ChunkedTokenDatabase(identity).process_tokens(TOKENS).keys)


def test_eviction_while_a_layer_is_read_takes_nothing_away() -> None:
    """Fault 12: all layers of a chunk that is being read stay until the reader is done."""
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        steps = rig.engine.retrieve_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
        next(steps)
        next(steps)
        # somebody stores other prompts and clears the cache in the middle of it
        others = [50, 51, 52, 53, 54, 55, 56, 57]
        rig.model.prefill(OTHER, others)
        assert store(rig, OTHER, others) == StoreResult(0, 0, StoreStop.NO_ROOM)
        assert rig.engine.clear() == 4
        assert store(rig, OTHER, others) == StoreResult(0, 0, StoreStop.NO_ROOM)
        *_, mask = steps
        assert mask.all()
        assert all(rig.model.right_pages(TOKENS, PAGES))
        assert store(rig, OTHER, others) == StoreResult(32, 32, None)


def test_an_expired_lease_is_a_miss_and_never_other_bytes() -> None:
    """Fault 13: after the lease the chunk's memory may be another's; the load asks by key."""
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS, lookup_id="slow", pin=True) == 32
        assert store(rig, OTHER).num_tokens == 0
        rig.expire_leases()
        assert store(rig, OTHER).num_tokens == 32
        rig.model.wipe(range(64))
        mask = retrieve(rig, req_id="slow")
        assert not mask.any()
        assert all(rig.model.wiped_pages(range(64)))
        assert rig.metrics.snapshot()["kvkeep_leases_expired_total"] == 1


def test_pages_may_go_to_another_request_as_soon_as_the_store_returns() -> None:
    """Fault 14: what is stored are the bytes of the call, not those of a later owner."""
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        store(rig)
        rig.model.prefill(OTHER, PAGES)  # preempted, and the pages are another request's now
        store(rig, OTHER)
        for tokens in (TOKENS, OTHER):
            rig.model.wipe(range(64))
            assert retrieve(rig, tokens).all()
            assert all(rig.model.right_pages(tokens, PAGES))


def test_pages_taken_away_while_a_layerwise_store_runs_are_never_seen() -> None:
    """Fault 14: a preempted request's generator is dropped, and nothing of it was stored."""
    with EngineRig() as rig:
        rig.model.prefill(TOKENS, PAGES)
        slots = rig.model.slots(PAGES, 32)
        steps = rig.engine.store_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
        next(steps)
        next(steps)
        rig.model.prefill(OTHER, PAGES)
        steps.close()
        assert rig.engine.lookup(TOKENS) == 0


@pytest.mark.parametrize("end", ["unpin", "again", "deadline"])
def test_a_request_that_is_never_scheduled_holds_nothing(end: str) -> None:
    """Fault 17: the lookup's lease ends by unpin, by the next lookup or by its deadline."""
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(TOKENS, PAGES)
        assert rig.engine.lookup(TOKENS, lookup_id="aborted", pin=True) == 32
        if end == "unpin":
            rig.engine.lookup_unpin("aborted")
        elif end == "again":
            rig.engine.lookup(OTHER, lookup_id="aborted", pin=True)
        else:
            rig.expire_leases()  # nobody ends it: an allocation that needs room does
        assert store(rig, OTHER) == StoreResult(32, 32, None)
        assert rig.engine.check().open_leases == 0


class Raising(PagedGPUConnector):
    """Raises on its way out of the engine; ``error`` says what."""

    error: type[BaseException] = RuntimeError

    def batched_from_gpu(self, memory_objs, starts, ends, **more):
        raise self.error("in the middle of a store")

    layerwise_from_gpu = batched_from_gpu


@pytest.mark.parametrize("error", [RuntimeError, OSError, MemoryError, BackendError])
def test_an_exception_between_allocate_and_put_leaks_nothing(error) -> None:
    """Fault 18: what was allocated for the request goes back, whatever fails."""
    with EngineRig(connector=Raising) as rig:
        if error is BackendError:
            rig.connector.error = lambda text: BackendError(text, backend="b", operation="o")
        else:
            rig.connector.error = error
        assert store(rig) == StoreResult(0, 0, StoreStop.FAILED)
        slots = rig.model.slots(PAGES, 32)
        steps = rig.engine.store_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
        assert len(list(steps)) == 4
        assert rig.engine.check().used_bytes == 0


@pytest.mark.parametrize("error", [ValueError, KeyError, KeyboardInterrupt])
def test_an_exception_that_is_not_ours_passes_and_leaks_nothing(error) -> None:
    """Fault 18: also what the engine does not catch gives everything back."""
    with EngineRig(connector=Raising) as rig:
        rig.connector.error = error
        with pytest.raises(error):
            store(rig)
        slots = rig.model.slots(PAGES, 32)
        with pytest.raises(error):
            next(rig.engine.store_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots))
        assert rig.engine.check().used_bytes == 0


def test_generators_dropped_after_every_number_of_layers_leak_nothing() -> None:
    """Fault 19: abandoned after two layers, or after any other number of them."""
    with EngineRig(pool_chunks=8) as rig:
        rig.fill(OTHER, PAGES)
        slots = rig.model.slots(PAGES, 32)
        where = dict(kvcaches=rig.model.caches, slot_mapping=slots)
        for count in range(5):
            rig.engine.lookup(OTHER, lookup_id="r", pin=True)
            steps = [
                rig.engine.store_layer(TOKENS, **where),
                rig.engine.store_layer(TOKENS, sync=False, **where),
                rig.engine.retrieve_layer(OTHER, req_id="r", **where),
            ]
            for each in steps:
                for _ in range(min(count, 3)):
                    next(each)
            del steps, each
            gc.collect()
            rig.engine.lookup_unpin("r")
            rig.check_idle()
            assert rig.engine.lookup(TOKENS) == 0


def test_a_second_lookup_under_one_id_keeps_exactly_its_own_pins() -> None:
    """Fault 21: the first lookup's pins end, and the second one's last until the load."""
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.lookup(TOKENS, lookup_id="r", pin=True)
        assert rig.engine.lookup(TOKENS[:16], lookup_id="r", pin=True) == 16
        assert rig.engine.check().open_leases == 1
        assert store(rig, OTHER) == StoreResult(16, 16, StoreStop.NO_ROOM)
        rig.model.wipe(range(64))
        assert retrieve(rig, req_id="r").tolist() == [True] * 16 + [False] * 16
        assert rig.model.right_pages(TOKENS, PAGES) == [True] * 4 + [False] * 4


def test_a_slow_reader_outlives_its_deadline() -> None:
    """Fault 22: a lease that was claimed is its reader's, however long the copy takes."""
    with EngineRig(pool_chunks=4) as rig:
        rig.fill(TOKENS, PAGES)
        rig.engine.lookup(TOKENS, lookup_id="slow", pin=True)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        steps = rig.engine.retrieve_layer(
            TOKENS, kvcaches=rig.model.caches, slot_mapping=slots, req_id="slow"
        )
        next(steps)
        next(steps)
        rig.expire_leases()
        rig.storage.leases.reap()
        others = [50, 51, 52, 53, 54, 55, 56, 57]
        rig.model.prefill(OTHER, others)
        assert store(rig, OTHER, others) == StoreResult(0, 0, StoreStop.NO_ROOM)
        *_, mask = steps
        assert mask.all()
        assert all(rig.model.right_pages(TOKENS, PAGES))
        assert store(rig, OTHER, others) == StoreResult(32, 32, None)


@pytest.mark.parametrize("pool_chunks", [0, 4])
def test_a_store_without_room_returns_at_once(pool_chunks: int) -> None:
    """Fault 25: everything is pinned, or the pool is smaller than a chunk: no wait."""
    with EngineRig(pool_chunks=pool_chunks) as rig:
        if pool_chunks:
            rig.fill(TOKENS, PAGES)
            rig.engine.lookup(TOKENS, lookup_id="r", pin=True)
        done = threading.Event()

        def run() -> None:
            assert store(rig, OTHER) == StoreResult(0, 0, StoreStop.NO_ROOM)
            slots = rig.model.slots(PAGES, 32)
            where = dict(kvcaches=rig.model.caches, slot_mapping=slots)
            assert len(list(rig.engine.store_layer(OTHER, **where))) == 4
            done.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert done.wait(20)
        thread.join()
        rig.engine.lookup_unpin("r")


def test_a_load_from_a_lower_tier_without_room_ends() -> None:
    """Fault 25: a load waits for room up to a deadline, then it is a miss."""
    with EngineRig(pool_chunks=4, tiers=[DictBackend]) as rig:
        rig.fill(TOKENS, PAGES)
        rig.fill(OTHER, PAGES)
        assert rig.engine.lookup(OTHER, lookup_id="r", pin=True) == 32
        rig.model.wipe(range(64))
        mask = retrieve(rig, TOKENS)  # in the lower tier only, and the pool is leased
        assert not mask.any()
        assert all(rig.model.wiped_pages(range(64)))
        rig.engine.lookup_unpin("r")
        assert retrieve(rig, TOKENS).all()
        assert all(rig.model.right_pages(TOKENS, PAGES))


def test_a_layerwise_load_without_a_hit() -> None:
    """Fault 29: no hit is zero tokens, an empty step per layer and a mask of False."""
    with EngineRig() as rig:
        slots = rig.model.slots(PAGES, 32)
        steps = rig.engine.retrieve_layer(TOKENS, kvcaches=rig.model.caches, slot_mapping=slots)
        found, *layers, mask = list(steps)
        assert found == 0
        assert layers == [None] * 3
        assert mask.tolist() == [False] * 32


@pytest.mark.parametrize("change", ["short", "long", "negative", "swapped", "beyond", "inside"])
def test_slots_of_a_resumed_request_that_do_not_fit(change: str) -> None:
    """Fault 31: what the scheduler got wrong is a ValueError with the token, and no damage."""
    with EngineRig() as rig:
        rig.fill(TOKENS, PAGES)
        rig.model.wipe(range(64))
        slots = rig.model.slots(PAGES, 32)
        if change == "short":
            slots = slots[:19]
        elif change == "long":
            slots = torch.cat([slots, torch.tensor([77])])
        elif change == "negative":
            slots[5] = -1
        elif change == "swapped":
            slots[[8, 9]] = slots[[9, 8]]
        elif change == "beyond":
            slots[28:] += 64 * 4
        else:
            slots += 1
        where = dict(kvcaches=rig.model.caches, slot_mapping=slots)
        rig.engine.lookup(TOKENS, lookup_id="r", pin=True)
        if change == "long":  # slots of tokens that are not asked for do no harm
            assert rig.engine.retrieve(TOKENS, req_id="r", **where).all()
            return
        with pytest.raises(ValueError, match=r"token \d+ has "):
            rig.engine.retrieve(TOKENS, req_id="r", **where)
        with pytest.raises(ValueError, match=r"token \d+ has "):
            next(rig.engine.retrieve_layer(TOKENS, **where))
        rig.engine.clear()
        with pytest.raises(ValueError, match=r"token \d+ has "):
            rig.engine.store(TOKENS, **where)
        assert all(rig.model.wiped_pages(range(64)))
        assert rig.engine.check().used_bytes == 0
