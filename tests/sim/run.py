"""Run many seeds, or one with its whole story: `python tests/sim/run.py --seeds 0:500`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim.scenario import SeedFailed, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="one seed, or FIRST:END")
    parser.add_argument("--trace", action="store_true", help="print every event and command")
    parser.add_argument("--fingerprint", action="store_true", help="print only each history's")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)

    totals: Counter[str] = Counter()
    failures: list[SeedFailed] = []
    simulated_s, began = 0.0, time.monotonic()
    for seed in seeds:
        try:
            report = run(seed, print if options.trace else None)
        except SeedFailed as failure:
            failures.append(failure)
            print(failure, flush=True)
            continue
        if options.fingerprint:
            print(seed, f"{report.fingerprint:08x}")
        totals += report.counts
        simulated_s += report.simulated_s
    if options.fingerprint:
        return 1 if failures else 0
    for name, count in sorted(totals.items()):
        print(f"{count:12,} {name}")
    took_s = time.monotonic() - began
    print(
        f"{len(seeds)} seeds, {len(failures)} failed; {simulated_s / 3600:.0f} federation-hours"
        f" in {took_s:.0f} s ({simulated_s / took_s:.0f} times real time)"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
