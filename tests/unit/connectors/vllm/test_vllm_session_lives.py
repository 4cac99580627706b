"""Random lives of sessions whose turns bring images, under vLLM's scheduler; every page is checked.

The KV of a token is a hash of all tokens and images up to it, so a chunk that is stored under
another name than its own shows.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

import kvkeep_tests_toy_engine as toy
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request, RequestStatus

from kvkeep.tokens import RequestScope

IMAGES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
EMPTY = np.zeros((len(toy.LAYERS), 0, toy.TOKEN_BYTES), np.uint8)


@dataclass
class SessionTruth:
    """What the toy model computes for a request as it is now."""

    request: Request
    with_images: bool = True

    def rows(self, start: int, end: int) -> np.ndarray:
        """KV of tokens [start, end): uint8 [layers, tokens, bytes]."""
        states = self._states(end)[start + 1 :]
        layers = range(len(toy.LAYERS))
        rows = [
            np.stack([np.resize(np.frombuffer(s, np.uint8) + n, toy.TOKEN_BYTES) for n in layers])
            for s in states
        ]
        return np.stack(rows, axis=1) if rows else EMPTY

    def next_token(self, num_tokens: int) -> int:
        """The token after the first ``num_tokens``."""
        tokens = self.request._all_token_ids
        if num_tokens < len(tokens):
            return tokens[num_tokens]
        return self._states(num_tokens)[num_tokens][0] % toy.VOCABULARY

    def _states(self, num_tokens: int) -> list[bytes]:
        tokens = self.request._all_token_ids
        images = {f.mm_position.offset: f.identifier for f in self.request.mm_features}
        states = [hashlib.sha256((self.request.cache_salt or "").encode()).digest()]
        for at in range(num_tokens):
            token = tokens[at] if at < len(tokens) else states[-1][0] % toy.VOCABULARY
            image = images.get(at, "") if self.with_images else ""
            content = states[-1] + bytes([token]) + image.encode()
            states.append(hashlib.sha256(content).digest())
        return states


@dataclass
class Lives:
    """Sessions that come, go on, wait and end."""

    engine: toy.ToyEngine
    rng: random.Random
    requests: list[Request] = field(default_factory=list)

    def make(self, name: str, *, resumable: bool) -> Request:
        rng = self.rng
        length = rng.randrange(1, 50)
        prompt = [(7 * i) % 50 for i in range(length)]
        offset = rng.randrange(max(1, length - 3))
        image = rng.choice(IMAGES)
        feature = MultiModalFeatureSpec(None, "image", image, PlaceholderRange(offset, 3), image)
        return Request(
            name,
            prompt,
            SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True),
            None,
            resumable=resumable,
            mm_features=[feature] if length > 4 and rng.random() < 0.5 else [],
            block_hasher=self.engine._hasher,
        )

    def begin(self) -> None:
        request = self.make(f"r{len(self.requests)}", resumable=self.rng.random() < 0.7)
        self.engine.requests[request.request_id] = request
        self.engine.truths[request.request_id] = SessionTruth(request)
        self.requests.append(request)
        self.engine.scheduler.add_request(request)

    def go_on(self, request: Request) -> None:
        waits = request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        if waits and request.num_tokens < 150:
            turn = self.make(request.request_id, resumable=True)
            self.engine.scheduler.add_request(turn)

    def live(self, num_moves: int) -> None:
        for _ in range(num_moves):
            living = [request for request in self.requests if not request.is_finished()]
            chance = self.rng.random()
            if chance < 0.08 and len(living) < 4:
                self.begin()
            elif chance < 0.16 and living:
                self.go_on(self.rng.choice(living))
            elif chance < 0.18 and living:
                self.engine.abort(self.rng.choice(living).request_id)
            else:
                self.engine.advance()
        for request in self.requests:
            self.engine.abort(request.request_id)
        self.engine.run_all()

    def check(self) -> int:
        """What is found of any session is its KV, with its images and without; tokens found."""
        total = 0
        for request in self.requests:
            tokens = list(request._all_token_ids)
            scope = self.engine.connector._scheduler._scope_of(request)
            plain = RequestScope(scope.salt, scope.lora, scope.tags)
            for scope_, with_images in ((scope, True), (plain, False)):
                shape = (len(tokens) // toy.BLOCK + 2, toy.TOKEN_BYTES * toy.BLOCK)
                caches = [torch.zeros(shape, dtype=torch.uint8) for _ in toy.LAYERS]
                mask = self.engine.engine.retrieve(
                    tokens, kvcaches=caches, slot_mapping=torch.arange(len(tokens)), scope=scope_
                )
                found = int(mask.sum())
                rows = np.stack([c.numpy().reshape(-1, toy.TOKEN_BYTES)[:found] for c in caches])
                expected = SessionTruth(request, with_images).rows(0, found)
                assert np.array_equal(rows, expected), request.request_id
                total += found
        return total


@pytest.mark.parametrize("seed", range(16))
def test_random_sessions(toy_engine, seed, monkeypatch):
    rng = random.Random(seed)
    engine = toy_engine(
        num_blocks=rng.choice([40, 60, 200]),
        enable_prefix_caching=rng.random() < 0.5,
        async_scheduling=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice([16, 24, 512]),
        extra={"store_decode": rng.random() < 0.7, "save_unfull_chunk": rng.random() < 0.4},
    )
    engine.scheduler.max_num_encoder_input_tokens = 1000
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(1000)
    lives = Lives(engine, rng)
    lives.live(250)
    assert lives.check() > 0
    monkeypatch.setattr(engine, "check_stored", lambda: None)  # it was, and by other truths
    engine.engine.clear()
    engine.finish()
