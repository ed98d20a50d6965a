"""Rules that remember, that train alone or that a user wrote, in real nodes that may be killed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import (
    DEADLINE_S,
    PATIENT,
    SEED,
    A,
    B,
    C,
    LayOut,
    all_finished,
    check_histories,
    finished,
    kept_by,
    phase_of,
    wait_for_phase,
)

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.journal import Record
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.lab.simulate import Spec, take_seats
from lightyear_node.records import PeerName, Round

D = PeerName("site-d")
PRIOR = 3
"""Where AFA's α and β begin."""

Records = Callable[[SiteHome], list[Record]]


def decisions(history: list[Record]) -> list[Mapping[str, Any]]:
    return [record.body for record in history if record.kind == "decision"]


def check_reputation(history: list[Record]) -> None:
    """Every decision's counts are those of the one before, and what it found itself."""
    before: Mapping[str, Any] = {"alpha": {}, "beta": {}}
    for decision in decisions(history):
        state = decision["rule_state"]
        for verdict in decision["verdicts"]:
            peer, reason = verdict["peer"], verdict["reason"]
            for count, counted in (("alpha", "ok"), ("beta", "outlier")):
                expected = before[count].get(peer, PRIOR) + (reason == counted)
                assert state[count].get(peer, PRIOR) == expected, (decision["round"], peer, reason)
        before = state


def test_a_reputation_survives_sigkill_and_ends_in_blocking(
    lay_out_sites: LayOut, records: Records
) -> None:
    rounds = 9
    homes = lay_out_sites(
        4,
        rounds=rounds,
        malfunctions={D: Malfunction(kind="sfa")},
        barrier=PATIENT,
        rule=RuleTerms(name="afa"),
    )
    with Federation(homes) as federation:
        for at_round in (2, 5):
            federation.wait_until(
                lambda s, r=at_round: s[C] is not None and s[C]["round"] >= r, DEADLINE_S
            )
            federation.kill(C)
            federation.wait_for_exit(C)
            remembered = kept_by(homes[2])["rule_state"]
            assert remembered == decisions(records(homes[2]))[-1]["rule_state"]
            assert remembered["beta"][D] > PRIOR
            federation.start(C)
        federation.wait_until(all_finished, DEADLINE_S)
    for home in homes[:3]:
        history = records(home)
        assert len(decisions(history)) == rounds
        check_reputation(history)
        about_d = [v for d in decisions(history) for v in d["verdicts"] if v["peer"] == D]
        assert not any(verdict["accepted"] for verdict in about_d)
        assert "blocked" in [verdict["reason"] for verdict in about_d[-3:]]
        assert kept_by(home)["rule_state"]["blocked"] == [D]
    check_histories(homes, records)


@pytest.mark.slow
def test_a_killed_sites_personal_model_is_the_one_it_goes_on_with(lay_out_sites: LayOut) -> None:
    """Its next worker closes a round that it has not trained: all it needs is in the files."""
    homes = lay_out_sites(2, rounds=2, rule=RuleTerms(name="ditto"))
    federation = Federation(homes)
    with ExitStack() as stack:
        stack.callback(federation.stop)
        federation.start(A)
        federation.start(B)
        federation.wait_until(
            lambda s: phase_of(s, A) not in (None, "starting", "observing"), DEADLINE_S
        )
        # As long as nobody else is awake, the round stays open.
        os.kill(federation.pid(B), signal.SIGSTOP)
        wait_for_phase(federation, homes[0], "collecting")
        federation.kill(A)
        federation.wait_for_exit(A)
        os.kill(federation.pid(B), signal.SIGCONT)
        federation.start(A)
        federation.wait_until(all_finished, DEADLINE_S)
        rounds = federation.rounds(A)
    assert len(rounds) == 2
    for entry in rounds:
        # What is merged is the shared model, and that is not the one that is measured.
        assert entry["merged"] == entry["local"]
    assert rounds[0]["local"] != rounds[1]["local"]


@contextmanager
def overheard(*homes: SiteHome) -> Iterator[list[socket.socket]]:
    """Listens in place of these sites; whoever calls one of them is kept waiting there."""
    with ExitStack() as stack:
        doors = []
        for home in homes:
            host, _, port = home.address.rpartition(":")
            doors.append(stack.enter_context(socket.create_server((host, int(port)))))
            doors[-1].setblocking(False)
        yield doors


def listening(pid: int) -> set[str]:
    """The addresses that a daemon and its worker listen on; they have no other connections."""
    ours = {pid, *(child.pid for child in psutil.Process(pid).children())}
    found = [c for c in psutil.net_connections("inet") if c.pid in ours]
    assert all(c.status in (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT) for c in found)
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN}


def test_a_site_that_trains_alone_needs_nobody_and_talks_to_nobody(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    rounds, rule = 3, RuleTerms(name="local")
    homes = lay_out_sites(rounds=rounds, rule=rule)
    alone = homes[0]
    with overheard(*homes[1:]) as doors, Federation([alone]) as federation:
        statuses = federation.wait_until(finished(A), DEADLINE_S)
        for door in doors:
            with pytest.raises(BlockingIOError):
                door.accept()
        # Metrics are there; for peers not even the port is open.
        assert listening(federation.pid(A)) == {alone.http_address}
        host, _, port = alone.address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=10)
        status = statuses[A]
        assert status is not None
        assert (status["peers"], status["waiting"]) == ([], "finished: 3 rounds done")
        history = federation.rounds(A)
        assert [(entry["cause"], entry["verdicts"]) for entry in history] == [("all", [])] * rounds
        federation.kill(A)
        federation.wait_for_exit(A)
        federation.start(A)
        federation.wait_until(finished(A), DEADLINE_S)
        assert federation.rounds(A) == history
    assert [entry["model"] for entry in history] == models_alone(homes, rule, rounds, tmp_path)
    check_histories([alone], records)


def models_alone(homes: list[SiteHome], rule: RuleTerms, rounds: int, folder: Path) -> list[str]:
    """The digests of the first site's models, round by round, as a simulation has them."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as everywhere else: more would add up in another order
    try:
        (folder / "simulated").mkdir()
        spec = Spec([home.name for home in homes], rounds, SEED, rule)
        seat = take_seats(spec, folder / "simulated")[homes[0].name]
        found = []
        for number in range(rounds):
            # Alone, what was trained is the round's model.
            found.append(seat.train(homes[0].name, Round(number), measure=False).digest)
            seat.close_alone(Round(number))
        return list(found)
    finally:
        torch.set_num_threads(threads)


OWN_RULE = """
from lightyear_node.learning.rules import Judgement
from lightyear_node.records import Reason, Verdict

def halves(own, peers, probe, turn, share: float = 0.25, fails_in: int | None = None):
    if turn.round == fails_in:
        raise RuntimeError("I do not like this round")
    judged = turn.state.get("judged", 0) + 1
    verdicts = [Verdict(p.peer, True, Reason.OK, weight=share, checks={"n": judged}) for p in peers]
    return Judgement(tuple(verdicts), {"judged": judged})
"""


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip leaves behind, in a folder on the path of the nodes that we start."""
    folder = tmp_path / "installed"
    metadata = folder / "our_rules-0.1.dist-info"
    metadata.mkdir(parents=True)
    (folder / "our_rules.py").write_text(OWN_RULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our-rules\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(
        "[lightyear_node.rules]\nhalves = our_rules:halves\n"
    )
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("own_rule")
@pytest.mark.slow
def test_a_users_own_rule_decides_and_remembers_also_when_it_fails(
    lay_out_sites: LayOut, records: Records
) -> None:
    rule = RuleTerms(name="halves", options={"share": 0.5, "fails_in": 1})
    homes = lay_out_sites(2, rounds=3, rule=rule, barrier=PATIENT)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
    for home in homes:
        found = [
            (verdict["accepted"], verdict["weight"], decision["rule_state"]["judged"])
            for decision in decisions(records(home))
            for verdict in decision["verdicts"]
        ]
        # Without a verdict nobody is merged, and the rule goes on from where it was.
        assert found == [(True, 0.5, 1), (False, 0.0, 1), (True, 0.5, 2)]
        log = home.log.read_text()
        assert "no peer could be judged: rule halves raised RuntimeError: I do not like" in log
    check_histories(homes, records)
