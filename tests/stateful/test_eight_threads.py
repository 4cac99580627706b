"""Eight threads use one engine at once: no leak, no wrong byte, no deadlock.

Runs for a minute with a lower tier, and a quarter of it on the CPU tier alone;
KVKEEP_STRESS_SECONDS says for how long instead.
"""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from kvkeep.backends.reference import DictBackend
from kvkeep.gpu.paged import PagedGPUConnector
from support.engine_rig import EngineRig
from support.paged_engine import PagedEngine

SECONDS = float(os.environ.get("KVKEEP_STRESS_SECONDS", "60"))
NUM_THREADS = 8
NUM_PAGES = 24
#: Conversations that share prefixes: 6 beginnings with 4 continuations each, 1 to 5 chunks long.
BEGINNINGS = [[start * 1000 + token for token in range(16)] for start in range(6)]
PROMPTS = [
    (begin + [7000 + turn * 100 + token for token in range(40)])[: 16 + turn * 11]
    for begin in BEGINNINGS
    for turn in range(4)
]


class Client:
    """One thread with caches of its own on the shared engine."""

    def __init__(self, rig: EngineRig, number: int, until: float) -> None:
        self.engine = rig.engine
        self.model = PagedEngine(num_pages=NUM_PAGES)
        self.random = random.Random(number)
        self.number = number
        self.until = until
        self.done: dict[str, int] = {}
        self.loaded_tokens = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        verbs = [self.store, self.store_layers, self.load, self.load_layers, self.peek, self.drop]
        weights = [4, 3, 6, 4, 2, 3]
        round_number = 0
        try:
            while time.monotonic() < self.until:
                round_number += 1
                verb = self.random.choices(verbs, weights)[0]
                verb(self.random.choice(PROMPTS))
                self.done[verb.__name__] = self.done.get(verb.__name__, 0) + 1
                if self.number == 0 and round_number % 200 == 0:
                    self.engine.clear()
                if self.number == 1 and round_number % 50 == 0:
                    report = self.engine.check()
                    assert report.used_bytes + report.free_bytes == report.capacity_bytes
        except BaseException as error:  # noqa: BLE001 - the top of this thread
            self.error = error

    def place(self, tokens):
        self.pages = self.random.sample(range(NUM_PAGES), self.model.num_pages_for(len(tokens)))
        slots = self.model.slots(self.pages, len(tokens))
        return dict(kvcaches=self.model.caches, slot_mapping=slots)

    def store(self, tokens) -> None:
        where = self.place(tokens)
        self.model.prefill(tokens, self.pages)
        self.engine.store(tokens, **where)
        self.model.wipe(self.pages)  # the pages go to somebody else at once

    def store_layers(self, tokens) -> None:
        where = self.place(tokens)
        self.model.prefill(tokens, self.pages)
        sync = self.random.random() < 0.5
        assert len(list(self.engine.store_layer(tokens, sync=sync, **where))) == 4
        self.model.wipe(self.pages)

    def lease(self, tokens) -> tuple[str | None, int]:
        if self.random.random() < 0.3:
            return None, 0
        name = f"{self.number}"
        return name, self.engine.lookup(tokens, lookup_id=name, pin=True)

    def check(self, tokens, mask, promised: int) -> None:
        loaded = int(mask.sum())
        assert mask.tolist() == [True] * loaded + [False] * (len(tokens) - loaded)
        assert loaded >= promised, "a lease was not kept"
        right = self.model.right_pages(tokens, self.pages)
        num_loaded = self.model.num_pages_for(loaded)
        assert all(right[:num_loaded]), "wrong bytes"
        assert all(self.model.wiped_pages(self.pages[num_loaded:])), "bytes beyond the mask"
        self.loaded_tokens += loaded

    def load(self, tokens) -> None:
        where = self.place(tokens)
        self.model.wipe(self.pages)
        name, promised = self.lease(tokens)
        mask = self.engine.retrieve(tokens, req_id=name, **where)
        self.check(tokens, mask, promised)

    def load_layers(self, tokens) -> None:
        where = self.place(tokens)
        self.model.wipe(self.pages)
        name, promised = self.lease(tokens)
        found, *layers, mask = self.engine.retrieve_layer(tokens, req_id=name, **where)
        assert layers == [None] * 3
        assert found == int(mask.sum())
        self.check(tokens, mask, promised)

    def peek(self, tokens) -> None:
        name, _ = self.lease(tokens)
        if name is not None and self.random.random() < 0.7:
            self.engine.lookup_unpin(name)

    def drop(self, tokens) -> None:
        where = self.place(tokens)
        if self.random.random() < 0.5:
            self.model.prefill(tokens, self.pages)
            steps = self.engine.store_layer(tokens, sync=self.random.random() < 0.5, **where)
            count = self.random.randrange(4)
        else:
            name, _ = self.lease(tokens)
            steps = self.engine.retrieve_layer(tokens, req_id=name, **where)
            count = self.random.randrange(5)
        for _ in range(count):
            next(steps)
        if self.random.random() < 0.5:
            steps.close()
        del steps
        self.model.wipe(self.pages)


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize(("copy_threads", "seconds"), [(2, SECONDS), (1, SECONDS / 4)])
@pytest.mark.slow
def test_eight_threads_on_one_engine(copy_threads: int, seconds: float) -> None:
    rig = EngineRig(
        pool_chunks=40,
        connector=lambda layout: PagedGPUConnector(layout, copy_threads=copy_threads),
        tiers=[DictBackend] if copy_threads == 2 else [],
    )
    until = time.monotonic() + seconds
    clients = [Client(rig, number, until) for number in range(NUM_THREADS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        assert not thread.is_alive(), "a thread hangs"
    for client in clients:
        if client.error is not None:
            raise client.error
    for client in clients:
        rig.engine.lookup_unpin(f"{client.number}")
    assert sum(client.loaded_tokens for client in clients) > 0
    assert set().union(*(client.done for client in clients)) == {
        "store",
        "store_layers",
        "load",
        "load_layers",
        "peek",
        "drop",
    }
    rig.check_idle()
    rig.engine.clear()
    assert rig.engine.check().used_bytes == 0
    rig.engine.close()
