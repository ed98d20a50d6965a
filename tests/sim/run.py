"""Runs many seeds, or one with its transcript: `python tests/sim/run.py --seeds 0:500`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.sim.scenario import FAULT_PHASE_S, Report, SeedFailed, run
from tests.sim.transcript import TranscriptWriter
from tests.sim.world import HistoryEntry

PROGRESS_EVERY_S = 60.0


def main() -> int:
    options = _options()
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    if options.trace or options.fingerprint:
        return _show(seeds, options)
    began, reported_at = time.monotonic(), time.monotonic()
    totals: Counter[str] = Counter()
    done, failed, simulated_s = 0, 0, 0.0
    for outcome in _outcomes(seeds, options.fault_seconds, options.processes):
        done += 1
        if isinstance(outcome, str):
            failed += 1
            print(outcome, flush=True)
        else:
            totals += outcome.counts
            simulated_s += outcome.simulated_s
        if time.monotonic() - reported_at > PROGRESS_EVERY_S:
            reported_at = time.monotonic()
            print(_summary(done, failed, simulated_s, totals, began), flush=True)
    for name, count in sorted(totals.items()):
        print(f"{count:12,} {name}")
    print(_summary(done, failed, simulated_s, totals, began))
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="one seed, or FIRST:END")
    parser.add_argument(
        "--fault-seconds", type=float, default=FAULT_PHASE_S, help="length of the fault phase"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trace", action="store_true", help="print the transcript")
    parser.add_argument("--raw", action="store_true", help="with --trace: every event and command")
    parser.add_argument(
        "--fingerprint", action="store_true", help="print only each history's fingerprint"
    )
    return parser.parse_args()


def _outcomes(seeds: range, fault_s: float, processes: int) -> Iterator[Report | str]:
    if processes == 1:
        yield from (_outcome(seed, fault_s) for seed in seeds)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(_outcome, seeds, [fault_s] * len(seeds), chunksize=4)


def _outcome(seed: int, fault_s: float) -> Report | str:
    try:
        return run(seed, fault_s=fault_s)
    except SeedFailed as failure:
        return str(failure)


def _summary(done: int, failed: int, simulated_s: float, totals: Counter[str], began: float) -> str:
    took_s = max(time.monotonic() - began, 0.001)
    return (
        f"{done} seeds, {failed} failed; {simulated_s / 3600:.0f} federation-hours in"
        f" {took_s:.0f} s ({simulated_s / took_s:.0f} times real time,"
        f" {totals['events'] / took_s:,.0f} events per second)"
    )


def _show(seeds: range, options: argparse.Namespace) -> int:
    failed = 0
    for seed in seeds:
        writer = TranscriptWriter()

        def show(entry: HistoryEntry, writer: TranscriptWriter = writer) -> None:
            line = writer.line(entry)
            if options.raw:
                print(f"{entry[0] - 1000:9.3f} {entry[1]} {entry[2]}")
            elif line:
                print(line)

        try:
            report = run(seed, show if options.trace else None, options.fault_seconds)
        except SeedFailed as failure:
            print(failure)
            failed += 1
            continue
        if options.fingerprint:
            print(seed, f"{report.fingerprint:08x}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
