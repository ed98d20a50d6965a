"""Queries of running and stopped sites: status, journals, metrics, and checks over them."""

from __future__ import annotations

import json
import re
import sqlite3
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lightyear_node.config.federation import BarrierConfig, ExchangeConfig, RuleConfig
from lightyear_node.lab.federation import PEERS_NAME, Federation, SiteHome, Statuses
from lightyear_node.lab.simulation_process import simulate_in_child
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.node.home import load_home
from lightyear_node.observe.admin_socket import NotRunning, ask
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from lightyear_node.worker.job_types import verdict_to_plain
from tests.sim.replay import replay

DEADLINE_S = 150.0
"""Long enough that a slow machine makes these tests slow, not red."""

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
SEED = 7
"""The seed of every federation that `lay_out_sites` creates."""
PATIENT = BarrierConfig(heartbeat=0.5, grace=120.0, suspect=60.0, observe=2.0)
"""Every site waits for every other one, as in a simulation."""
QUICK = BarrierConfig(min_peers=1, faulty_max=0, heartbeat=0.5, grace=3.0, suspect=5.0, observe=2.0)

LayOut = Callable[..., list[SiteHome]]
Records = Callable[[SiteHome], list[Record]]


def durable_values(home: SiteHome) -> dict[str, Any]:
    """Read what the site would restore if it were killed now."""
    with sqlite3.connect(f"file:{home.state_dir}/journal.db?mode=ro", uri=True) as db:
        return {key: json.loads(value) for key, value in db.execute("SELECT * FROM memory")}


def durable_state(home: SiteHome) -> tuple[DurableState, Any]:
    """Read the barrier's durable state and the manifest of the last update."""
    values = durable_values(home)
    return DurableState.from_plain(values["barrier"]), values.get("manifest")


def all_finished(statuses: Statuses) -> bool:
    return all(status is not None and status["finished"] for status in statuses.values())


def finished(*names: PeerName) -> Callable[[Statuses], bool]:
    return lambda statuses: all_finished({name: statuses[name] for name in names})


def wait_for_phase(federation: Federation, home: SiteHome, phase: str) -> None:
    """Wait for one site's phase without asking the others, which may be frozen."""

    def reached(_: object) -> bool:
        try:
            return bool(ask(home.state_dir, "status")["phase"] == phase)
        except NotRunning:
            return False

    alone = Federation([])
    alone.wait_until(reached, DEADLINE_S)
    federation.check()


def phase_of(statuses: Statuses, name: PeerName) -> str | None:
    status = statuses[name]
    return status["phase"] if status is not None else None


def change_yaml(path: Path, **changed: object) -> None:
    """Replace keys of a YAML file atomically: a node may be reading it."""
    document = {**yaml.safe_load(path.read_text()), **changed}
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(document))
    new.replace(path)


def run_in_lockstep(
    federation: Federation, rounds: int, started: Callable[[int], None] = lambda configured: None
) -> Statuses:
    """Run sites that were configured for one round through more rounds, in lock-step.

    A site may merge a later update of a peer that is ahead of it.  Here none gets ahead: a round is
    added to the federation config when all sites have completed the previous one.  `started` is
    called with the number of configured rounds whenever one was added.
    """

    def completed(statuses: Statuses, rounds: int) -> bool:
        return all_finished(statuses) and all(s and s["round"] == rounds for s in statuses.values())

    for configured in range(1, rounds + 1):
        for home in federation.homes.values():
            change_yaml(home.directory / PEERS_NAME, rounds=configured)
        started(configured)
        statuses = federation.wait_until(partial(completed, rounds=configured), DEADLINE_S)
    check_lockstep(federation)
    return statuses


def check_lockstep(federation: Federation) -> None:
    """Check that every site judged exactly what each other site announced for that round."""
    histories = {name: federation.rounds(name) for name in federation.homes}
    announced = {
        (name, entry["round"]): entry["update"]["digest"]
        for name, history in histories.items()
        for entry in history
    }
    for name, history in histories.items():
        for entry in history:
            for verdict in entry["verdicts"]:
                peer, round = verdict["peer"], entry["round"]
                judged = (name, peer, round, verdict["digest"])
                assert judged == (name, peer, round, announced[peer, round]), verdict["reason"]


def check_as_simulated(
    federation: Federation, rule: RuleConfig, rounds: int, exchange: ExchangeConfig | None = None
) -> SimulationResult:
    """Check that the running, finished sites match a simulation of them bit for bit."""
    malfunctions = {
        name: home.malfunction for name, home in federation.homes.items() if home.malfunction
    }
    spec = SimulationSpec(
        list(federation.homes),
        rounds,
        SEED,
        rule,
        malfunctions=malfunctions,
        exchange=exchange or ExchangeConfig(),
    )
    [simulated] = simulate_in_child([spec])
    for name, ours in simulated.sites.items():
        for one, entry in zip(ours, federation.rounds(name), strict=True):
            assert dict(one.local) == entry["local"]
            assert dict(one.merged) == entry["merged"]
            # Verdicts contain the digests of what was sent, so this compares the bytes, too.
            judged = {verdict.peer: verdict_to_plain(verdict) for verdict in one.verdicts}
            assert judged == {verdict["peer"]: verdict for verdict in entry["verdicts"]}
    return simulated


def metrics_of(home: SiteHome) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{home.http_address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    matches = (re.fullmatch(r"([^#]\S*(?:\{.*\})?) (\S+)", line) for line in lines)
    return {match[1]: float(match[2]) for match in matches if match}


def check_histories(
    homes: list[SiteHome],
    records: Callable[[SiteHome], list[Record]],
    lost: Mapping[PeerName, list[Record]] | None = None,
) -> None:
    """Check the invariants that hold between all sites' journals, whatever faults occurred.

    `lost`: the journals of disks that sites had before.
    """
    before = {name: [records] for name, records in (lost or {}).items()}
    journals = {home.name: [*before.get(home.name, ()), records(home)] for home in homes}
    replay(parameters_of(homes[0]), journals)


def parameters_of(home: SiteHome) -> Parameters:
    found = load_home(
        home.directory,
        home.directory / PEERS_NAME,
        environment={},
        flags={},
        now=datetime.now(UTC),
    )
    return found.parameters()
