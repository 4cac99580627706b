"""Sweep: one workload through several sizes and policies, beside the clairvoyant optimum.

For ``kvkeep replay``: from bytes to chunks, the runs, and the sentence that an operator wants. One
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import cast

from kvkeep.errors import ConfigError
from kvkeep.policy.base import CachePolicy
from kvkeep.policy.names import POLICIES
from kvkeep.policy.probation import ProbationPolicy
from kvkeep.replay.optimum import optimum
from kvkeep.replay.simulator import HitRate, replay
from kvkeep.replay.trace import Trace

#: (runs that are done, runs in all, what is running).
Report = Callable[[int, int, str], None]

#: Every policy that can be replayed by its name.
POLICY_NAMES = (*POLICIES, ProbationPolicy.name)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """What a pool of one size would have found.

    Attributes:
        chunks: that fit.
        by_policy: what each policy found, in the order asked for.
        best: what the clairvoyant optimum found.
    """

    chunks: int
    by_policy: dict[str, HitRate]
    best: HitRate


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results for one workload.

    Attributes:
        num_requests: of the workload.
        asked_tokens: tokens of all prompts.
        footprint: number of different chunks: a pool of this size holds everything.
        limit: what a pool of that size finds; no more can be found.
        sizes: the smallest first.
    """

    num_requests: int
    asked_tokens: int
    footprint: int
    limit: HitRate
    sizes: tuple[SizeResult, ...]


def check_policies(names: Sequence[str]) -> None:
    """Refuse a policy that there is not.

    Raises:
        ConfigError: it names those there are.
    """
    for name in names:
        if name not in POLICY_NAMES:
            known = ", ".join(sorted(POLICY_NAMES))
            raise ConfigError(f"unknown cache policy {name!r}; known: {known}")


def chunks_of_size(size_bytes: int, block_bytes: int) -> int:
    """How many chunks fit into a pool.

    Args:
        size_bytes: of the pool.
        block_bytes: KV bytes of one full block of the trace.

    Raises:
        ConfigError: none does.
    """
    if size_bytes < block_bytes:
        raise ConfigError(f"a pool of {size_bytes:,} bytes holds no block of {block_bytes:,} bytes")
    return size_bytes // block_bytes


def chunks_of_share(share: Fraction, footprint: int) -> int:
    """How many chunks a share of everything is, at least one."""
    return max(1, int(share * footprint))


def sweep(
    trace: Trace,
    capacities: Sequence[int],
    policies: Sequence[str],
    report: Report,
    *,
    num_warm_up: int = 0,
) -> Sweep:
    """Replay a workload, each time from an empty pool.

    Args:
        trace: the workload.
        capacities: sizes of the pool, in chunks; equal ones are run once.
        policies: names out of :data:`POLICY_NAMES`.
        report: told before each run.
        num_warm_up: requests at the start that fill the pool and are not counted.
    """
    check_policies(policies)
    footprint = trace.footprint()
    wanted = sorted(set(capacities))
    done, total = 0, len(wanted) * (len(policies) + 1) + 1
    results = []
    for chunks in wanted:
        rates: dict[str, HitRate] = {}
        for name in policies:
            report(done, total, f"{name}, {chunks:,} chunks")
            rates[name] = replay(trace, new_policy(name), chunks, num_warm_up=num_warm_up)
            done += 1
        report(done, total, f"optimum, {chunks:,} chunks")
        results.append(SizeResult(chunks, rates, optimum(trace, chunks, num_warm_up=num_warm_up)))
        done += 1
    report(done, total, "everything kept")
    limit = optimum(trace, max(1, footprint), num_warm_up=num_warm_up)
    return Sweep(len(trace.requests), limit.asked_tokens, footprint, limit, tuple(results))


def what_memory_buys(results: Sweep, policy: str, label: Callable[[int], str]) -> str:
    """How much memory finds how much, in sentences.

    Args:
        results: of a workload.
        policy: the one to speak of.
        label: name of a size in chunks.
    """
    shares = [(size.chunks, 100 * size.by_policy[policy].token_share) for size in results.sizes]
    first_chunks, first = shares[0]
    parts = [f"With {policy}, {label(first_chunks)} finds {first:.1f}% of all prompt tokens"]
    for (before_chunks, before), (chunks, share) in pairwise(shares):
        more = label(chunks - before_chunks)
        parts.append(f"{more} more finds {share - before:+.1f} points ({share:.1f}%)")
    limit = 100 * results.limit.token_share
    return (
        "; ".join(parts)
        + f". Nothing finds more than {limit:.1f}%, which takes at most "
        + f"{label(results.footprint)}."
    )


def new_policy(name: str) -> CachePolicy[bool]:
    """A new policy out of :data:`POLICY_NAMES`, for a simulated tier."""
    if name == ProbationPolicy.name:
        return ProbationPolicy[bool]()
    # A policy never looks at the values that it orders.
    return cast("CachePolicy[bool]", POLICIES[name]())
