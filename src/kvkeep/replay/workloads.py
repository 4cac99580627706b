"""Synthetic workloads of different kinds, so that a policy is judged on more than recorded traces.

Pure: the same seed gives the same trace on every machine with the same Python. Prompts are lists of
chunk numbers in a prefix tree; times are in seconds of the workload, only their order matters.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, count

from kvkeep.replay.trace import Trace, trace_of

Prompts = list[list[int]]


class _Numbers:
    """New chunk numbers."""

    def __init__(self) -> None:
        self._next = count()

    def take(self, number: int) -> list[int]:
        """So many new chunks in a row."""
        return [next(self._next) for _ in range(number)]


def _zipf(chance: random.Random, size: int, exponent: float) -> Callable[[], int]:
    """Draws 0 to size - 1, the first the most often."""
    sums = list(accumulate((rank + 1) ** -exponent for rank in range(size)))
    return lambda: bisect_left(sums, chance.random() * sums[-1])


def _turns(
    chance: random.Random,
    numbers: _Numbers,
    starts: Sequence[tuple[float, int, list[int]]],
    new_chunks: Callable[[], int],
    pause_s: Callable[[], float],
) -> Prompts:
    """Conversations (start, turns, first chunks) whose prompts grow with each turn, interleaved."""
    waiting = [
        (start, number, turns, before) for number, (start, turns, before) in enumerate(starts)
    ]
    heapq.heapify(waiting)
    prompts: Prompts = []
    while waiting:
        now, number, turns, before = heapq.heappop(waiting)
        prompt = before + numbers.take(new_chunks())
        prompts.append(prompt)
        if turns > 1:
            heapq.heappush(waiting, (now + pause_s(), number, turns - 1, prompt))
    return prompts


def chats(chance: random.Random, size: int) -> Prompts:
    """Chats of some turns with pauses for thought, over system prompts of Zipf popularity."""
    numbers = _Numbers()
    system = [numbers.take(chance.randint(1, 6)) for _ in range(20)]
    popular = _zipf(chance, 20, 1.1)
    starts, now = [], 0.0
    for _ in range(size * 2 // 5):
        now += chance.expovariate(1.0)
        starts.append((now, 1 + int(chance.expovariate(0.4)), system[popular()]))
    prompts = _turns(
        chance,
        numbers,
        starts,
        lambda: 1 + int(chance.lognormvariate(1.5, 1.0)),
        lambda: chance.lognormvariate(4.0, 1.2),
    )
    return prompts[:size]


def agents(chance: random.Random, size: int) -> Prompts:
    """Agents with long shared tool descriptions and many quick steps each."""
    numbers = _Numbers()
    tools = [numbers.take(chance.randint(5, 25)) for _ in range(8)]
    popular = _zipf(chance, 8, 0.8)
    starts, now = [], 0.0
    for _ in range(size // 11):
        now += chance.expovariate(1 / 8.0)
        starts.append((now, chance.randint(3, 20), tools[popular()]))
    return _turns(
        chance,
        numbers,
        starts,
        lambda: chance.randint(1, 8),
        lambda: chance.lognormvariate(2.0, 1.0),
    )[:size]


def documents(chance: random.Random, size: int) -> Prompts:
    """Questions about documents (RAG) whose popularity is Zipf and drifts."""
    numbers = _Numbers()
    system = numbers.take(2)
    texts = [
        system + numbers.take(max(1, int(chance.lognormvariate(3.0, 0.8)))) for _ in range(1500)
    ]
    popular = _zipf(chance, len(texts), 0.9)
    prompts: Prompts = []
    for step in range(size):
        if step % 10 == 0:
            one, other = chance.randrange(len(texts)), chance.randrange(len(texts))
            texts[one], texts[other] = texts[other], texts[one]
        prompts.append(texts[popular()] + numbers.take(chance.randint(1, 3)))
    return prompts


def scans(chance: random.Random, size: int) -> Prompts:
    """Chats with bursts of long prompts that never come again (batch jobs)."""
    base = chats(chance, size * 3 // 4)
    numbers = _Numbers()
    numbers.take(1 + max(map(max, base)))
    prompts: Prompts = []
    while base:
        length = chance.randint(100, 400)
        prompts += base[:length]
        base = base[length:]
        prompts += [numbers.take(chance.randint(10, 60)) for _ in range(chance.randint(20, 120))]
    return prompts


def loops(chance: random.Random, size: int) -> Prompts:
    """An evaluation that goes through the same prompts again and again, LRU's worst case."""
    numbers = _Numbers()
    system = numbers.take(3)
    prompts = [system + numbers.take(chance.randint(5, 40)) for _ in range(600)]
    return [prompts[step % len(prompts)] + numbers.take(1) for step in range(size)]


def recent(chance: random.Random, size: int) -> Prompts:
    """Each request goes on with one of the last few conversations, LRU's best case."""
    numbers = _Numbers()
    active = [numbers.take(5) for _ in range(40)]
    prompts: Prompts = []
    for _ in range(size):
        position = min(39, int(chance.expovariate(1 / 8)))
        if chance.random() < 0.15:
            active.pop()
            prompt = numbers.take(chance.randint(3, 20))
        else:
            prompt = active.pop(position)
        prompt = prompt + numbers.take(chance.randint(1, 4))
        prompts.append(prompt)
        active.insert(0, prompt if len(prompt) <= 200 else numbers.take(5))
    return prompts


def phases(chance: random.Random, size: int) -> Prompts:
    """Chats, then documents, then agents: what was learned turns wrong twice."""
    parts = _apart([kind(chance, size // 3) for kind in (chats, documents, agents)])
    return [prompt for part in parts for prompt in part]


def mixed(chance: random.Random, size: int) -> Prompts:
    """Chats, documents, agents and scans at the same time."""
    parts = _apart([kind(chance, size // 4) for kind in (chats, documents, agents, scans)])
    order = [number for number, part in enumerate(parts) for _ in part]
    chance.shuffle(order)
    streams = [iter(part) for part in parts]
    return [next(streams[number]) for number in order]


def _apart(parts: Sequence[Prompts]) -> list[Prompts]:
    """The parts with numbers of their own."""
    moved: list[Prompts] = []
    first = 0
    for part in parts:
        moved.append([[number + first for number in prompt] for prompt in part])
        first += 1 + max(map(max, part))
    return moved


#: Every kind by name.
WORKLOADS: dict[str, Callable[[random.Random, int], Prompts]] = {
    kind.__name__: kind for kind in (chats, agents, documents, scans, loops, recent, phases, mixed)
}


def workload(name: str, *, seed: int, size: int = 6000) -> Trace:
    """A synthetic trace of about ``size`` requests.

    Args:
        name: one of :data:`WORKLOADS`.
        seed: of the random numbers.
        size: requests.
    """
    return trace_of(WORKLOADS[name](random.Random(seed), size))
