"""Sites that were suspended, killed all at once, started late, or lost their state."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import SiteHome, lay_out, site_names
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from tests.support.bad_network_setup import AVERAGE, HASTY, counted, history
from tests.support.site_lives import (
    SKEW_MAX,
    FailpointFederation,
    check_caught_up,
    lag_of,
    round_of,
    status_of,
    wait_for,
)
from tests.support.site_queries import A, B, C, check_histories, durable_state, metrics_of

ENDLESS = 5000
"""Rounds; no test gets that far."""
STOPPED_S = 60.0
JOINS_AT = 10
PROBATION = 2
"""Rounds for which the updates of a site that lost its state are not merged."""


def lay_out_three(folder: Path, barrier: BarrierConfig = HASTY) -> list[SiteHome]:
    return lay_out(folder, site_names(3), rounds=ENDLESS, barrier=barrier, rule=AVERAGE)


def wait_for_round(homes: list[SiteHome], round: int) -> None:
    wait_for(lambda: min(map(round_of, homes)) >= round)


def decisions(home: SiteHome, since: int = 0) -> list[Record]:
    return [r for r in history(home) if r.kind == "decision" and r.seq > since]


def seals(home: SiteHome, since: int = 0) -> list[Record]:
    return [r for r in history(home) if r.kind == "seal" and r.seq > since]


def merged_from(home: SiteHome, peer: PeerName, sealed: list[Record]) -> list[int]:
    """Return the rounds in which a site merged any of these updates."""
    digests = {record.body["update"]["digest"] for record in sealed}
    return [
        decision.round
        for decision in decisions(home)
        for update in decision.body["accepted"]
        if update["peer"] == peer and update["digest"] in digests
    ]


def check_no_peer_is_refused(homes: list[SiteHome]) -> None:
    for home in homes:
        assert counted(metrics_of(home), "peer_refusals") == 0
        assert not (status_of(home) or {}).get("quarantined")
        assert "Traceback" not in home.log.read_text()


def test_a_site_suspended_for_a_minute_catches_up_within_two_rounds(
    tmp_path: Path,
) -> None:
    """Like a migrating virtual machine: the daemon and its worker are both suspended."""
    homes = lay_out_three(tmp_path)
    *others, home = homes
    with FailpointFederation(homes) as federation:
        wait_for_round(homes, 1)
        status = status_of(home)
        assert status is not None
        both = (federation.pid(C), status["worker_pid"])
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        since = history(home)[-1].seq
        stopped_at, reached = time.monotonic(), max(map(round_of, others))
        wait_for(lambda: time.monotonic() - stopped_at > STOPPED_S)
        went_on = min(map(round_of, others)) - reached
        assert went_on > SKEW_MAX, "the others did not wait for it"
        for pid in both:
            os.kill(pid, signal.SIGCONT)

        wait_for(lambda: len(seals(home, since)) >= 3)
        wait_for(lambda: all(merged_from(o, C, seals(home, since)[1:]) for o in others))
        check_no_peer_is_refused(homes)
    check_caught_up(homes, C, since)
    first = decisions(home, since)[0]
    # The minute of suspension did not count as a grace period.
    assert first.body["cause"] != "grace", first.body["why"]
    print(f"{went_on} rounds without it; it closed its own as {first.body['why']}")
    check_histories(homes, history)


def test_all_sites_killed_at_once_resume_without_an_operator(tmp_path: Path) -> None:
    homes = lay_out_three(tmp_path)
    with FailpointFederation(homes) as federation:
        for round in (1, 3):
            wait_for_round(homes, round)
            for home in homes:
                federation.kill(home.name)
            for home in homes:
                federation.wait_for_exit(home.name)
            before = {home.name: durable_state(home) for home in homes}
            last = {home.name: history(home)[-1].seq for home in homes}
            for home in homes:
                federation.start(home.name)
            reached = max(memory.round for memory, _ in before.values())
            wait_for_round(homes, reached + 2)
            for home in homes:
                memory, manifest = before[home.name]
                check_resumed(home, last[home.name], memory.round, manifest)
        check_no_peer_is_refused(homes)
    check_histories(homes, history)


def check_resumed(home: SiteHome, since: int, round: int, manifest: dict[str, Any]) -> None:
    """Check that it started in its previous round and sealed no announced round again."""
    started, *after = (r for r in history(home) if r.seq > since)
    assert (started.kind, started.round) == ("start", round)
    announced = manifest["manifest"]["update"]["round"]
    assert all(r.round > announced for r in after if r.kind == "seal")


def test_a_late_joiner_begins_in_the_current_round(tmp_path: Path) -> None:
    homes = lay_out_three(tmp_path)
    *others, home = homes
    with FailpointFederation(homes, late=(C,)) as federation:
        wait_for_round(others, JOINS_AT)
        federation.start(C)
        wait_for(lambda: status_of(home) is not None)
        wait_for(lambda: bool(decisions(home)))
        wait_for(lambda: all(merged_from(other, C, seals(home)) for other in others))
        check_no_peer_is_refused(homes)
    first = seals(home)[0]
    assert first.round >= JOINS_AT
    assert 0 <= lag_of(first, [history(other) for other in others]) <= SKEW_MAX
    merged = [u["peer"] for d in decisions(home) for u in d.body["accepted"]]
    assert {A, B} >= set(merged) != set()
    check_histories(homes, history)


def test_a_lost_state_directory_costs_only_a_probation(tmp_path: Path) -> None:
    """Its keys remain, and its peers report what it had announced."""
    # A long grace: probation is a number of rounds, and would pass unseen if the others went on
    # before they had reached the site again.
    homes = lay_out_three(tmp_path, HASTY.model_copy(update={"grace": 60.0}))
    *others, home = homes
    with FailpointFederation(homes) as federation:
        wait_for_round(homes, 3)
        federation.kill(C)
        federation.wait_for_exit(C)
        lost = history(home)
        reached = round_of(others[0])
        wait_for_round(others, reached + 2)
        home.state_dir.rename(home.directory / "lost")
        last = {other.name: history(other)[-1].seq for other in others}
        federation.start(C)
        wait_for(lambda: status_of(home) is not None)
        wait_for(lambda: all(merged_from(other, C, seals(home)) for other in others))
        check_no_peer_is_refused(homes)
    *_, old = (record for record in lost if record.kind == "seal")
    new = seals(home)[0]
    assert new.body["update"]["generation"] > old.body["update"]["generation"]
    assert new.round > old.round
    assert 0 <= lag_of(new, [history(other) for other in others]) <= SKEW_MAX
    for other in others:
        verdicts = verdicts_about(C, decisions(other, last[other.name]))
        reasons = [reason for _, reason in verdicts]
        # Sites do not wait long for one on probation: some rounds may close without it.
        assert reasons.index("ok") <= PROBATION
        assert set(reasons[: reasons.index("ok")]) <= {"probation"}
        assert verdicts[reasons.index("ok")][0] >= new.round + PROBATION
    check_histories(homes, history, lost={C: lost})


def verdicts_about(peer: PeerName, records: list[Record]) -> list[tuple[int, str]]:
    """Return the rounds for which the peer delivered an update, with the reason."""
    lines = [(record.round, line) for record in records for line in record.body["verdicts"]]
    about = [(round, line["reason"]) for round, line in lines if line["peer"] == peer]
    return [(round, reason) for round, reason in about if reason in ("probation", "ok")]
