"""Stateful rules, local training and user-defined rules, in real nodes that are killed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import make_sites
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName, Round
from tests.support.installed_package import install_package
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    SEED,
    A,
    B,
    C,
    LayOut,
    Records,
    all_finished,
    check_histories,
    durable_values,
    finished,
    phase_of,
    wait_for_phase,
)

D = PeerName("site-d")
PRIOR = 3
"""AFA's initial α and β."""


def decisions(history: list[Record]) -> list[Mapping[str, Any]]:
    return [record.body for record in history if record.kind == "decision"]


def check_reputation(history: list[Record]) -> None:
    """Check that each decision's counts are the previous ones plus its own verdicts."""
    before: Mapping[str, Any] = {"alpha": {}, "beta": {}}
    for decision in decisions(history):
        state = decision["rule_state"]
        for verdict in decision["verdicts"]:
            peer, reason = verdict["peer"], verdict["reason"]
            for count, counted in (("alpha", "ok"), ("beta", "outlier")):
                expected = before[count].get(peer, PRIOR) + (reason == counted)
                assert state[count].get(peer, PRIOR) == expected, (decision["round"], peer, reason)
        before = state


def is_accepted(peer: PeerName, decision: Mapping[str, Any]) -> bool:
    return any(one["accepted"] for one in decision["verdicts"] if one["peer"] == peer)


def test_a_reputation_survives_sigkill_and_ends_in_blocking(
    lay_out_sites: LayOut, records: Records
) -> None:
    rounds = 9
    homes = lay_out_sites(
        4,
        rounds=rounds,
        malfunctions={D: MalfunctionConfig(kind="sfa")},
        barrier=PATIENT,
        rule=RuleConfig(name="afa"),
    )
    with Federation(homes) as federation:
        for at_round in (2, 5):
            federation.wait_until(
                lambda s, r=at_round: s[C] is not None and s[C]["round"] >= r, DEADLINE_S
            )
            federation.kill(C)
            federation.wait_for_exit(C)
            remembered = durable_values(homes[2])["rule_state"]
            assert remembered == decisions(records(homes[2]))[-1]["rule_state"]
            assert remembered["beta"][D] > PRIOR
            federation.start(C)
        federation.wait_until(all_finished, DEADLINE_S)
    for home in homes[:3]:
        history = records(home)
        assert len(decisions(history)) == rounds
        check_reputation(history)
    # The killed site may be late, and have to judge fewer models: AFA finds no outlier among two.
    for home in homes[:2]:
        history = records(home)
        complete = [d for d in decisions(history) if len(d["verdicts"]) == len(homes) - 1]
        assert complete
        assert not any(is_accepted(D, decision) for decision in complete)
        about_d = [v for d in decisions(history) for v in d["verdicts"] if v["peer"] == D]
        assert "blocked" in [verdict["reason"] for verdict in about_d[-3:]]
        assert durable_values(home)["rule_state"]["blocked"] == [D]
    check_histories(homes, records)


def test_a_killed_site_continues_with_its_personal_model(lay_out_sites: LayOut) -> None:
    """The new worker closes a round that it has not trained: the files hold all it needs."""
    homes = lay_out_sites(2, rounds=2, rule=RuleConfig(name="ditto"))
    federation = Federation(homes)
    with ExitStack() as stack:
        stack.callback(federation.stop)
        federation.start(A)
        federation.start(B)
        federation.wait_until(
            lambda s: phase_of(s, A) not in (None, "starting", "observing"), DEADLINE_S
        )
        # While the others are suspended, the round stays open.
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
        # The shared model is merged; the personal one is measured.
        assert entry["merged"] == entry["local"]
    assert rounds[0]["local"] != rounds[1]["local"]


@contextmanager
def listen_silently(*homes: SiteHome) -> Iterator[list[socket.socket]]:
    """Listen at these sites' addresses and never answer."""
    with ExitStack() as stack:
        sockets = []
        for home in homes:
            host, _, port = home.address.rpartition(":")
            sockets.append(stack.enter_context(socket.create_server((host, int(port)))))
            sockets[-1].setblocking(False)
        yield sockets


def listening(pid: int) -> set[str]:
    """Return the listening addresses of a daemon and its worker; check for other connections."""
    ours = {pid, *(child.pid for child in psutil.Process(pid).children())}
    found = [c for c in psutil.net_connections("inet") if c.pid in ours]
    assert all(c.status in (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT) for c in found)
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in found if c.status == psutil.CONN_LISTEN}


def test_a_site_that_trains_locally_makes_no_connections(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    rounds, rule = 3, RuleConfig(name="local")
    homes = lay_out_sites(rounds=rounds, rule=rule)
    alone = homes[0]
    with listen_silently(*homes[1:]) as sockets, Federation([alone]) as federation:
        statuses = federation.wait_until(finished(A), DEADLINE_S)
        for sock in sockets:
            with pytest.raises(BlockingIOError):
                sock.accept()
        # Metrics are served; the port for peers is not open.
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


def models_alone(homes: list[SiteHome], rule: RuleConfig, rounds: int, folder: Path) -> list[str]:
    """Return the digests of the first site's models by round, from a simulation."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would sum in another order
    try:
        (folder / "simulated").mkdir()
        spec = SimulationSpec([home.name for home in homes], rounds, SEED, rule)
        site = make_sites(spec, folder / "simulated")[homes[0].name]
        found = []
        for number in range(rounds):
            # Without peers, the trained model is the round's model.
            found.append(site.train(homes[0].name, Round(number), measure=False).digest)
            site.close_alone(Round(number))
        return list(found)
    finally:
        torch.set_num_threads(threads)


OWN_RULE = """
from lightyear_node.learning.rules import Judgement
from lightyear_node.types import Reason, Verdict

def halves(own, peers, validation, context, share: float = 0.25, fails_in: int | None = None):
    if context.round == fails_in:
        raise RuntimeError("I do not like this round")
    judged = context.state.get("judged", 0) + 1
    verdicts = [Verdict(p.peer, True, Reason.OK, weight=share, checks={"n": judged}) for p in peers]
    return Judgement(tuple(verdicts), {"judged": judged})
"""


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package into a folder on the path of the started nodes."""
    folder = tmp_path / "installed"
    install_package(folder, "our_rules", OWN_RULE, {"halves": "our_rules:halves"})
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@pytest.mark.usefixtures("own_rule")
def test_a_user_defined_rule_decides_and_keeps_its_state_when_it_fails(
    lay_out_sites: LayOut, records: Records
) -> None:
    rule = RuleConfig(name="halves", options={"share": 0.5, "fails_in": 1})
    homes = lay_out_sites(2, rounds=3, rule=rule, barrier=PATIENT)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
    for home in homes:
        found = [
            (verdict["accepted"], verdict["weight"], decision["rule_state"]["judged"])
            for decision in decisions(records(home))
            for verdict in decision["verdicts"]
        ]
        # Without verdicts no peer is merged, and the rule keeps its previous state.
        assert found == [(True, 0.5, 1), (False, 0.0, 1), (True, 0.5, 2)]
        log = home.log.read_text()
        assert "no peer could be judged: rule halves raised RuntimeError (our_rules.py:" in log
        assert "I do not like" not in log
    check_histories(homes, records)
