"""Sites that were away: paused, killed all at once, late, or without their memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from asking import A, B, C, check_histories, memory_of, metrics_of
from lives import (
    SKEW_MAX,
    Gathering,
    check_caught_up,
    lag_of,
    round_of,
    status_of,
    wait_for,
)
from staging import AVERAGE, HASTY, counted, history

from lightyear_node.config.agreement import BarrierTerms
from lightyear_node.journal import Record
from lightyear_node.lab.federation import SiteHome, lay_out, site_names
from lightyear_node.records import PeerName

ENDLESS = 5000
"""Rounds: no test gets that far."""
STOPPED_S = 60.0
JOINS_AT = 10
PROBATION = 2
"""Rounds for which nothing is merged of a site that has lost its memory."""


def laid_out(folder: Path, barrier: BarrierTerms = HASTY) -> list[SiteHome]:
    return lay_out(folder, site_names(3), rounds=ENDLESS, barrier=barrier, rule=AVERAGE)


def reach(homes: list[SiteHome], round: int) -> None:
    wait_for(lambda: min(map(round_of, homes)) >= round)


def decisions(home: SiteHome, since: int = 0) -> list[Record]:
    return [r for r in history(home) if r.kind == "decision" and r.seq > since]


def seals(home: SiteHome, since: int = 0) -> list[Record]:
    return [r for r in history(home) if r.kind == "seal" and r.seq > since]


def merged_from(home: SiteHome, peer: PeerName, sealed: list[Record]) -> list[int]:
    """In which rounds a site has merged any of these updates."""
    digests = {record.body["update"]["digest"] for record in sealed}
    return [
        decision.round
        for decision in decisions(home)
        for update in decision.body["accepted"]
        if update["peer"] == peer and update["digest"] in digests
    ]


def check_nobody_is_blamed(homes: list[SiteHome]) -> None:
    for home in homes:
        assert counted(metrics_of(home), "peer_refusals") == 0
        assert not (status_of(home) or {}).get("quarantined")
        assert "Traceback" not in home.log.read_text()


@pytest.mark.slow
def test_a_site_paused_for_a_minute_is_with_the_others_again_after_two_rounds(
    tmp_path: Path,
) -> None:
    """As a virtual machine that is moved: the daemon and its worker both stand still."""
    homes = laid_out(tmp_path)
    *others, home = homes
    with Gathering(homes) as federation:
        reach(homes, 1)
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
        check_nobody_is_blamed(homes)
    check_caught_up(homes, C, since)
    first = decisions(home, since)[0]
    # Nothing was decided on the strength of a minute that it had not lived through.
    assert first.body["cause"] != "grace", first.body["why"]
    print(f"{went_on} rounds without it; it closed its own as {first.body['why']}")
    check_histories(homes, history)


@pytest.mark.slow
def test_all_are_killed_at_once_and_go_on_without_an_operator(tmp_path: Path) -> None:
    homes = laid_out(tmp_path)
    with Gathering(homes) as federation:
        for round in (1, 3):
            reach(homes, round)
            for home in homes:
                federation.kill(home.name)
            for home in homes:
                federation.wait_for_exit(home.name)
            before = {home.name: memory_of(home) for home in homes}
            last = {home.name: history(home)[-1].seq for home in homes}
            for home in homes:
                federation.start(home.name)
            reached = max(memory.round for memory, _ in before.values())
            reach(homes, reached + 2)
            for home in homes:
                memory, manifest = before[home.name]
                check_resumed(home, last[home.name], memory.round, manifest)
        check_nobody_is_blamed(homes)
    check_histories(homes, history)


def check_resumed(home: SiteHome, since: int, round: int, manifest: dict[str, Any]) -> None:
    """It began in the round that it was in, and what it had announced was not sealed again."""
    started, *after = (r for r in history(home) if r.seq > since)
    assert (started.kind, started.round) == ("start", round)
    announced = manifest["manifest"]["update"]["round"]
    assert all(r.round > announced for r in after if r.kind == "seal")


@pytest.mark.slow
def test_a_late_joiner_begins_in_the_current_round(tmp_path: Path) -> None:
    homes = laid_out(tmp_path)
    *others, home = homes
    with Gathering(homes, late=(C,)) as federation:
        reach(others, JOINS_AT)
        federation.start(C)
        wait_for(lambda: status_of(home) is not None)
        wait_for(lambda: bool(decisions(home)))
        wait_for(lambda: all(merged_from(other, C, seals(home)) for other in others))
        check_nobody_is_blamed(homes)
    first = seals(home)[0]
    assert first.round >= JOINS_AT
    assert 0 <= lag_of(first, [history(other) for other in others]) <= SKEW_MAX
    merged = [u["peer"] for d in decisions(home) for u in d.body["accepted"]]
    assert {A, B} >= set(merged) != set()
    check_histories(homes, history)


@pytest.mark.slow
def test_a_lost_state_directory_costs_a_probation_and_nothing_else(tmp_path: Path) -> None:
    """Its keys are there, and the others: they tell it what it had announced."""
    # Soon missed, but waited for once it is back: probation is a number of rounds, and would be
    # over unseen if the others went on before they had reached its port again.
    homes = laid_out(tmp_path, HASTY.model_copy(update={"grace": 60.0}))
    *others, home = homes
    with Gathering(homes) as federation:
        reach(homes, 3)
        federation.kill(C)
        federation.wait_for_exit(C)
        lost = history(home)
        reached = round_of(others[0])
        reach(others, reached + 2)
        home.state_dir.rename(home.directory / "lost")
        last = {other.name: history(other)[-1].seq for other in others}
        federation.start(C)
        wait_for(lambda: status_of(home) is not None)
        wait_for(lambda: all(merged_from(other, C, seals(home)) for other in others))
        check_nobody_is_blamed(homes)
    *_, old = (record for record in lost if record.kind == "seal")
    new = seals(home)[0]
    assert new.body["update"]["generation"] > old.body["update"]["generation"]
    assert new.round > old.round
    assert 0 <= lag_of(new, [history(other) for other in others]) <= SKEW_MAX
    for other in others:
        verdicts = verdicts_about(C, decisions(other, last[other.name]))
        reasons = [reason for _, reason in verdicts]
        # Nobody waits long for a site on probation: some of these rounds may be closed without it.
        assert reasons.index("ok") <= PROBATION
        assert set(reasons[: reasons.index("ok")]) <= {"probation"}
        assert verdicts[reasons.index("ok")][0] >= new.round + PROBATION
    check_histories(homes, history, lost={C: lost})


def verdicts_about(peer: PeerName, records: list[Record]) -> list[tuple[int, str]]:
    """The rounds for which it had delivered something, and what became of it."""
    lines = [(record.round, line) for record in records for line in record.body["verdicts"]]
    about = [(round, line["reason"]) for round, line in lines if line["peer"] == peer]
    return [(round, reason) for round, reason in about if reason in ("probation", "ok")]
