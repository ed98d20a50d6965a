"""The command line in real processes: exit codes, and one line per error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node.identity.invite import invite_line
from lightyear_node.identity.keys import BACKDATED, LIFETIME, make_identity
from lightyear_node.lab.federation import free_ports, package_environment
from tests.support.paths import ROOT

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
    """Run a command that must fail without a traceback; return its message and hint."""
    ended = run(*arguments, cwd=cwd, **environment)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert lines[-2 if lines[-1].startswith("  what to do:") else -1].startswith("lightyear-node: ")
    return ended.stderr


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites and their peers.yaml, created as in the README."""
    folder = tmp_path_factory.mktemp("sites")
    joins = []
    for number, name in enumerate(["site-a", "site-b"]):
        address = f"127.0.0.1:{free_ports(1)[0]}"
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
def test_the_port_for_metrics_follows_from_the_listening_port(
    reached: tuple[str, ...], http: int, tmp_path: Path
) -> None:
    run("init", "x", "--name", "x", *reached, cwd=tmp_path)
    settings = yaml.safe_load((tmp_path / "x" / "node.yaml").read_text())
    assert settings["http"]["listen"] == f"127.0.0.1:{http}"


@pytest.mark.parametrize("address", ["[2001:db8::1]:7443", "fl.a.example:7443"])
def test_what_init_writes_can_be_read(address: str, tmp_path: Path) -> None:
    made = ("init", "x", "--name", "x", "--address", address, "--listen", "[::]:7443")
    assert run(*made, cwd=tmp_path).returncode == 0
    shown = run("id", "--home", "x", "--format", "json", cwd=tmp_path)
    assert json.loads(shown.stdout)["data"]["address"] == address


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--address", "h"), "'h' is not an address: expected host:port"),
        (("--address", "h:1", "--listen", "0.0.0.0"), "'0.0.0.0' is not an address"),
        (("--address", "h:1", "--http", "127.0.0.1"), "'127.0.0.1' is not an address"),
        (("--address", "none", "--listen", "0.0.0.0:1"), "--listen has no meaning"),
    ],
)
def test_init_refuses_what_start_would_refuse(
    options: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    assert text in failure(78, "init", "x", "--name", "x", *options, cwd=tmp_path)
    assert not (tmp_path / "x").exists()


def test_help_installer_and_page_explain_listen_for_nat() -> None:
    for text in (
        run("init", "--help", cwd=ROOT).stdout,
        (ROOT / "docs" / "commands.md").read_text(),
        (ROOT / "deploy" / "systemd" / "install.sh").read_text(),
    ):
        assert "--listen 0.0.0.0:7443" in text


def test_an_expired_certificate_is_refused_and_an_early_one_warned_about(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    lines = {
        name: invite_line(make_identity(name, made), f"{name}:1")
        for name, made in (
            ("expired", now - LIFETIME - timedelta(days=1)),
            ("early", now + BACKDATED + timedelta(days=1)),
            ("good", now),
        )
    }
    text = failure(78, "peers", "add", lines["good"], lines["expired"], cwd=tmp_path)
    assert "the certificate of expired expired on" in text
    assert "lightyear-node renew" in text
    assert not (tmp_path / "peers.yaml").exists()
    named = ("--federation", "ward")
    added = run("peers", "add", *named, lines["good"], lines["early"], cwd=tmp_path)
    assert added.returncode == 0
    assert "warning: the certificate of early is not valid before" in added.stderr
    assert "certificate of good" not in added.stderr
    assert [peer["name"] for peer in listed_in(tmp_path)] == ["early", "good"]


def test_peers_list_has_a_table_and_json(homes: Path) -> None:
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

    text = failure(78, "peers", "add", lines[1], cwd=tmp_path)
    assert "two certificates already" in text
    assert f"peers remove site-b --fingerprint {old}" in text
    assert listed_in(tmp_path)[1] == site_b
    # The line of a listed certificate changes only the address.
    assert run("peers", "add", lines[0].replace(":90", ":95"), cwd=tmp_path).returncode == 0
    assert listed_in(tmp_path)[1] == {**site_b, "address": "other:95"}

    assert run("peers", "remove", "site-b", "--fingerprint", old, cwd=tmp_path).returncode == 0
    assert listed_in(tmp_path)[1]["fingerprint"] == [new]
    text = failure(78, "peers", "remove", "site-b", "--fingerprint", new, cwd=tmp_path)
    assert "the only certificate" in text
    assert "`lightyear-node peers remove site-b`" in text
    text = failure(78, "peers", "remove", "site-b", "--fingerprint", old, cwd=tmp_path)
    assert f"it has {new}" in text
    # The remaining pair of certificate and fingerprint matches.
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


def test_renewal_works_in_the_order_that_the_messages_give(homes: Path, tmp_path: Path) -> None:
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
    # The old certificate is in use until the new one is activated.
    assert (
        json.loads(run("id", *in_file, "--format", "json", cwd=tmp_path).stdout)["data"] == before
    )

    text = failure(78, "renew", "--activate", *in_file, cwd=tmp_path)
    assert "does not list the new certificate" in text
    assert "peers add" in text
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
    text = failure(78, "init", "x", "--name", "Site A", "--address", "h:1", cwd=tmp_path)
    assert "cannot be a site's name" in text
    text = failure(78, "init", "x", "--name", "a", "--address", "no-port", cwd=tmp_path)
    assert "is not an address" in text
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
def test_start_reports_an_error_in_peers_yaml_by_line(
    homes: Path, tmp_path: Path, peers: str | None, expected: str
) -> None:
    if peers is not None:
        (tmp_path / "peers.yaml").write_text(peers)
    path = str(tmp_path / "peers.yaml")
    assert expected in failure(78, "start", "--peers", path, cwd=homes / "site-a")


def test_start_refuses_a_peers_file_without_our_certificate(homes: Path, tmp_path: Path) -> None:
    run("init", "z", "--name", "site-z", "--address", "z:1", cwd=tmp_path)
    peers = str(homes / "peers.yaml")
    text = failure(78, "start", "--peers", peers, "--home", "z", cwd=tmp_path)
    assert "our own certificate" in text
    assert "peers add" in text


def test_start_refuses_a_fingerprint_that_is_not_the_certificates(
    homes: Path, tmp_path: Path
) -> None:
    text = (homes / "peers.yaml").read_text()
    pins = [line.split()[-1] for line in text.splitlines() if "fingerprint:" in line]
    (tmp_path / "peers.yaml").write_text(text.replace(pins[1], "SHA256:" + "A" * 43))
    text = failure(78, "start", "--peers", str(tmp_path / "peers.yaml"), cwd=homes / "site-a")
    assert "the fingerprint of site-b is not that of its certificate" in text


def test_start_explains_an_impossible_min_peers(homes: Path, tmp_path: Path) -> None:
    text = (homes / "peers.yaml").read_text().replace("peers:", "barrier: {min_peers: 2}\npeers:")
    (tmp_path / "peers.yaml").write_text(text)
    text = failure(78, "start", "--peers", str(tmp_path / "peers.yaml"), cwd=homes / "site-a")
    assert "at least max(1, 2 × 0) = 1 and at most 2 - 1 - 0 = 1" in text


@pytest.mark.parametrize(
    ("rule", "expected", "advice"),
    [
        # Checked by the worker, which knows the rules and their options.
        ("{name: krumm}", 'there is no rule "krumm"', 'did you mean "krum"?'),
        ("{name: krum, options: {fauly: 1}}", 'no option "fauly"', 'did you mean "faulty"?'),
        ("{name: krum, options: {tau: 0.5}}", 'rule krum has no option "tau"', ""),
        ("{name: krum, options: {faulty: much}}", "faulty is 'much', not an int or None", ""),
        ("{name: ditto, options: {lam: -1}}", "rule ditto: lam is -1, not 0 or above", ""),
        # Checked before.
        ("{name: krum, tau: 0.5}", "`tau` is a setting of lightyear", "correct that value"),
        ("{name: krum, fauly: 1}", "unknown key `fauly`", ""),
        ("{nam: krum}", "unknown key `nam`: did you mean `name`?", ""),
        ("{name: 3}", "`rule.name`: ", "correct that value"),
    ],
)
def test_start_reports_an_invalid_rule(
    homes: Path, tmp_path: Path, rule: str, expected: str, advice: str
) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_text((homes / "peers.yaml").read_text() + f"rule: {rule}\n")
    arguments = ("start", "--peers", str(peers), "--state-dir", str(tmp_path / "state"))
    text = failure(78, *arguments, cwd=homes / "site-a")
    [line] = [line for line in text.splitlines() if line.startswith("lightyear-node: ")]
    assert expected in line
    assert advice in text.splitlines()[-1]


def test_start_refuses_a_local_tau_for_a_rule_without_one(homes: Path, tmp_path: Path) -> None:
    peers = tmp_path / "peers.yaml"
    peers.write_text((homes / "peers.yaml").read_text() + "rule: {name: krum}\n")
    text = failure(
        78, "start", "--peers", str(peers), cwd=homes / "site-a", LIGHTYEAR_RULE_TAU="0.8"
    )
    assert "`rule.tau` is a setting of lightyear, but the federation's rule is krum" in text


def test_start_refuses_a_key_that_others_can_read(homes: Path) -> None:
    key = homes / "site-a/keys/tls.key"
    key.chmod(0o644)
    try:
        text = failure(78, "start", "--peers", "../peers.yaml", cwd=homes / "site-a")
    finally:
        key.chmod(0o600)
    assert str(Path("keys/tls.key")) in text
    assert "chmod 600" in text


def test_status_and_health_fail_without_a_node(homes: Path) -> None:
    assert "no node is running" in failure(3, "status", cwd=homes / "site-a")
    assert "no node is running" in failure(3, "health", cwd=homes / "site-a")


def test_usage_errors_exit_with_2_and_help_lists_the_commands(tmp_path: Path) -> None:
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


def test_settings_from_the_environment_are_checked(homes: Path) -> None:
    text = failure(
        78, "start", "--peers", "../peers.yaml", cwd=homes / "site-a", LIGHTYEAR_DEVICE="abacus"
    )
    assert "`device" in text


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
    """`status` and `--help` import no slow package, the daemon no torch."""
    commands = "lightyear_node.cli.start, lightyear_node.cli.status, lightyear_node.cli.check"
    commands += ", lightyear_node.cli.rounds, lightyear_node.cli.audit, lightyear_node.audit.export"
    assert loaded(f"{commands}, lightyear_node.lab.demo") == []
    # numpy, for the codec, loads in a tenth of a second; torch in three.
    assert loaded("lightyear_node.node.daemon, lightyear_node.tools.preflight") == ["numpy"]
    assert os.environ.get("LIGHTYEAR_HOME") is None
