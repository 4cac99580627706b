"""How fast is the disk tier, against plain files with as many threads? (spec 14.5 and 14.6).

    python benchmarks/disk.py --dir /some/disk --total-mib 512

For each chunk size: rates and their ratio, see kvkeep.bench.tiers, and how long a start takes per
chunk. Then the share of the checksums.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from kvkeep.bench.tiers import measure_disk
from kvkeep.codec.frame import checksum


def main() -> None:
    """Print one row per chunk size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[1024, 4096, 32768])
    args = parser.parse_args()
    print("| chunk | plain write | tier write | ratio | plain read | tier read | ratio | start |")
    print("|---|---|---|---|---|---|---|---|")
    for kib in args.sizes_kib:
        one = measure_disk(
            args.dir,
            chunk_bytes=kib << 10,
            count=args.total_mib * 1024 // kib,
            threads=args.threads,
            rounds=args.rounds,
        )
        print(
            f"| {kib} KiB | {one.plain_written / 1e9:.2f} GB/s | {one.tier_written / 1e9:.2f} "
            f"| {one.tier_written / one.plain_written:.0%} | {one.plain_read / 1e9:.2f} GB/s "
            f"| {one.tier_read / 1e9:.2f} | {one.tier_read / one.plain_read:.0%} "
            f"| {one.start_s * 1e6:.0f} us |",
            flush=True,
        )
    data = np.random.default_rng(1).integers(0, 256, 32 << 20, dtype=np.uint8)
    started = time.perf_counter()
    for _ in range(10):
        checksum(memoryview(data))
    seconds = time.perf_counter() - started
    print(f"checksum: {10 * data.nbytes / seconds / 1e9:.1f} GB/s per thread")


if __name__ == "__main__":
    main()
