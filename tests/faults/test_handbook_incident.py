"""docs/operators with incidents: a NAT, firewalls, a hospital with wrong labels and no port.

Three hospitals create a federation within their networks' limits, monitor it from another machine,
find out why `hospital-c` is rejected, and repair it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lightyear_node.observe.admin_socket import ask
from lightyear_node.types import PeerName
from tests.support.bad_network_setup import history
from tests.support.handbook import Hospitals
from tests.support.needs import need
from tests.support.network_hosts import why_not
from tests.support.recorded_merges import (
    last_record,
    merged,
    wait_for_rounds,
    wait_until_all_merge_all,
    wait_until_merged,
)
from tests.support.site_lives import round_of, status_of, wait_for

A, B, C = HOSPITALS = ["hospital-a", "hospital-b", "hospital-c"]
MONITORING = "monitoring"
"""Another machine of hospital-b."""
PORT, HTTP_PORT = 7443, 9464
KNOCK = f"import socket; socket.create_connection(('fl.{{}}.example', {PORT}), 3)"
REMOTE = f"https://fl.{B}.example:{HTTP_PORT}"
QUALITY = ("lightyear_peer_agreement{", "lightyear_local_loss{", "lightyear_local_metric{")

TASK = "ward_task"
WRONG_LABELS = """
from lightyear_node.lab.tasks import digits


def build(site_index=0, site_count=1, seed=0):
    task = digits.build(site_index, site_count, seed)
    for loader in (task.train_data, task.val_data, task.test_data):
        images, labels = loader.dataset.tensors
        loader.dataset.tensors = (images, (labels + 1) % 10)
    return task
"""
RIGHT_LABELS = "from lightyear_node.lab.tasks.digits import build"


def test_the_handbook_on_incidents_works_as_written(tmp_path: Path) -> None:
    need(why_not("bash", "curl", "openssl", "ss"))
    with Hospitals(tmp_path, [*HOSPITALS, MONITORING]) as hospitals:
        hospitals.members = HOSPITALS
        try_the_network(hospitals)
        create_a_federation(hospitals)
        find_the_rejected_hospital(hospitals)
        inspect_and_pause(hospitals)
        watch(hospitals)
        repair(hospitals)
        block_and_unblock(hospitals)
        query_the_audit_log(hospitals)
        for name in HOSPITALS:
            assert hospitals.dropped_outgoing(PeerName(name)) == 0, (
                "it made other outgoing connections"
            )
            assert "Traceback" not in hospitals.log(name)
        assert not hospitals.remaining_steps()


def try_the_network(hospitals: Hospitals) -> None:
    page = "network.md"
    a, b, c = (PeerName(name) for name in HOSPITALS)
    monitoring = PeerName(MONITORING)
    hospitals.put_behind_nat(a, PORT)
    hospitals.allow_only(a, {PORT: [b, c]}, {PORT: [b]})
    hospitals.allow_only(b, {PORT: [a, c], HTTP_PORT: [monitoring]}, {PORT: [a]})
    hospitals.allow_only(c, {}, {PORT: [a, b]})
    hospitals.follow(page, "without a port")
    hospitals.follow(page, "listen")
    wait_for(lambda: f":{PORT}" in hospitals.run(a, "ss", "-Hltn"))
    assert "timed out" in hospitals.type(MONITORING, f'python3 -c "{KNOCK.format(A)}"', code=1)
    assert "the way is free" in hospitals.follow(page, "knock")[B]
    assert hospitals.wait_for_end(A) == 0
    assert f"reached from {hospitals.ip(b)}\n" in hospitals.log(A)
    assert "refused" in hospitals.type(C, f'python3 -c "{KNOCK.format(B)}"', code=1)


def create_a_federation(hospitals: Hospitals) -> None:
    """Use one hospital behind a NAT, one with a port, one without."""
    page = "first-federation.md"
    where = f"--address fl.{B}.example:{PORT} --listen 0.0.0.0:{PORT}"
    hospitals.type(B, f"lightyear-node init . --name {B} {where}")
    for name in HOSPITALS:
        hospitals.type(name, f"lightyear-node id > {name}.join")
    (hospitals.home[C].directory / f"{TASK}.py").write_text(WRONG_LABELS)
    hospitals.write_settings(C, f"task: {{entry: '{TASK}:build'}}")
    hospitals.follow(page, "start", without=["keys", "list", "check"])
    wait_until_running(hospitals, *HOSPITALS)
    wait_for_rounds(hospitals, 3)
    hospitals.follow(page, "look")
    output = hospitals.follow("network.md", "ping")
    for name, asked in ((A, [B]), (B, [A]), (C, [A, B])):
        assert all(f"✓ {other} " in output[name] for other in asked), output[name]
        assert "✗" not in output[name]


def find_the_rejected_hospital(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    for output in hospitals.follow(page, "look").values():
        assert "✗ rejected" in output
        shown = output[output.index(f"\n{C}\n") :].split()
        hospitals.examples["--round 12"] = f"--round {shown[shown.index('--round') + 1]}"
    for output in hospitals.follow(page, "explain").values():
        assert "✗ rejected" in output
        assert "what to do" in output
        assert "at most" in output
    for name in (A, B):
        assert not merged(hospitals, name, C), "rejected updates are not merged"
        assert merged(hospitals, name, B if name == A else A)


def inspect_and_pause(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    assert "its verdict on ours" not in hospitals.type(C, "lightyear-node status")
    hospitals.follow(page, "share")
    hospitals.restart(A)
    wait_for(lambda: "its verdict on ours" in hospitals.type(C, "lightyear-node status"))
    [output] = hospitals.follow(page, "look").values()
    assert "its verdict on ours" in output
    assert "✗" not in output[output.index("settings") :], "its own machine is healthy"
    opinions = {peer["name"]: peer["opinion"] for peer in status(hospitals, C)["peers"]}
    assert opinions[A] in {v["reason"] for v in verdicts(hospitals, A) if v["peer"] == C}
    assert not opinions[B], "it does not share its verdicts"
    assert not any(verdict["accepted"] for verdict in verdicts(hospitals, C)), (
        "both reject each other"
    )
    hospitals.follow(page, "pause")
    wait_for(lambda: status(hospitals, C)["phase"] == "paused")
    stopped_in = round_of(hospitals.home[C])
    since = {name: last_record(hospitals, name) for name in (A, B)}
    hospitals.members = [A, B]
    wait_until_all_merge_all(hospitals, since)
    wait_for_rounds(hospitals, 2)
    assert round_of(hospitals.home[C]) == stopped_in


def watch(hospitals: Hospitals) -> None:
    """Watch at hospital-b, and from another machine of that hospital."""
    page = "monitoring.md"
    [output] = hospitals.follow(page, "look").values()
    assert "ready" in output
    assert output.count('"ok": true') + output.count('"ok":true') == 2, output
    assert all(series in output for series in QUALITY)
    make_certificates(hospitals)
    hospitals.follow(page, "open")
    hospitals.end(B)
    hospitals.type(B, "lightyear-node health", code=3)
    hospitals.start(B)
    wait_until_running(hospitals, B)
    [output] = hospitals.follow(page, "scrape").values()
    assert all(series in output for series in QUALITY)
    curl = "curl -sS -o /dev/null -w '%{http_code}' --cacert hospital-ca.pem"
    assert hospitals.type(MONITORING, f"{curl} {REMOTE}/metrics") == "401"
    assert hospitals.type(MONITORING, f"{curl} -u me:$(cat http.token) {REMOTE}/") == "200"
    assert hospitals.type(MONITORING, f"{curl} {REMOTE}/readyz") == "200"
    hospitals.type(B, "lightyear-node health")
    hospitals.follow(page, "log")
    hospitals.restart(B)
    wait_until_running(hospitals, B)
    scrape = f"curl -sS --cacert hospital-ca.pem --oauth2-bearer $(cat http.token) {REMOTE}/metrics"
    output = hospitals.type(MONITORING, scrape)
    assert f'lightyear_peer_verdicts_total{{peer="{A}"' in output
    assert not any(series in output for series in QUALITY)
    json.loads(hospitals.log(B).splitlines()[-1])


def repair(hospitals: Hospitals) -> None:
    """It stays paused over the restart; then it works again, and the others merge it."""
    page = "incident-rejected.md"
    (hospitals.home[C].directory / f"{TASK}.py").write_text(RIGHT_LABELS)
    hospitals.restart(C)
    wait_until_running(hospitals, C)
    wait_for(lambda: status(hospitals, C)["phase"] == "paused")
    hospitals.follow(page, "resume")
    hospitals.members = HOSPITALS
    wait_until_all_merge_all(hospitals)


def block_and_unblock(hospitals: Hospitals) -> None:
    """Blocking is local to one hospital and survives a restart."""
    page = "incident-rejected.md"
    hospitals.follow(page, "block")
    wait_for_rounds(hospitals, 2)
    hospitals.restart(A)
    wait_until_running(hospitals, A)
    since = {name: last_record(hospitals, name) for name in HOSPITALS}
    wait_until_merged(hospitals, [(A, B), (B, A), (B, C), (C, B)], since)
    wait_for_rounds(hospitals, 2)
    assert "blocked" in hospitals.type(A, "lightyear-node status")
    assert not merged(hospitals, A, C, since[A])
    assert not merged(hospitals, C, A, since[C]), "it gets no data"
    hospitals.follow(page, "unblock")
    wait_until_all_merge_all(hospitals, {n: last_record(hospitals, n) for n in HOSPITALS})
    [output] = hospitals.follow(page, "unquarantine").values()
    assert "not in quarantine" in output


def query_the_audit_log(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    [output] = hospitals.follow(page, "compare").values()
    assert f"{A} and {C} agree" in output, output
    exported = (hospitals.home[A].directory / f"{A}.jsonl").read_text().splitlines()
    commands = [record["body"] for record in map(json.loads, exported)]
    given = [body["command"] for body in commands if "command" in body and body["user"]]
    assert given == ["block", "unblock"]
    assert any(record.kind == "told" for record in history(hospitals.home[C]))


def make_certificates(hospitals: Hospitals) -> None:
    """Create certificates of hospital-b's internal authority."""
    ec = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    hospitals.type(
        B,
        f"""
        umask 077
        openssl req -x509 {ec} -keyout ca.key -out hospital-ca.pem -days 2 -subj '/CN=authority'
        openssl req {ec} -keyout http.key -out http.csr -subj '/CN=fl.{B}.example'
        echo subjectAltName=DNS:fl.{B}.example > http.ext
        openssl x509 -req -in http.csr -CA hospital-ca.pem -CAkey ca.key -CAcreateserial \
            -out http.crt -days 2 -extfile http.ext
        """,
    )
    authority = hospitals.home[B].directory / "hospital-ca.pem"
    shutil.copy(authority, hospitals.home[MONITORING].directory)


def status(hospitals: Hospitals, name: str) -> dict[str, Any]:
    status = status_of(hospitals.home[name])
    assert status is not None
    return status


def verdicts(hospitals: Hospitals, name: str) -> list[dict[str, Any]]:
    rounds = ask(hospitals.home[name].state_dir, "rounds")
    return [verdict for entry in rounds for verdict in entry["verdicts"]]


def wait_until_running(hospitals: Hospitals, *names: str) -> None:
    """Wait until they answer and take part."""

    def here(name: str) -> bool:
        status = status_of(hospitals.home[name])
        return status is not None and status["phase"] not in ("starting", "observing")

    def done() -> bool:
        hospitals.check()
        return all(here(name) for name in names)

    wait_for(done)
