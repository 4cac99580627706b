"""Do the hit rates of `kvkeep replay` agree with those of another simulator?

    python benchmarks/simulators.py TRACE.jsonl...

Compares FIFO, LRU and the optimum with the package kvcache-simulator (pip install 'kvkeep[test]')
on whole traces of Mooncake, in the second half of the requests, and prints a Markdown table.
"""

import argparse
from pathlib import Path

from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_file

from kvkeep.replay.sweep import new_policy, optimum, replay
from kvkeep.replay.trace import MOONCAKE_BLOCK_TOKENS, read_trace

SHARES = (64, 16, 4)
POLICIES = {"fifo": "fifo", "lru": "lru", "optimum": "optimal"}


def compare(path):
    plan = build_execution_plan(parse_trace_file(path, block_size=MOONCAKE_BLOCK_TOKENS))
    trace, left_out = read_trace(path), plan.warmup_requests
    for share in SHARES:
        capacity = trace.footprint() // share
        for ours, theirs in POLICIES.items():
            other = simulate_policy(plan, theirs, capacity)
            if ours == "optimum":
                mine = optimum(trace, capacity, num_warm_up=left_out)
            else:
                mine = replay(trace, new_policy(ours), capacity, num_warm_up=left_out)
            blocks = (mine.hit_tokens - other.hitTokens) / MOONCAKE_BLOCK_TOKENS
            print(
                f"| {path.stem} | 1/{share} | {ours} | {100 * mine.token_share:.3f} "
                f"| {100 * other.hitRate:.3f} | {blocks:+.0f} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path)
    print("| workload | pool | policy | kvkeep replay, % | kvcache-simulator, % | blocks |")
    print("|---|---|---|---|---|---|")
    for path in parser.parse_args().traces:
        compare(path)


if __name__ == "__main__":
    main()
