"""The command line as a user meets it: real processes, exit codes, one line per mistake."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node.lab.federation import package_environment

ENVIRONMENT = {**package_environment(), "COLUMNS": "100", "NO_COLOR": "1"}


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightyear_node", *arguments],
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def failure(code: int, *arguments: str, cwd: Path, **environment: str) -> str:
    """Run a command that must fail politely; returns its one line (and hint)."""
    ended = run(*arguments, cwd=cwd, **environment)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert lines[-2 if lines[-1].startswith("  what to do:") else -1].startswith("lightyear-node: ")
    return ended.stderr


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two initialised sites and their common peers.yaml, made as the README says."""
    folder = tmp_path_factory.mktemp("sites")
    joins = []
    for number, name in enumerate(["site-a", "site-b"]):
        address = f"127.0.0.1:{_free_port()}"
        made = run("init", name, "--name", name, "--address", address, cwd=folder)
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith(f"{name} SHA256:")
        joined = run("id", cwd=folder / name)
        assert joined.returncode == 0, joined.stderr
        assert len(joined.stdout.splitlines()) == 1, number
        joins.append(joined.stdout.strip())
    added = run("peers", "add", "--federation", "ward", *joins, cwd=folder)
    assert added.returncode == 0, added.stderr
    return folder


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_keys_are_private_and_never_overwritten(homes: Path) -> None:
    for key in ("tls.key", "sign.key"):
        assert (homes / "site-a/keys" / key).stat().st_mode & 0o777 == 0o600
    before = (homes / "site-a/keys/tls.key").read_bytes()
    again = ("init", "site-a", "--name", "site-a", "--address", "h:1")
    assert "exists already" in failure(78, *again, cwd=homes)
    assert (homes / "site-a/keys/tls.key").read_bytes() == before


@pytest.mark.parametrize(
    ("reached", "http"),
    [
        (("--address", "h:7443"), 9464),
        (("--address", "h:443", "--listen", "0.0.0.0:7443"), 9464),
        (("--address", "h:443"), 2464),
        (("--address", "none"), 9464),
    ],
)
def test_metrics_are_beside_the_port_that_the_machine_itself_has(
    reached: tuple[str, ...], http: int, tmp_path: Path
) -> None:
    run("init", "x", "--name", "x", *reached, cwd=tmp_path)
    settings = yaml.safe_load((tmp_path / "x" / "node.yaml").read_text())
    assert settings["http"]["listen"] == f"127.0.0.1:{http}"


def test_peers_list_in_both_formats(homes: Path) -> None:
    listed = run("peers", "list", "--format", "json", cwd=homes)
    document = json.loads(listed.stdout)
    assert (document["schema_version"], document["status"]) == ("1", "ok")
    assert [peer["name"] for peer in document["data"]["peers"]] == ["site-a", "site-b"]
    table = run("peers", "list", cwd=homes)
    names = [line.split()[0] for line in table.stdout.splitlines()]
    assert names == ["peer", "site-a", "site-b"]
    assert "no node runs here" in table.stderr


def test_a_new_certificate_of_a_site_is_pinned_beside_the_old_one(
    homes: Path, tmp_path: Path
) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_bytes((homes / "peers.yaml").read_bytes())
    lines = []
    for number in range(2):
        folder = f"new-{number}"
        run("init", folder, "--name", "site-b", "--address", f"other:{90 + number}", cwd=tmp_path)
        lines.append(run("id", "--home", folder, cwd=tmp_path).stdout.strip())
    assert run("peers", "add", lines[0], cwd=tmp_path).returncode == 0
    site_b = listed_in(tmp_path)[1]
    assert site_b["address"] == "other:90"
    old, new = site_b["fingerprint"]
    assert old in (homes / "peers.yaml").read_text()

    words = failure(78, "peers", "add", lines[1], cwd=tmp_path)
    assert "two certificates already" in words
    assert f"peers remove site-b --fingerprint {old}" in words
    assert listed_in(tmp_path)[1] == site_b
    # The line of one that is there changes nothing but the address.
    assert run("peers", "add", lines[0].replace(":90", ":95"), cwd=tmp_path).returncode == 0
    assert listed_in(tmp_path)[1] == {**site_b, "address": "other:95"}

    assert run("peers", "remove", "site-b", "--fingerprint", old, cwd=tmp_path).returncode == 0
    assert listed_in(tmp_path)[1]["fingerprint"] == [new]
    words = failure(78, "peers", "remove", "site-b", "--fingerprint", new, cwd=tmp_path)
    assert "the only certificate" in words
    assert "`lightyear-node peers remove site-b`" in words
    words = failure(78, "peers", "remove", "site-b", "--fingerprint", old, cwd=tmp_path)
    assert f"it has {new}" in words
    # What is left is a pair that belongs together.
    home = tmp_path / "new-0"
    assert "cannot run a federation" in failure(
        78, "start", "--peers", str(_without(tmp_path, "site-a")), "--home", str(home), cwd=tmp_path
    )


def _without(folder: Path, name: str) -> Path:
    assert run("peers", "remove", name, cwd=folder).returncode == 0
    return folder / "peers.yaml"


def listed_in(folder: Path) -> list[dict[str, Any]]:
    listed = json.loads(run("peers", "list", "--format", "json", cwd=folder).stdout)["data"]
    assert listed["federation"] == "ward"
    return list(listed["peers"])


def test_a_site_is_removed_by_its_name(homes: Path, tmp_path: Path) -> None:
    (tmp_path / "peers.yaml").write_bytes((homes / "peers.yaml").read_bytes())
    assert "it has site-a, site-b" in failure(78, "peers", "remove", "site-x", cwd=tmp_path)
    assert run("peers", "remove", "site-a", cwd=tmp_path).returncode == 0
    assert [peer["name"] for peer in listed_in(tmp_path)] == ["site-b"]


def test_renewing_in_the_order_that_the_commands_say(homes: Path, tmp_path: Path) -> None:
    home = tmp_path / "site-a"
    shutil.copytree(homes / "site-a", home)
    shutil.copy(homes / "peers.yaml", tmp_path)
    in_file = ("--home", "site-a")
    assert "run `lightyear-node renew` first" in failure(
        78, "renew", "--activate", *in_file, cwd=tmp_path
    )

    def in_use() -> dict[str, str]:
        shown = run("id", *in_file, "--format", "json", cwd=tmp_path).stdout
        return dict(json.loads(shown)["data"])

    before = in_use()

    first, again = (run("renew", *in_file, cwd=tmp_path) for _ in range(2))
    assert first.returncode == again.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stderr.startswith("Prepared")
    assert again.stderr.startswith("Already prepared")
    # Until it is activated, nothing else is in use than before.
    assert (
        json.loads(run("id", *in_file, "--format", "json", cwd=tmp_path).stdout)["data"] == before
    )

    words = failure(78, "renew", "--activate", *in_file, cwd=tmp_path)
    assert "does not list the new certificate" in words
    assert "peers add" in words
    assert run("peers", "add", first.stdout.strip(), cwd=tmp_path).returncode == 0
    done = run("renew", "--activate", *in_file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"peers remove site-a --fingerprint {before['fingerprint']}" in done.stderr
    after = in_use()
    assert after["join"] == first.stdout.strip()
    assert listed_in(tmp_path)[0]["fingerprint"] == [before["fingerprint"], after["fingerprint"]]


def test_a_damaged_join_line_is_refused(homes: Path) -> None:
    line = run("id", "--home", "site-a", cwd=homes).stdout.strip()
    for damaged in (line[:-9], line.replace("site-a", "site-x"), "hello", line[4:]):
        assert "join line" in failure(78, "peers", "add", damaged, cwd=homes)
    assert (homes / "peers.yaml").read_text().count("name: site-") == 2


def test_bad_names_and_addresses_are_refused(tmp_path: Path) -> None:
    words = failure(78, "init", "x", "--name", "Site A", "--address", "h:1", cwd=tmp_path)
    assert "cannot be a site's name" in words
    words = failure(78, "init", "x", "--name", "a", "--address", "no-port", cwd=tmp_path)
    assert "is not an address" in words
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (
            "version: 1\nfederation: ward\nrouns: 3\npeers: []\n",
            "peers.yaml:3: unknown key `rouns`",
        ),
        ("version: 1\nfederation: &a ward\npeers: *a\n", "peers.yaml:3: aliases"),
        ("#" * (2 << 20), "larger than 1 MiB"),
        (None, "no such file"),
    ],
)
def test_start_names_what_is_wrong_with_peers_yaml(
    homes: Path, tmp_path: Path, peers: str | None, expected: str
) -> None:
    if peers is not None:
        (tmp_path / "peers.yaml").write_text(peers)
    path = str(tmp_path / "peers.yaml")
    assert expected in failure(78, "start", "--peers", path, cwd=homes / "site-a")


def test_start_refuses_a_file_that_does_not_know_us(homes: Path, tmp_path: Path) -> None:
    run("init", "z", "--name", "site-z", "--address", "z:1", cwd=tmp_path)
    peers = str(homes / "peers.yaml")
    words = failure(78, "start", "--peers", peers, "--home", "z", cwd=tmp_path)
    assert "our own certificate" in words
    assert "peers add" in words


def test_start_refuses_a_fingerprint_that_is_not_the_certificates(
    homes: Path, tmp_path: Path
) -> None:
    text = (homes / "peers.yaml").read_text()
    pins = [line.split()[-1] for line in text.splitlines() if "fingerprint:" in line]
    (tmp_path / "peers.yaml").write_text(text.replace(pins[1], "SHA256:" + "A" * 43))
    words = failure(78, "start", "--peers", str(tmp_path / "peers.yaml"), cwd=homes / "site-a")
    assert "the fingerprint of site-b is not that of its certificate" in words


def test_start_says_why_min_peers_is_impossible(homes: Path, tmp_path: Path) -> None:
    text = (homes / "peers.yaml").read_text().replace("peers:", "barrier: {min_peers: 2}\npeers:")
    (tmp_path / "peers.yaml").write_text(text)
    words = failure(78, "start", "--peers", str(tmp_path / "peers.yaml"), cwd=homes / "site-a")
    assert "at least max(1, 2 × 0) = 1 and at most 2 - 1 - 0 = 1" in words


@pytest.mark.parametrize(
    ("rule", "expected", "advice"),
    [
        # Which rules and options there are, the worker knows.
        ("{name: krumm}", 'there is no rule "krumm"', 'did you mean "krum"?'),
        ("{name: krum, options: {fauly: 1}}", 'no option "fauly"', 'did you mean "faulty"?'),
        ("{name: krum, options: {tau: 0.5}}", 'rule krum has no option "tau"', ""),
        ("{name: krum, options: {faulty: much}}", "faulty is 'much', not an int or None", ""),
        ("{name: ditto, options: {lam: -1}}", "rule ditto: lam is -1, not 0 or above", ""),
        # The rest is wrong whatever they are.
        ("{name: krum, tau: 0.5}", "`tau` is a setting of lightyear", "correct that value"),
        ("{name: krum, fauly: 1}", "unknown key `fauly`", ""),
        ("{nam: krum}", "unknown key `nam`: did you mean `name`?", ""),
        ("{name: 3}", "`rule.name`: ", "correct that value"),
    ],
)
def test_start_names_what_is_wrong_with_the_rule(
    homes: Path, tmp_path: Path, rule: str, expected: str, advice: str
) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_text((homes / "peers.yaml").read_text() + f"rule: {rule}\n")
    arguments = ("start", "--peers", str(peers), "--state-dir", str(tmp_path / "state"))
    words = failure(78, *arguments, cwd=homes / "site-a")
    [line] = [line for line in words.splitlines() if line.startswith("lightyear-node: ")]
    assert expected in line
    assert advice in words.splitlines()[-1]


def test_start_refuses_our_own_strictness_under_a_rule_that_has_none(
    homes: Path, tmp_path: Path
) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_text((homes / "peers.yaml").read_text() + "rule: {name: krum}\n")
    words = failure(
        78, "start", "--peers", str(peers), cwd=homes / "site-a", LIGHTYEAR_RULE_TAU="0.8"
    )
    assert "`rule.tau` is a setting of lightyear, but the federation's rule is krum" in words


def test_start_refuses_a_key_that_others_can_read(homes: Path) -> None:
    key = homes / "site-a/keys/tls.key"
    key.chmod(0o644)
    try:
        words = failure(78, "start", "--peers", "../peers.yaml", cwd=homes / "site-a")
    finally:
        key.chmod(0o600)
    assert str(Path("keys/tls.key")) in words
    assert "chmod 600" in words


def test_status_and_health_without_a_node(homes: Path) -> None:
    assert "no node is running" in failure(3, "status", cwd=homes / "site-a")
    assert "no node is running" in failure(3, "health", cwd=homes / "site-a")


def test_usage_errors_and_help(tmp_path: Path) -> None:
    assert run("start", cwd=tmp_path).returncode == 2
    assert run("no-such-command", cwd=tmp_path).returncode == 2
    shown = run("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for command in (
        "demo",
        "init",
        "id",
        "peers",
        "renew",
        "start",
        "status",
        "health",
        "rounds",
        "audit",
    ):
        assert command in shown.stdout


def test_environment_settings_are_checked_too(homes: Path) -> None:
    words = failure(
        78, "start", "--peers", "../peers.yaml", cwd=homes / "site-a", LIGHTYEAR_DEVICE="abacus"
    )
    assert "`device" in words


def loaded(modules: str) -> list[str]:
    script = (
        f"import sys, json, {modules}\n"
        "heavy = {'torch', 'numpy', 'sklearn', 'matplotlib'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(ended.stdout)
    return found


def test_the_command_line_never_imports_torch() -> None:
    """`status` and `--help` start without anything heavy, the daemon itself without torch."""
    commands = "lightyear_node.cli.run, lightyear_node.cli.watch, lightyear_node.cli.check"
    commands += ", lightyear_node.cli.rounds, lightyear_node.cli.audit, lightyear_node.audit.export"
    assert loaded(f"{commands}, lightyear_node.lab.demo") == []
    # The codec's arithmetic; it takes a tenth of a second, and torch three.
    assert loaded("lightyear_node.node, lightyear_node.preflight") == ["numpy"]
    assert os.environ.get("LIGHTYEAR_HOME") is None
