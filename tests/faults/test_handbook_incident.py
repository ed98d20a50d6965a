"""docs/operators in trouble: a NAT, firewalls, a hospital without a port whose labels are wrong.

Three hospitals found a federation as their networks allow, watch it from another machine, find out
why `hospital-c` is rejected, and mend it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from handbook import Hospitals
from hosts import why_not
from lives import round_of, status_of, wait_for
from merges import (
    last_record,
    merged,
    wait_for_rounds,
    wait_until_all_merge_all,
    wait_until_merged,
)
from needs import need
from staging import history

from lightyear_node.observe.admin import ask
from lightyear_node.records import PeerName

A, B, C = HOSPITALS = ["hospital-a", "hospital-b", "hospital-c"]
MONITORING = "monitoring"
"""Another machine of hospital-b."""
PORT, HTTP_PORT = 7443, 9464
KNOCK = f"import socket; socket.create_connection(('fl.{{}}.example', {PORT}), 3)"
REMOTE = f"https://fl.{B}.example:{HTTP_PORT}"
QUALITY = ("lightyear_peer_agreement{", "lightyear_local_loss{", "lightyear_local_metric{")

TASK = "ward_task"
WRONG_LABELS = """
from lightyear_node.tasks import digits


def build(site_index=0, site_count=1, seed=0):
    task = digits.build(site_index, site_count, seed)
    for loader in (task.train_data, task.val_data, task.test_data):
        images, labels = loader.dataset.tensors
        loader.dataset.tensors = (images, (labels + 1) % 10)
    return task
"""
RIGHT_LABELS = "from lightyear_node.tasks.digits import build"


@pytest.mark.slow
def test_the_handbook_works_as_written_in_trouble(tmp_path: Path) -> None:
    need(why_not("curl", "openssl"))
    with Hospitals(tmp_path, [*HOSPITALS, MONITORING]) as hospitals:
        hospitals.members = HOSPITALS
        try_the_network(hospitals)
        found_a_federation(hospitals)
        find_out_who_is_rejected(hospitals)
        look_at_home_and_pause(hospitals)
        watch(hospitals)
        mend(hospitals)
        block_and_unblock(hospitals)
        ask_the_record(hospitals)
        for name in HOSPITALS:
            assert hospitals.stopped_on_the_way_out(PeerName(name)) == 0, "it called somebody else"
            assert "Traceback" not in hospitals.log(name)
        assert not hospitals.unread()


def try_the_network(hospitals: Hospitals) -> None:
    page = "network.md"
    a, b, c = (PeerName(name) for name in HOSPITALS)
    monitoring = PeerName(MONITORING)
    hospitals.put_behind_nat(a, PORT)
    hospitals.let_through(a, {PORT: [b, c]}, {PORT: [b]})
    hospitals.let_through(b, {PORT: [a, c], HTTP_PORT: [monitoring]}, {PORT: [a]})
    hospitals.let_through(c, {}, {PORT: [a, b]})
    hospitals.follow(page, "without a port")
    hospitals.follow(page, "listen")
    wait_for(lambda: f":{PORT}" in hospitals.run(a, "ss", "-Hltn"))
    assert "timed out" in hospitals.type(MONITORING, f'python3 -c "{KNOCK.format(A)}"', code=1)
    assert "the way is free" in hospitals.follow(page, "knock")[B]
    assert hospitals.wait_for_end(A) == 0
    assert f"reached from {hospitals.ip(b)}\n" in hospitals.log(A)
    assert "refused" in hospitals.type(C, f'python3 -c "{KNOCK.format(B)}"', code=1)


def found_a_federation(hospitals: Hospitals) -> None:
    """One hospital behind a NAT, one with a port, one without."""
    page = "first-federation.md"
    where = f"--address fl.{B}.example:{PORT} --listen 0.0.0.0:{PORT}"
    hospitals.type(B, f"lightyear-node init . --name {B} {where}")
    for name in HOSPITALS:
        hospitals.type(name, f"lightyear-node id > {name}.join")
    (hospitals.home[C].directory / f"{TASK}.py").write_text(WRONG_LABELS)
    hospitals.settle(C, f"task: {{entry: '{TASK}:build'}}")
    hospitals.follow(page, "start", without=["keys", "list", "check"])
    wait_until_here(hospitals, *HOSPITALS)
    wait_for_rounds(hospitals, 3)
    hospitals.follow(page, "look")
    said = hospitals.follow("network.md", "ping")
    for name, asked in ((A, [B]), (B, [A]), (C, [A, B])):
        assert all(f"✓ {other} " in said[name] for other in asked), said[name]
        assert "✗" not in said[name]


def find_out_who_is_rejected(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    for said in hospitals.follow(page, "look").values():
        assert "✗ rejected" in said
        shown = said[said.index(f"\n{C}\n") :].split()
        hospitals.examples["--round 12"] = f"--round {shown[shown.index('--round') + 1]}"
    for said in hospitals.follow(page, "explain").values():
        assert "✗ rejected" in said
        assert "what to do" in said
        assert "at most" in said
    for name in (A, B):
        assert not merged(hospitals, name, C), "what is rejected is not merged"
        assert merged(hospitals, name, B if name == A else A)


def look_at_home_and_pause(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    assert "of ours it says" not in hospitals.type(C, "lightyear-node status")
    hospitals.follow(page, "share")
    hospitals.restart(A)
    wait_for(lambda: "of ours it says" in hospitals.type(C, "lightyear-node status"))
    [said] = hospitals.follow(page, "look").values()
    assert "of ours it says" in said
    assert "✗" not in said[said.index("settings") :], "its own machine is well"
    opinions = {peer["name"]: peer["opinion"] for peer in status(hospitals, C)["peers"]}
    assert opinions[A] in {v["reason"] for v in verdicts(hospitals, A) if v["peer"] == C}
    assert not opinions[B], "it does not share its verdicts"
    assert not any(verdict["accepted"] for verdict in verdicts(hospitals, C)), "it is mutual"
    hospitals.follow(page, "pause")
    wait_for(lambda: status(hospitals, C)["phase"] == "paused")
    stopped_in = round_of(hospitals.home[C])
    since = {name: last_record(hospitals, name) for name in (A, B)}
    hospitals.members = [A, B]
    wait_until_all_merge_all(hospitals, since)
    wait_for_rounds(hospitals, 2)
    assert round_of(hospitals.home[C]) == stopped_in


def watch(hospitals: Hospitals) -> None:
    """At hospital-b, and from another machine of that hospital."""
    page = "monitoring.md"
    [said] = hospitals.follow(page, "look").values()
    assert "ready" in said
    assert said.count('"ok": true') + said.count('"ok":true') == 2, said
    assert all(series in said for series in QUALITY)
    make_certificates(hospitals)
    hospitals.follow(page, "open")
    hospitals.end(B)
    hospitals.type(B, "lightyear-node health", code=3)
    hospitals.start(B)
    wait_until_here(hospitals, B)
    [said] = hospitals.follow(page, "scrape").values()
    assert all(series in said for series in QUALITY)
    curl = "curl -sS -o /dev/null -w '%{http_code}' --cacert hospital-ca.pem"
    assert hospitals.type(MONITORING, f"{curl} {REMOTE}/metrics") == "401"
    assert hospitals.type(MONITORING, f"{curl} -u me:$(cat http.token) {REMOTE}/") == "200"
    assert hospitals.type(MONITORING, f"{curl} {REMOTE}/readyz") == "200"
    hospitals.type(B, "lightyear-node health")
    hospitals.follow(page, "log")
    hospitals.restart(B)
    wait_until_here(hospitals, B)
    scrape = f"curl -sS --cacert hospital-ca.pem --oauth2-bearer $(cat http.token) {REMOTE}/metrics"
    said = hospitals.type(MONITORING, scrape)
    assert f'lightyear_peer_verdicts_total{{peer="{A}"' in said
    assert not any(series in said for series in QUALITY)
    json.loads(hospitals.log(B).splitlines()[-1])


def mend(hospitals: Hospitals) -> None:
    """Paused it stays over the restart; then it fits again, and is merged by those who refused."""
    page = "incident-rejected.md"
    (hospitals.home[C].directory / f"{TASK}.py").write_text(RIGHT_LABELS)
    hospitals.restart(C)
    wait_until_here(hospitals, C)
    wait_for(lambda: status(hospitals, C)["phase"] == "paused")
    hospitals.follow(page, "resume")
    hospitals.members = HOSPITALS
    wait_until_all_merge_all(hospitals)


def block_and_unblock(hospitals: Hospitals) -> None:
    """One hospital's own decision, also after a restart."""
    page = "incident-rejected.md"
    hospitals.follow(page, "block")
    wait_for_rounds(hospitals, 2)
    hospitals.restart(A)
    wait_until_here(hospitals, A)
    since = {name: last_record(hospitals, name) for name in HOSPITALS}
    wait_until_merged(hospitals, [(A, B), (B, A), (B, C), (C, B)], since)
    wait_for_rounds(hospitals, 2)
    assert "blocked" in hospitals.type(A, "lightyear-node status")
    assert not merged(hospitals, A, C, since[A])
    assert not merged(hospitals, C, A, since[C]), "nothing is sent to it"
    hospitals.follow(page, "unblock")
    wait_until_all_merge_all(hospitals, {n: last_record(hospitals, n) for n in HOSPITALS})
    [said] = hospitals.follow(page, "unquarantine").values()
    assert "not in quarantine" in said


def ask_the_record(hospitals: Hospitals) -> None:
    page = "incident-rejected.md"
    [said] = hospitals.follow(page, "compare").values()
    assert f"{A} and {C} agree" in said, said
    exported = (hospitals.home[A].directory / f"{A}.jsonl").read_text().splitlines()
    commands = [record["body"] for record in map(json.loads, exported)]
    given = [body["command"] for body in commands if "command" in body and body["user"]]
    assert given == ["block", "unblock"]
    told = [record for record in history(hospitals.home[C]) if record.kind == "told"]
    assert told


def make_certificates(hospitals: Hospitals) -> None:
    """Of an authority that hospital-b has for its own machines."""
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
    told = status_of(hospitals.home[name])
    assert told is not None
    return told


def verdicts(hospitals: Hospitals, name: str) -> list[dict[str, Any]]:
    rounds = ask(hospitals.home[name].state_dir, "rounds")
    return [verdict for entry in rounds for verdict in entry["verdicts"]]


def wait_until_here(hospitals: Hospitals, *names: str) -> None:
    """They answer, and have begun to take part."""

    def here(name: str) -> bool:
        told = status_of(hospitals.home[name])
        return told is not None and told["phase"] not in ("starting", "observing")

    def done() -> bool:
        hospitals.check()
        return all(here(name) for name in names)

    wait_for(done)
