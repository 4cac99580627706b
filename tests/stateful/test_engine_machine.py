"""A random history of an engine against a dict of what its model computed.

The engine may forget (it has a small pool), so a miss is always allowed. A hit never lies: the
pages it loads hold exactly the KV of exactly these tokens, and what a lease promised is kept.
"""

from __future__ import annotations

from itertools import chain

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvkeep.backends.reference import DictBackend
from support.engine_rig import EngineRig

CHUNK = 8
#: Prompts are made of these pieces, so that they share prefixes, borders and pages.
PIECES = [
    [piece * 100 + token for token in range(length)] for piece, length in enumerate((4, 8, 11))
]
PROMPTS = st.lists(st.sampled_from(PIECES), max_size=4).map(lambda parts: list(chain(*parts)))
PERMUTATIONS = st.permutations(range(16))


class EngineMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    @initialize(
        pool=st.integers(0, 9),
        policy=st.sampled_from(["lru", "lfu", "fifo", "mru"]),
        tail=st.booleans(),
        lower=st.booleans(),
    )
    def build(self, pool: int, policy: str, tail: bool, lower: bool) -> None:
        self.rig = EngineRig(
            pool_chunks=pool,
            num_pages=16,
            policy=policy,
            save_unfull_chunk=tail,
            tiers=[DictBackend] if lower else [],
        )
        self.rig.cpu._alloc_timeout_s = 0.0
        self.tail = tail
        self.frozen = False
        self.stored: set[tuple[int, ...]] = set()  # every prefix that was ever stored
        self.promised: dict[str, tuple[list[int], int]] = {}
        self.steps = []

    def storable(self, tokens: list[int]) -> list[int]:
        ends = list(range(CHUNK, len(tokens) + 1, CHUNK))
        if self.tail and len(tokens) % CHUNK:
            ends.append(len(tokens))
        return ends

    def known(self, tokens: list[int]) -> int:
        """The most that a lookup may find: an unbroken run of chunks that were ever stored."""
        found = 0
        for end in self.storable(tokens):
            if tuple(tokens[:end]) not in self.stored:
                break
            found = end
        return found

    def where(self, tokens: list[int], pages: list[int]) -> dict:
        slots = self.rig.model.slots(pages, len(tokens))
        return dict(kvcaches=self.rig.model.caches, slot_mapping=slots)

    def check_loaded(self, tokens: list[int], pages: list[int], mask: list[bool]) -> int:
        loaded = sum(mask)
        assert mask == [True] * loaded + [False] * (len(tokens) - loaded)
        assert loaded in [0, *self.storable(tokens)]
        used = pages[: self.rig.model.num_pages_for(len(tokens))]
        count = self.rig.model.num_pages_for(loaded)
        assert all(self.rig.model.right_pages(tokens[:loaded], used))
        assert all(self.rig.model.wiped_pages(used[count:]))
        assert loaded <= self.known(tokens)
        return loaded

    @rule(tokens=PROMPTS, pages=PERMUTATIONS, masked=st.integers(0, 3), layerwise=st.booleans())
    def store(self, tokens: list[int], pages: list[int], masked: int, layerwise: bool) -> None:
        self.rig.model.prefill(tokens, pages)
        masked = min(masked, len(tokens) // CHUNK) * CHUNK
        mask = [False] * masked + [True] * (len(tokens) - masked)
        before = self.rig.engine.lookup(tokens)
        copied = None
        if layerwise:
            steps = list(self.rig.engine.store_layer(tokens, mask, **self.where(tokens, pages)))
            assert len(steps) == 4
        else:
            result = self.rig.engine.store(tokens, mask, **self.where(tokens, pages))
            copied = result.num_copied_tokens
            assert masked <= result.num_tokens <= len(tokens)
        if not self.frozen:
            self.stored |= {tuple(tokens[:end]) for end in self.storable(tokens) if end > masked}
        else:
            assert copied in (0, None)
        if before > masked:  # what was there of the prompt is never evicted for the rest of it
            assert self.rig.engine.lookup(tokens) >= before

    @rule(tokens=PROMPTS, pages=PERMUTATIONS, count=st.integers(0, 3), sync=st.booleans())
    def drop_a_store(self, tokens: list[int], pages: list[int], count: int, sync: bool) -> None:
        before = self.rig.engine.lookup(tokens)
        self.rig.model.prefill(tokens, pages)
        where = self.where(tokens, pages)
        steps = self.rig.engine.store_layer(tokens, sync=sync, **where)
        for _ in range(count):
            next(steps)
        steps.close()
        assert self.rig.engine.lookup(tokens) == before

    @rule(tokens=PROMPTS)
    def lookup(self, tokens: list[int]) -> None:
        assert self.rig.engine.lookup(tokens) <= self.known(tokens)

    @rule(target=leases, tokens=PROMPTS, name=st.sampled_from("abc"))
    def lookup_with_lease(self, tokens: list[int], name: str) -> str:
        found = self.rig.engine.lookup(tokens, lookup_id=name, pin=True)
        assert found <= self.known(tokens)
        self.promised[name] = (tokens, found)
        return name

    @rule(name=leases, pages=PERMUTATIONS, layerwise=st.booleans())
    def load_what_was_promised(self, name: str, pages: list[int], layerwise: bool) -> None:
        tokens, promised = self.promised.pop(name, ([], 0))
        loaded = self.load(tokens, pages, name, layerwise)
        assert loaded >= promised

    @rule(tokens=PROMPTS, pages=PERMUTATIONS, layerwise=st.booleans())
    def load_by_key(self, tokens: list[int], pages: list[int], layerwise: bool) -> None:
        self.load(tokens, pages, None, layerwise)

    def load(self, tokens: list[int], pages: list[int], name: str | None, layerwise: bool) -> int:
        self.rig.model.wipe(range(16))
        where = self.where(tokens, pages)
        if layerwise:
            found, *layers, mask = self.rig.engine.retrieve_layer(tokens, req_id=name, **where)
            assert layers == [None] * 3
            assert found == int(mask.sum())
        else:
            mask = self.rig.engine.retrieve(tokens, req_id=name, **where)
        return self.check_loaded(tokens, pages, mask.tolist())

    @rule(tokens=PROMPTS, pages=PERMUTATIONS, count=st.integers(0, 4), name=st.sampled_from("abc"))
    def drop_a_load(self, tokens: list[int], pages: list[int], count: int, name: str) -> None:
        steps = self.rig.engine.retrieve_layer(tokens, req_id=name, **self.where(tokens, pages))
        for _ in range(count):
            next(steps)
        if count:
            self.promised.pop(name, None)
        steps.close()

    @rule(name=leases)
    def unpin(self, name: str) -> None:
        assert self.rig.engine.lookup_unpin(name) == bool(self.promised.pop(name, ([], 0))[1])

    @rule()
    def clear(self) -> None:
        self.rig.engine.clear()
        self.stored.clear()
        for name, (tokens, found) in self.promised.items():
            ends = [end for end in self.storable(tokens) if end <= found]
            self.stored |= {tuple(tokens[:end]) for end in ends}  # still there for its claimant
            assert name in "abc"

    @rule(frozen=st.booleans())
    def freeze(self, frozen: bool) -> None:
        self.rig.engine.freeze(frozen)
        self.frozen = frozen

    @invariant()
    def the_pool_is_sound(self) -> None:
        if not hasattr(self, "rig"):
            return
        report = self.rig.engine.check()
        assert report.used_bytes + report.free_bytes == report.capacity_bytes
        assert report.open_leases == sum(1 for _, found in self.promised.values() if found)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        try:
            for name in list(self.promised):
                self.rig.engine.lookup_unpin(name)
            self.rig.check_idle()
        finally:
            self.rig.engine.close()


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestEngineMachine = EngineMachine.TestCase
