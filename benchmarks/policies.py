"""Cache policies: token hit rates on recorded and synthetic workloads, and cost per operation.

    python benchmarks/policies.py rates TRACE.jsonl...   recorded traces, whole and by halves
    python benchmarks/policies.py workloads --seed 101   synthetic workloads
    python benchmarks/policies.py cost                   per chunk, pools of 1e3 to 1e6 chunks

Prints Markdown tables (rates: percent of chunks in unbroken prefixes); see docs/policies.md.
"""

import argparse
import random
import time
from pathlib import Path

from kvkeep.hashing import ChunkKey
from kvkeep.policy.classic import FIFOPolicy, LFUPolicy, LRUPolicy
from kvkeep.policy.probation import ProbationPolicy
from kvkeep.policy.reuse import ReusePolicy
from kvkeep.replay.sweep import optimum, replay
from kvkeep.replay.trace import read_trace
from kvkeep.replay.workloads import WORKLOADS, workload

POLICIES = (FIFOPolicy, LFUPolicy, LRUPolicy, ProbationPolicy, ReusePolicy)
SHARES = (64, 16, 8, 4, 2)
OPTIMUM = "optimum"


def rates(trace):
    """By policy and size: percent of chunks found in unbroken prefixes."""
    sizes = [max(1, trace.footprint() // share) for share in SHARES]
    table = {
        policy.name: [100 * replay(trace, policy(), size).chunk_share for size in sizes]
        for policy in POLICIES
    }
    table[OPTIMUM] = [100 * optimum(trace, size).chunk_share for size in sizes]
    return table


def print_table(title, table):
    print(f"\n**{title}**\n")
    print("| policy | " + " | ".join(f"1/{share}" for share in SHARES) + " |")
    print("|---|" + "---|" * len(SHARES))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{rate:.2f}" for rate in row) + " |")
    ours, lru, best = table["reuse"], table["lru"], table[OPTIMUM]
    better = [max(pair) for pair in zip(lru, table["probation"], strict=True)]
    gains = (f"{mine - rival:+.2f}" for mine, rival in zip(ours, better, strict=True))
    print("| reuse against the better of lru, probation | " + " | ".join(gains) + " |")
    ways = [
        f"{100 * (mine - low) / (top - low):.0f} %" if top - low > 0.5 else "-"
        for mine, low, top in zip(ours, lru, best, strict=True)
    ]
    print(
        "| reuse, share of the way from lru to the optimum | " + " | ".join(ways) + " |", flush=True
    )


def show_rates(paths):
    for path in paths:
        trace = read_trace(path)
        started = time.perf_counter()
        replay(trace, ReusePolicy(), trace.footprint() // 16)
        per_second = len(trace.requests) / (time.perf_counter() - started)
        print_table(f"{path.stem} ({trace.footprint()} chunks)", rates(trace))
        print(f"\nReplayed at {per_second:.0f} requests/s with the policy reuse.")
        for label, start, end in (("first half", 0, 0.5), ("second half", 0.5, 1)):
            print_table(f"{path.stem}, {label}", rates(trace.part(start, end)))


def show_workloads(seed):
    for name in WORKLOADS:
        print_table(f"{name}, seed {seed}", rates(workload(name, seed=seed)))


def key_of(number):
    return ChunkKey(number.to_bytes(32, "big"))


def cost(policy, size, *, length=16, rounds=2000):
    """Microseconds per chunk of evictions, puts and hits in a full pool of ``size`` chunks."""
    index, chance = policy.init_mutable_mapping(), random.Random(1)
    prompts, spent = [], {"evict": 0.0, "put": 0.0, "hit": 0.0}
    numbers = iter(range(1 << 40))

    def timed(verb, action):
        started = time.perf_counter()
        result = action()
        spent[verb] += time.perf_counter() - started
        return result

    def put(keys):
        policy.note_chain(keys)
        for key in reversed(keys):
            index[key] = True
            policy.update_on_put(key)

    def evict():
        for key in policy.get_evict_candidates(index, length, bool):
            del index[key]
            policy.update_on_force_evict(key)

    def hit(keys):
        for key in keys:
            policy.update_on_hit(key, index)

    hits = 0
    while len(index) < size:
        prompts.append([key_of(next(numbers)) for _ in range(length)])
        put(prompts[-1])
    for _ in range(rounds):
        timed("evict", evict)
        prompts.append([key_of(next(numbers)) for _ in range(length)])
        timed("put", lambda: put(prompts[-1]))
        used = [key for key in reversed(chance.choice(prompts[-200:])) if key in index]
        timed("hit", lambda used=used: hit(used))
        hits += len(used)
    counts = {"evict": rounds * length, "put": rounds * length, "hit": hits}
    return {verb: 1e6 * seconds / counts[verb] for verb, seconds in spent.items()}


def show_cost():
    print("\n| policy | chunks | evict us | put us | hit us |\n|---|---|---|---|---|")
    for policy in (LRUPolicy, ProbationPolicy, ReusePolicy):
        for size in (1000, 10_000, 100_000, 1_000_000):
            row = " | ".join(f"{value:.2f}" for value in cost(policy(), size).values())
            print(f"| {policy.name} | {size} | {row} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("rates").add_argument("traces", nargs="+", type=Path)
    commands.add_parser("workloads").add_argument("--seed", type=int, default=101)
    commands.add_parser("cost")
    arguments = parser.parse_args()
    if arguments.command == "rates":
        show_rates(arguments.traces)
    elif arguments.command == "workloads":
        show_workloads(arguments.seed)
    else:
        show_cost()


if __name__ == "__main__":
    main()
