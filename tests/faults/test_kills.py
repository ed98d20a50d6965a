"""SIGKILL before and after every persistence point.

One site is killed at one point after the other while its peers wait for it, and the federation ends
as in a run without kills: the same updates, decisions and models, bit for bit.

Where sites may run ahead, timing decides which updates a round merges: a restarted site may find
the others one round ahead and then correctly merges their newer updates.  So here every round needs
all sites (`min_peers`), and no site trains the next round before all have completed this one.  Then
both runs merge the same updates by construction and differ only in the kills.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import Federation, SiteHome, lay_out, site_names
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from tests.support.bad_network_setup import AVERAGE, counted, history
from tests.support.site_lives import (
    FailpointFederation,
    KilledSite,
    all_in_round,
    status_of,
    train_until,
)
from tests.support.site_queries import DEADLINE_S, C, check_histories, metrics_of

ROUNDS = 4
ALL = BarrierConfig(
    min_peers=2, faulty_max=0, heartbeat=0.5, grace=120.0, suspect=120.0, observe=2.0
)
"""No round closes without all three, however long one of them is down."""

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
"""In the order of a round, so that each process gets no further than its point."""
KILLED_IN = 1

Steps = list[tuple[str, int, Any]]


def steps(records: list[Record]) -> Steps:
    """Return what a site announced, merged and produced, without times and restarts."""
    value_of: dict[str, Callable[[Any], Any]] = {
        "seal": lambda body: body["update"]["digest"],
        "decision": lambda body: [(one["peer"], one["digest"]) for one in body["accepted"]],
        "commit": lambda body: body["model"],
    }
    return [
        (one.kind, one.round, value_of[one.kind](one.body))
        for one in records
        if one.kind in value_of
    ]


def rename_host(home: SiteHome, old: str, new: str) -> None:
    """Rename the host in its peers.yaml: a change that a running node records."""
    peers = home.directory / "peers.yaml"
    fresh = peers.with_suffix(".new")
    fresh.write_text(peers.read_text().replace(f"{old}:", f"{new}:"))
    fresh.rename(peers)


def lay_out_three(folder: Path) -> list[SiteHome]:
    return lay_out(folder, site_names(3), seed=11, rounds=ROUNDS, barrier=ALL, rule=AVERAGE)


def run_rounds(federation: Federation, homes: list[SiteHome], rounds: range) -> None:
    """Run round by round: no site begins one before all have completed the previous."""
    for round in rounds:
        train_until(homes, round)
        federation.wait_until(all_in_round(round + 1), DEADLINE_S)


def reference_run(folder: Path) -> dict[PeerName, Steps]:
    homes = lay_out_three(folder)
    train_until(homes, -1)
    with FailpointFederation(homes) as federation:
        run_rounds(federation, homes, range(ROUNDS))
    check_histories(homes, history)
    return {home.name: steps(history(home)) for home in homes}


def test_sigkill_at_every_persistence_point_changes_nothing(tmp_path: Path) -> None:
    expected = reference_run(tmp_path / "reference_run")
    homes = lay_out_three(tmp_path / "disturbed")
    home = homes[2]
    train_until(homes, -1)
    with FailpointFederation(homes) as federation:
        run_rounds(federation, homes, range(KILLED_IN))
        killed = KilledSite(federation, home)
        killed.kill()
        train_until(homes[:2], KILLED_IN)
        # While it may not train, it fetches the others' updates.
        for failpoint in WAITING_TO_TRAIN:
            killed.run_until(failpoint)
        train_until(homes, KILLED_IN)
        for failpoint in DEATHS:
            killed.run_until(failpoint)
        for failpoint, hosts in (
            ("before:settings", ("127.0.0.1", "localhost")),
            ("after:settings", ("localhost", "127.0.0.1")),
        ):
            killed.run_until(failpoint, lambda hosts=hosts: change(federation, home, hosts))
        federation.start(C)
        federation.wait_until(all_in_round(KILLED_IN + 1), DEADLINE_S)
        run_rounds(federation, homes, range(KILLED_IN + 1, ROUNDS))
        for one in homes:
            assert counted(metrics_of(one), "peer_refusals") == 0
            assert "Traceback" not in one.log.read_text()
    check_histories(homes, history)
    check_restarts(killed, home)
    for one in homes:
        records = history(one)
        assert steps(records) == expected[one.name]
        seals = [record.body["update"] for record in records if record.kind == "seal"]
        assert len({update["generation"] for update in seals}) == 1, "no state is lost"
        held_against = [r.kind for r in records if "evidence" in r.kind or "quarantine" in r.kind]
        assert not held_against


def change(federation: Federation, home: SiteHome, hosts: tuple[str, str]) -> None:
    federation.wait_until(lambda _: status_of(home) is not None, DEADLINE_S)
    rename_host(home, *hosts)


def check_restarts(killed: KilledSite, home: SiteHome) -> None:
    """Check that each process resumed where the last one ended, with the same signed manifest."""
    records = history(home)
    begun = [record.round for record in records if record.kind == "start"]
    # The first process was not killed; one that died before its start record has none.
    began = [0, *(kept["barrier"]["round"] for kept in killed.durable)]
    recorded = [True, *(death != "before:start" for death in killed.deaths[1:]), True]
    assert begun == [round for round, was in zip(began, recorded, strict=True) if was]

    announced: dict[int, Any] = {}
    for kept in killed.durable:
        manifest = kept["manifest"]
        round = manifest["manifest"]["update"]["round"]
        assert announced.setdefault(round, manifest) == manifest
    assert set(announced) == {KILLED_IN - 1, KILLED_IN}
    for record in records:
        if record.kind == "seal" and record.round in announced:
            assert record.body["update"] == announced[record.round]["manifest"]["update"]
