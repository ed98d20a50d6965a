"""What the federation tests ask of sites: their status, journals and metrics."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sqlite3
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

from lightyear_node.barrier import Memory, Terms
from lightyear_node.config.agreement import BarrierTerms, ExchangeTerms, RuleTerms
from lightyear_node.home import load_home
from lightyear_node.journal import Record
from lightyear_node.lab.federation import PEERS_NAME, Federation, SiteHome, Statuses
from lightyear_node.lab.simulate import SimResult, Spec, simulate_apart
from lightyear_node.observe.admin import NotRunning, ask
from lightyear_node.records import PeerName
from lightyear_node.worker.jobs import verdict_to_plain
from tests.sim.replay import replay

P, R = ParamSpec("P"), TypeVar("R")

DEADLINE_S = 150.0
"""Generous: a slow machine makes these tests slow, not red."""

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
SEED = 7
"""Of every federation that `lay_out_sites` lays out."""
PATIENT = BarrierTerms(heartbeat=0.5, grace=120.0, suspect=60.0, observe=2.0)
"""Every site waits for every other, as a simulation does."""
QUICK = BarrierTerms(min_peers=1, faulty_max=0, heartbeat=0.5, grace=3.0, suspect=5.0, observe=2.0)

LayOut = Callable[..., list[SiteHome]]


def kept_by(home: SiteHome) -> dict[str, Any]:
    """What a site would remember if it were killed now."""
    with sqlite3.connect(f"file:{home.state_dir}/journal.db?mode=ro", uri=True) as db:
        return {key: json.loads(value) for key, value in db.execute("SELECT * FROM memory")}


def memory_of(home: SiteHome) -> tuple[Memory, Any]:
    """The barrier's part of that, and the manifest."""
    kept = kept_by(home)
    return Memory.from_plain(kept["barrier"]), kept.get("manifest")


def all_finished(statuses: Statuses) -> bool:
    return all(status is not None and status["finished"] for status in statuses.values())


def finished(*names: PeerName) -> Callable[[Statuses], bool]:
    return lambda statuses: all_finished({name: statuses[name] for name in names})


def wait_for_phase(federation: Federation, home: SiteHome, phase: str) -> None:
    """Asks only this site: the others may be frozen."""

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


class OutOfStep(Exception):
    """A site has merged a later update of a peer, or gone on without one, as it may."""


def repeated_when_out_of_step(test: Callable[P, R]) -> Callable[P, R]:
    """For tests of what sites do in step, which a busy machine may keep them from now and then."""

    @functools.wraps(test)
    def tried(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(2):
            with contextlib.suppress(OutOfStep):
                return test(*args, **kwargs)
        return test(*args, **kwargs)

    return tried


def check_in_step(federation: Federation) -> None:
    """Every site has judged what each of the others announced for that very round."""
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
                if verdict["digest"] != announced[peer, round]:
                    raise OutOfStep(f"round {round} at {name}: {peer} {verdict['reason']}")


def check_as_simulated(
    federation: Federation, rule: RuleTerms, rounds: int, exchange: ExchangeTerms | None = None
) -> SimResult:
    """The running, finished sites have done what a simulation of them does, to the last bit."""
    malfunctions = {
        name: home.malfunction for name, home in federation.homes.items() if home.malfunction
    }
    spec = Spec(
        list(federation.homes),
        rounds,
        SEED,
        rule,
        malfunctions=malfunctions,
        exchange=exchange or ExchangeTerms(),
    )
    [simulated] = simulate_apart([spec])
    check_in_step(federation)
    for name, ours in simulated.sites.items():
        for one, entry in zip(ours, federation.rounds(name), strict=True):
            assert dict(one.local) == entry["local"]
            assert dict(one.merged) == entry["merged"]
            # The verdicts have the digests of what was sent, so the same bytes were.
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
    """What must hold between the journals of all sites, whatever happened to them.

    `lost` are journals of disks that sites had before.
    """
    before = {name: [records] for name, records in (lost or {}).items()}
    journals = {home.name: [*before.get(home.name, ()), records(home)] for home in homes}
    replay(terms_of(homes[0]), journals)


def terms_of(home: SiteHome) -> Terms:
    found = load_home(
        home.directory,
        home.directory / PEERS_NAME,
        environment={},
        flags={},
        now=datetime.now(UTC),
    )
    return found.terms()
