"""The command line as a user meets it: real processes, exit codes, one line per mistake."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_peers_list_in_both_formats(homes: Path) -> None:
    listed = run("peers", "list", "--format", "json", cwd=homes)
    document = json.loads(listed.stdout)
    assert (document["schema_version"], document["status"]) == ("1", "ok")
    assert [peer["name"] for peer in document["data"]["peers"]] == ["site-a", "site-b"]
    table = run("peers", "list", cwd=homes).stdout.splitlines()
    assert [line.split("\t")[0] for line in table] == ["site-a", "site-b"]


def test_adding_a_site_again_replaces_it(homes: Path, tmp_path: Path) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_bytes((homes / "peers.yaml").read_bytes())
    run("init", "new", "--name", "site-b", "--address", "other:99", cwd=tmp_path)
    line = run("id", "--home", "new", cwd=tmp_path).stdout.strip()
    assert run("peers", "add", line, cwd=tmp_path).returncode == 0
    listed = json.loads(run("peers", "list", "--format", "json", cwd=tmp_path).stdout)["data"]
    assert [peer["address"] for peer in listed["peers"]][1:] == ["other:99"]
    assert listed["federation"] == "ward"


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
    for command in ("demo", "init", "id", "peers", "start", "status", "health"):
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
    assert loaded(f"{commands}, lightyear_node.lab.demo") == []
    # The codec's arithmetic; it takes a tenth of a second, and torch three.
    assert loaded("lightyear_node.node, lightyear_node.preflight") == ["numpy"]
    assert os.environ.get("LIGHTYEAR_HOME") is None
