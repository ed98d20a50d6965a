"""Measures the overhead of the round protocol with real nodes: recovery, journal, waiting.

`back`: from SIGKILL until the node continues in the same round.  It is restarted at once, and the
time in which the worker builds the task is reported separately, since it depends on the task.

`commit` and the others: eight sites with a model of 20 k parameters, in lock-step.  The lower bound
of a round is the training of the slowest site and the transfer of its update; the rest is the
protocol's: judging, merging, the journal, the barrier, and waiting for messages.  Two limitations:
sixteen processes share the cores of this machine, so that every duration includes waiting for a
core, relatively more in the protocol; and loopback has no latency, which a real network adds twice
to every round.

Prints one JSON object.

    python tests/bench/rounds.py
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parts.stopwatch import START, Lap, laps_of

from lightyear_node.config.federation import BarrierConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import Federation, SiteHome, lay_out, site_names
from lightyear_node.types import PeerName

DEADLINE_S = 300.0
SITES = 8
ROUNDS = 8
KILLS = 4
TASK = """
from torch import nn
from lightyear_node.lab.tasks import digits


def build(site_index=0, site_count=1, seed=0):
    task = digits.build(site_index, site_count, seed, epochs={epochs})
    # 19,960 parameters.
    task.model = lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 266), nn.ReLU(), nn.Linear(266, 10)
    )
    return task
"""


def laid_out(folder: Path, sites: int, rounds: int, epochs: int) -> list[SiteHome]:
    barrier = BarrierConfig(
        min_peers=sites - 1, faulty_max=0, heartbeat=0.5, grace=120.0, suspect=120.0
    )
    homes = lay_out(
        folder,
        site_names(sites),
        rounds=rounds,
        barrier=barrier,
        rule=RuleConfig(name="fedavg"),
        task=TaskConfig(entry="small:build"),
    )
    for home in homes:
        (home.directory / "small.py").write_text(TASK.format(epochs=epochs))
    return homes


def recovery(folder: Path) -> dict[str, Any]:
    """Kill one of three sites several times; the others cannot continue without it."""
    homes = laid_out(folder, 3, rounds=5000, epochs=1)
    home = homes[-1]
    parts: dict[str, list[float]] = {"imports": [], "open": [], "start": [], "observe": []}
    totals, same_round = [], True
    with Federation(homes, START) as federation:
        for _ in range(KILLS):
            target = len(commits(home)) + 2
            federation.wait_until(lambda _, n=target: len(commits(home)) >= n, DEADLINE_S)
            known = len(laps_of(home.directory))
            killed_at = time.monotonic()
            federation.kill(home.name)
            federation.wait_for_exit(home.name)
            federation.start(home.name)
            federation.wait_until(lambda _, n=known: back_in(home, n) is not None, DEADLINE_S)
            back = back_in(home, known)
            assert back is not None
            laps = laps_of(home.directory)[known:]
            opened, started = first(laps, "open"), first(laps, "journal start")
            totals.append(back.ended - killed_at)
            parts["imports"].append(opened.began - killed_at)
            parts["open"].append(opened.seconds)
            parts["start"].append(started.ended - opened.ended)
            parts["observe"].append(back.ended - started.ended)
            same_round &= back.round == started.round
    overheads = [total - opened for total, opened in zip(totals, parts["open"], strict=True)]
    return {
        "seconds": {name: round(statistics.median(taken), 3) for name, taken in parts.items()},
        "beyond_model_load_s": [round(one, 2) for one in sorted(overheads)],
        "beyond_over_model_load": ratio(
            statistics.median(overheads), statistics.median(parts["open"])
        ),
        "same_round": same_round,
        "goal_s": 10,
        "goal_met": max(overheads) < 10 and same_round,
    }


def back_in(home: SiteHome, since: int) -> Lap | None:
    found = [lap for lap in laps_of(home.directory)[since:] if lap.what.startswith("back")]
    return found[0] if found else None


def rounds_of_many(folder: Path) -> dict[str, Any]:
    homes = laid_out(folder, SITES, ROUNDS, epochs=4)
    with Federation(homes, START) as federation:
        federation.wait_until(
            lambda statuses: all(s is not None and s["finished"] for s in statuses.values()),
            DEADLINE_S,
        )
    laps = {home.name: laps_of(home.directory) for home in homes}
    # Not the first round, in which sites wait for the start of the others.
    found = [one for number in range(1, ROUNDS) if (one := one_round(laps, number))]
    assert found, "no round was complete at all sites"
    names = found[0].keys()
    median = {name: statistics.median(one[name] for one in found) for name in names}
    total, bound = median["round"], median["training"] + median["transfer"]
    return {
        "rounds_measured": len(found),
        "ms": {name: round(1000 * value, 2) for name, value in median.items()},
        "round_over_training_and_transfer": ratio(total, bound),
        "barrier_share": ratio(median["barrier"], total),
        "commit": {
            "ms_per_round": round(1000 * median["journal"], 2),
            "share_of_round": ratio(median["journal"], total),
        },
    }


def one_round(sites: Mapping[PeerName, Sequence[Lap]], number: int) -> dict[str, float] | None:
    """Durations in one round over all sites, from the median start to the median end.

    `training` is that of the site that sealed last, for which all others waited, and `transfer`
    that of its update; the next ones are averages over the sites.  `rest` is the remainder: late
    starts, messages in flight, processes waiting for a core.

    None if a site has skipped a step, because it was late.
    """
    try:
        return _one_round(sites, number)
    except LookupError:
        return None


def _one_round(sites: Mapping[PeerName, Sequence[Lap]], number: int) -> dict[str, float]:
    all_laps = sites.values()
    began, ended = (
        statistics.median(step(laps, "journal commit", at).ended for laps in all_laps)
        for at in (number - 1, number)
    )
    last = max(sites, key=lambda name: step(sites[name], "journal seal", number).ended)
    spent = {
        "training": step(sites[last], "train", number).seconds,
        "transfer": statistics.median(
            step(laps, f"fetch {last}", number).seconds
            for name, laps in sites.items()
            if name != last
        ),
        **{job: average_spent(all_laps, number, job) for job in ("judge", "merge", "journal")},
        "barrier": statistics.mean(
            step(laps, "journal commit", number).barrier_s
            - step(laps, "journal commit", number - 1).barrier_s
            for laps in all_laps
        ),
    }
    return {"round": ended - began, **spent, "rest": ended - began - sum(spent.values())}


def average_spent(sites: Iterable[Sequence[Lap]], number: int, what: str) -> float:
    return statistics.mean(
        sum(lap.seconds for lap in laps if lap.round == number and lap.what.startswith(what))
        for laps in sites
    )


def commits(home: SiteHome) -> list[Lap]:
    try:
        return [lap for lap in laps_of(home.directory) if lap.what == "journal commit"]
    except FileNotFoundError:
        return []


def step(laps: Iterable[Lap], what: str, number: int) -> Lap:
    for lap in laps:
        if (lap.what, lap.round) == (what, number):
            return lap
    raise LookupError(f"no {what} in round {number}")


def first(laps: Iterable[Lap], what: str) -> Lap:
    return next(lap for lap in laps if lap.what == what)


def ratio(one: float, other: float) -> float:
    return float(f"{one / other:.3g}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        back = recovery(Path(folder) / "back")
        many = rounds_of_many(Path(folder) / "many")
    found = {"sites": SITES, "rounds": ROUNDS, "back": back, **many}
    print(json.dumps({"bench": "rounds", "cores": os.cpu_count(), **found}))


if __name__ == "__main__":
    main()
