"""Three real nodes train together; a killed one resumes exactly where it was."""

from __future__ import annotations

import os
import signal
import urllib.request

import psutil

from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.lab.malfunctions import MalfunctionConfig
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    Records,
    all_finished,
    check_histories,
    durable_state,
    durable_values,
    finished,
    metrics_of,
    run_in_lockstep,
    wait_for_phase,
)


def test_a_sign_flipping_site_is_finally_rejected_by_all_others(
    lay_out_sites: LayOut, records: Records
) -> None:
    rounds = 4
    homes = lay_out_sites(
        rounds=1, malfunctions={C: MalfunctionConfig(kind="sfa")}, barrier=PATIENT
    )
    with Federation(homes) as federation:
        statuses = run_in_lockstep(federation, rounds)
        for home in homes[:2]:
            verdicts = [v for entry in federation.rounds(home.name) for v in entry["verdicts"]]
            about_c = [v for v in verdicts if v["peer"] == C]
            assert len(about_c) == rounds
            assert not any(v["accepted"] for v in about_c)
            status = statuses[home.name]
            assert status is not None
            [shown] = [peer for peer in status["peers"] if peer["name"] == C]
            assert (shown["verdict"], shown["rejected_in_a_row"]) == ("rejected", rounds)
            assert shown["reason"] == "too_far"

            metrics = metrics_of(home)
            series = (
                'lightyear_peer_verdicts_total{peer="site-c",reason="too_far",verdict="rejected"}'
            )
            assert metrics[series] == rounds
            assert metrics["lightyear_round"] == rounds
            # At the start, for the generation; for every round a seal, a decision, a commit, and at
            # least one for what the others have announced.
            assert metrics["lightyear_audit_records_total"] >= 2 + 4 * rounds
            assert metrics['lightyear_round_phase{phase="finished"}'] == 1
            received = 'lightyear_transfer_bytes_total{direction="received",peer="site-c"}'
            assert metrics[received] > 0
            with urllib.request.urlopen(f"http://{home.http_address}/readyz") as answer:
                assert answer.status == 200
        # The honest two accept each other's models after some training.
        accepted = [
            v["accepted"]
            for entry in federation.rounds(A)
            for v in entry["verdicts"]
            if v["peer"] == B
        ]
        assert accepted[-1]
        assert statuses[A] is not None
        assert statuses[A]["metrics"]["merged"]["accuracy"] > 0.5
    check_histories(homes, records)


def test_sigkill_while_waiting_for_peers_resumes_with_the_identical_update(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(rounds=4)
    by_name = {home.name: home for home in homes}
    with Federation(homes) as federation:
        federation.wait_until(
            lambda s: all(x is not None and x["round"] >= 1 for x in s.values()), DEADLINE_S
        )
        # With the others frozen, site-c trains and then waits with its update announced.
        for name in (A, B):
            os.kill(federation.pid(name), signal.SIGSTOP)
        try:
            wait_for_phase(federation, by_name[C], "collecting")
            before, manifest = durable_state(by_name[C])
            file = by_name[C].state_dir / "updates" / manifest["manifest"]["update"]["digest"]
            content = file.read_bytes()
            federation.kill(C, signal.SIGKILL)
            federation.wait_for_exit(C)
            federation.start(C)
            wait_for_phase(federation, by_name[C], "collecting")
            after, same = durable_state(by_name[C])
            assert (after.round, after.announced, same) == (
                before.round,
                before.announced,
                manifest,
            )
            assert file.read_bytes() == content
        finally:
            for name in (A, B):
                os.kill(federation.pid(name), signal.SIGCONT)
        federation.wait_until(all_finished, DEADLINE_S)
    check_histories(homes, records)


def test_sigkill_at_random_moments_never_causes_equivocation(
    lay_out_sites: LayOut, records: Records
) -> None:
    """A site that is killed repeatedly, in any phase, still finishes."""
    homes = lay_out_sites(rounds=6)
    with Federation(homes) as federation:
        for at_round in (0, 2, 3):
            federation.wait_until(
                lambda s, r=at_round: s[C] is not None and s[C]["round"] >= r, DEADLINE_S
            )
            federation.kill(C, signal.SIGKILL)
            federation.wait_for_exit(C)
            federation.start(C)
        federation.wait_until(all_finished, DEADLINE_S)
    check_histories(homes, records)


def test_the_others_continue_without_a_dead_site(lay_out_sites: LayOut, records: Records) -> None:
    homes = lay_out_sites(rounds=4)
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        federation.kill(C, signal.SIGKILL)
        federation.wait_until(finished(A, B), DEADLINE_S)
        last = federation.rounds(A)[-1]
        [about_c] = [v for v in last["verdicts"] if v["peer"] == C]
        assert not about_c["accepted"]
        assert about_c["digest"] is None
    check_histories(homes[:2] + homes[2:], records)


def test_sigterm_stops_a_node_and_its_worker_cleanly(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(rounds=50)
    with Federation(homes) as federation:
        statuses = federation.wait_until(
            lambda s: s[A] is not None and s[A]["phase"] == "training", DEADLINE_S
        )
        assert statuses[A] is not None
        worker = psutil.Process(statuses[A]["worker_pid"])
        federation.kill(A, signal.SIGTERM)
        assert federation.wait_for_exit(A, 30) == 0
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert "Traceback" not in homes[0].log.read_text()


def test_a_killed_worker_is_replaced_and_the_round_continues(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(2, rounds=3)
    with Federation(homes) as federation:
        statuses = federation.wait_until(
            lambda s: s[A] is not None and s[A]["worker_pid"] is not None, DEADLINE_S
        )
        assert statuses[A] is not None
        os.kill(statuses[A]["worker_pid"], signal.SIGKILL)
        federation.wait_until(all_finished, DEADLINE_S)
        assert metrics_of(homes[0])['lightyear_worker_restarts_total{reason="died"}'] >= 1
    check_histories(homes, records)


def test_a_killed_daemon_leaves_no_worker_behind(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(2, rounds=50)
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
        children = psutil.Process(federation.pid(A)).children(recursive=True)
        assert children
        federation.kill(A, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_a_damaged_model_is_detected_before_use(lay_out_sites: LayOut, records: Records) -> None:
    homes = lay_out_sites(2, rounds=3)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        federation.kill(A, signal.SIGTERM)
        assert federation.wait_for_exit(A, 30) == 0
        newest, before, *older = durable_values(homes[0])["models"]

        # The previous model is intact, and the node logs that it continues from there.
        damage(homes[0], newest)
        federation.start(A)
        federation.wait_until(all_finished, DEADLINE_S)
        federation.kill(A, signal.SIGTERM)
        assert federation.wait_for_exit(A, 30) == 0
        assert f"our model {newest} is damaged" in homes[0].log.read_text()
        [fallback] = [record for record in records(homes[0]) if record.kind == "fallback"]
        assert fallback.body == {"model": before, "damaged": [newest]}

        for model in (before, *older):
            damage(homes[0], model)
        federation.start(A)
        federation.kill(A, signal.SIGCONT)  # it is expected to exit by itself
        assert federation.wait_for_exit(A, DEADLINE_S) == 4
        assert f"{before}.safetensors is missing or damaged" in homes[0].log.read_text()


def damage(home: SiteHome, model: str) -> None:
    """Flip one bit of the file."""
    file = home.state_dir / "models" / f"{model}.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
