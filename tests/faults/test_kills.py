"""SIGKILL exactly before and after everything that a node makes durable.

One site dies at one point after the other while its peers wait for it, and the federation ends as
if nothing had been: the same updates announced, the same decisions, the same models, bit for bit.

Which updates a round merges depends on timing wherever sites are free to run ahead: who comes back
may find the others one round further, and then rightly merges their newer updates.  So here every
round needs everybody (`min_peers` is all of them), and nobody trains the next one before all have
completed this: then both runs merge the same by construction, and differ in nothing but the deaths.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import DEADLINE_S, C, check_histories, metrics_of
from lives import Gathering, Victim, all_in_round, status_of, train_until
from staging import AVERAGE, counted, history

from lightyear_node.config.agreement import BarrierTerms
from lightyear_node.journal import Record
from lightyear_node.lab.federation import Federation, SiteHome, lay_out, site_names
from lightyear_node.records import PeerName

ROUNDS = 4
EVERYBODY = BarrierTerms(
    min_peers=2, faulty_max=0, heartbeat=0.5, grace=120.0, suspect=120.0, observe=2.0
)
"""No round closes with fewer than all three, however long one of them is away."""

WAITING_TO_TRAIN = (
    *("before:start", "after:start"),  # persistence point 0
    *("before:fetch", "after:fetch"),
)
DEATHS = (
    *("before:adopt-updates", "after:adopt-updates"),
    *("before:adopt-carry", "after:adopt-carry"),
    *("before:seal", "after:seal"),  # 1
    *("before:decision", "after:decision"),  # 2
    *("before:adopt-models:2", "after:adopt-models:2"),  # the first is the model before round 0
    *("before:commit", "after:commit"),  # 3
)
"""In the order of a round, so that each life gets no further than its point."""
KILLED_IN = 1

Steps = list[tuple[str, int, Any]]


def steps(records: list[Record]) -> Steps:
    """All that a site has announced, merged and become, without when and how often it began."""
    told: dict[str, Callable[[Any], Any]] = {
        "seal": lambda body: body["update"]["digest"],
        "decision": lambda body: [(one["peer"], one["digest"]) for one in body["accepted"]],
        "commit": lambda body: body["model"],
    }
    return [(one.kind, one.round, told[one.kind](one.body)) for one in records if one.kind in told]


def rename_host(home: SiteHome, old: str, new: str) -> None:
    """Another name for the addresses in its peers.yaml: a change that a running node records."""
    peers = home.directory / "peers.yaml"
    fresh = peers.with_suffix(".new")
    fresh.write_text(peers.read_text().replace(f"{old}:", f"{new}:"))
    fresh.rename(peers)


def laid_out(folder: Path) -> list[SiteHome]:
    return lay_out(folder, site_names(3), seed=11, rounds=ROUNDS, barrier=EVERYBODY, rule=AVERAGE)


def go_on(federation: Federation, homes: list[SiteHome], rounds: range) -> None:
    """Round by round: nobody begins one that somebody else has still before it."""
    for round in rounds:
        train_until(homes, round)
        federation.wait_until(all_in_round(round + 1), DEADLINE_S)


def undisturbed(folder: Path) -> dict[PeerName, Steps]:
    homes = laid_out(folder)
    train_until(homes, -1)
    with Gathering(homes) as federation:
        go_on(federation, homes, range(ROUNDS))
    check_histories(homes, history)
    return {home.name: steps(history(home)) for home in homes}


@pytest.mark.slow
def test_sigkill_at_every_persistence_point_changes_nothing(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    homes = laid_out(tmp_path / "disturbed")
    home = homes[2]
    train_until(homes, -1)
    with Gathering(homes) as federation:
        go_on(federation, homes, range(KILLED_IN))
        victim = Victim(federation, home)
        victim.kill()
        train_until(homes[:2], KILLED_IN)
        # While it may not train itself, it fetches what the others have trained.
        for failpoint in WAITING_TO_TRAIN:
            victim.live_until(failpoint)
        train_until(homes, KILLED_IN)
        for failpoint in DEATHS:
            victim.live_until(failpoint)
        for failpoint, hosts in (
            ("before:settings", ("127.0.0.1", "localhost")),
            ("after:settings", ("localhost", "127.0.0.1")),
        ):
            victim.live_until(failpoint, lambda hosts=hosts: change(federation, home, hosts))
        federation.start(C)
        federation.wait_until(all_in_round(KILLED_IN + 1), DEADLINE_S)
        go_on(federation, homes, range(KILLED_IN + 1, ROUNDS))
        for one in homes:
            assert counted(metrics_of(one), "peer_refusals") == 0
            assert "Traceback" not in one.log.read_text()
    check_histories(homes, history)
    check_lives(victim, home)
    for one in homes:
        records = history(one)
        assert steps(records) == expected[one.name]
        seals = [record.body["update"] for record in records if record.kind == "seal"]
        assert len({update["generation"] for update in seals}) == 1, "it has forgotten nothing"
        held_against = [r.kind for r in records if "evidence" in r.kind or "quarantine" in r.kind]
        assert not held_against


def change(federation: Federation, home: SiteHome, hosts: tuple[str, str]) -> None:
    federation.wait_until(lambda _: status_of(home) is not None, DEADLINE_S)
    rename_host(home, *hosts)


def check_lives(victim: Victim, home: SiteHome) -> None:
    """Each began where the last had ended, and said again what that had said, signature and all."""
    records = history(home)
    begun = [record.round for record in records if record.kind == "start"]
    # The first life is none of the victim's; who died before it was recorded has no start.
    began = [0, *(kept["barrier"]["round"] for kept in victim.kept)]
    recorded = [True, *(death != "before:start" for death in victim.deaths[1:]), True]
    assert begun == [round for round, was in zip(began, recorded, strict=True) if was]

    said: dict[int, Any] = {}
    for kept in victim.kept:
        manifest = kept["manifest"]
        round = manifest["manifest"]["update"]["round"]
        assert said.setdefault(round, manifest) == manifest
    assert set(said) == {KILLED_IN - 1, KILLED_IN}
    for record in records:
        if record.kind == "seal" and record.round in said:
            assert record.body["update"] == said[record.round]["manifest"]["update"]
