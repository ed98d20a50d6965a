"""peers.yaml and node.yaml: what is right is read, what is wrong is named with its line."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.agreement import Agreement, RuleTerms, load_agreement
from lightyear_node.config.site import DiskTerms, load_site
from lightyear_node.errors import ConfigError
from lightyear_node.identity import make_identity
from lightyear_node.peers_file import write_agreement
from lightyear_node.strict_yaml import parse_scalar

PIN = "SHA256:" + "A" * 43
OTHER_PIN = "SHA256:" + "B" * 43


def agreement_text(extra: str = "", peers: str | None = None) -> str:
    listed = peers or (
        f'  - {{name: site-a, address: "a:1", fingerprint: "{PIN}", certificate: x}}\n'
        f'  - {{name: site-b, address: "b:1", fingerprint: "{OTHER_PIN}", certificate: x}}\n'
    )
    return f"version: 1\nfederation: chest-xray\n{extra}peers:\n{listed}"


def load(tmp_path: Path, text: str | bytes) -> Agreement:
    path = tmp_path / "peers.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_agreement(path)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 78
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "peers.yaml"))
    assert "\n" not in message
    return message.removeprefix(str(tmp_path / "peers.yaml"))


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    agreement = load(
        tmp_path,
        agreement_text("seed: 7\nrule: {name: lightyear, tau: 0.5}\nbarrier: {grace: 30s}\n"),
    )
    assert (agreement.seed, agreement.rule.tau, agreement.barrier.grace) == (7, 0.5, 30.0)
    assert [peer.name for peer in agreement.peers] == ["site-a", "site-b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (agreement_text("rouns: 3\n"), ":3: unknown key `rouns`: did you mean `rounds`?"),
        (agreement_text("rule: {taw: 0.5}\n"), ":3: unknown key `taw`: did you mean `tau`?"),
        (agreement_text("seed: 1\nseed: 2\n"), ":4: key `seed` appears twice"),
        (agreement_text("rule: &r {tau: 0.5}\nbarrier: *r\n"), ":4: aliases"),
        # Each of these tags asks for a value that the text does not have.
        (agreement_text("rounds: !!int ''\n"), ":3: tags"),
        (agreement_text("rule: {guard: !!bool perhaps}\n"), ":3: tags"),
        (agreement_text("seed: !!timestamp soon\n"), ":3: tags"),
        (agreement_text("rule: !!python/object:os.system {}\n"), ":3: tags"),
        (agreement_text(f"seed: 0x{'F' * 5000}\n"), ":3: a number of more than 64 bits"),
        (agreement_text(f"seed: 1{':00' * 200}.5\n"), ": not valid YAML: int too large"),
        # A misspelt key is the cause, and the missing one its effect.
        ("verison: 1\nfederation: x\npeers: []\n", ":1: unknown key `verison`: did you mean `vers"),
        (
            agreement_text(peers="  - {name: site-a, adress: 'a:1'}\n"),
            ":4: unknown key `adress`: did you mean `address`?",
        ),
        (
            agreement_text("rule: {name: krum, tau: 0.5}\n"),
            ":3: `rule`: `tau` is a setting of lightyear; those of krum stand under `options`",
        ),
        (agreement_text("rule: {options: {tau: 0.5}}\n"), ":3: `rule`: lightyear's settings stand"),
        (agreement_text("rule: {name: krum, fauly: 1}\n"), ":3: unknown key `fauly`"),
        (
            agreement_text("rule:\n  name: krum\n  options: {faulty: [1]}\n"),
            ":5: `rule.options.faulty`: an option is a number, a word, true, false or null",
        ),
        (
            agreement_text("rule: {name: krum, options: {faulty: .inf}}\n"),
            ":3: `rule.options.faulty`: an option is a finite number",
        ),
        (agreement_text("rule: krum\n"), ":3: `rule`: "),
        (agreement_text("rounds: 0\n"), ":3: `rounds`: "),
        (agreement_text("rule: {tau: 2}\n"), ":3: `rule.tau`: "),
        (agreement_text("barrier: {grace: 30}\nbarrier2: 1\n"), ":4: unknown key `barrier2`"),
        (
            agreement_text("barrier: {grace: soon}\n"),
            ":3: `barrier.grace`: `soon` is not a duration",
        ),
        ("version: 2\nfederation: x\npeers: []\n", ":1: `version`"),
        ("federation: x\npeers: []\n", ":1: `version` is missing"),
        ("version: 1\nfederation: X Ray\npeers: []\n", ":2: `federation`: a name is"),
        ("version: 1\nfederation: [\n", ":3: "),
        ("- a\n- b\n", ":1: expected `key: value`"),
        ("[" * 5000, ":1: nested too deeply"),
        (b"version: 1\nfederation: \xff\n", ":2: not UTF-8"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert refusal(tmp_path, text).startswith(expected)


@pytest.mark.parametrize("value", ["2026-99-99", "!!bool perhaps", "[" * 100, "a: b: c", "*x"])
def test_what_is_no_yaml_value_in_the_environment_is_text(value: str) -> None:
    assert parse_scalar(value) == value


def test_a_rules_options_keep_their_kinds_wherever_they_are_written(tmp_path: Path) -> None:
    given = {"none": None, "yes": True, "whole": 1, "half": 0.5, "round": 2.0, "word": "1"}
    options = "{none: null, yes: true, whole: 1, half: 0.5, round: 2.0, word: '1'}"
    agreement = load(tmp_path, agreement_text(f"rule: {{name: mine, options: {options}}}\n"))

    def same(options: Mapping[str, object]) -> bool:
        return options == given and [*map(type, options.values())] == [*map(type, given.values())]

    assert same(agreement.rule.options)
    write_agreement(tmp_path / "again.yaml", agreement)
    assert same(load_agreement(tmp_path / "again.yaml").rule.options)
    assert load_agreement(tmp_path / "again.yaml").digest() == agreement.digest()
    for plain in (agreement.rule.model_dump(), agreement.rule.model_dump(mode="json")):
        assert same(RuleTerms(**json.loads(json.dumps(plain))).options)


def test_duplicate_peers_are_named(tmp_path: Path) -> None:
    entry = '  - {{name: {0}, address: "{1}", fingerprint: "{2}", certificate: x}}\n'
    first = entry.format("site-a", "a:1", PIN)
    assert "same name `site-a`" in refusal(
        tmp_path, agreement_text(peers=first + entry.format("site-a", "b:1", OTHER_PIN))
    )
    assert "same address `a:1`" in refusal(
        tmp_path, agreement_text(peers=first + entry.format("site-b", "a:1", OTHER_PIN))
    )
    message = refusal(tmp_path, agreement_text(peers=first + entry.format("site-b", "b:1", PIN)))
    assert message.startswith(":5: two peers have the same fingerprint")


@pytest.mark.parametrize("pin", ["MD5:abc", "SHA256:short", "SHA256:" + "!" * 43])
def test_a_bad_fingerprint_is_named(tmp_path: Path, pin: str) -> None:
    peers = f'  - {{name: site-a, address: "a:1", fingerprint: "{pin}", certificate: x}}\n'
    assert ":4: `peers.0.fingerprint.0`: a fingerprint is SHA256:" in refusal(
        tmp_path, agreement_text(peers=peers)
    )


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    assert "larger than 1 MiB" in refusal(tmp_path, b"#" * (2 << 20))


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_agreement(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_agreement(tmp_path)


def test_the_digest_is_about_meaning_not_spelling(tmp_path: Path) -> None:
    one = load(tmp_path, agreement_text("seed: 7\n"))
    reordered = load(tmp_path, "# a comment\n" + agreement_text("rounds: 20\nseed: 7\n"))
    swapped = one.model_copy(update={"peers": one.peers[::-1]})
    assert one.digest() == reordered.digest() == swapped.digest()
    assert one.digest() != load(tmp_path, agreement_text("seed: 8\n")).digest()


def test_two_pins_during_a_renewal(tmp_path: Path) -> None:
    peers = (
        f'  - {{name: site-a, address: "a:1", fingerprint: ["{PIN}", "{OTHER_PIN}"],'
        " certificate: [x, y]}\n"
    )
    agreement = load(tmp_path, agreement_text(peers=peers))
    assert agreement.find(agreement.peers[0].fingerprint[1]) == agreement.peers[0]  # type: ignore[arg-type]


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("device: cpu\nhttp: {listen: '127.0.0.1:1'}\n")
    assert load_site(tmp_path / "none.yaml", {}).device == "auto"
    assert load_site(path, {}).device == "cpu"
    environment = {"LIGHTYEAR_DEVICE": "cuda:1", "LIGHTYEAR_HTTP_LISTEN": "127.0.0.1:2"}
    site = load_site(path, environment)
    assert (site.device, site.http.listen) == ("cuda:1", "127.0.0.1:2")
    site = load_site(path, environment, {"device": "mps", "http": {"listen": ""}})
    assert (site.device, site.http.listen) == ("mps", "")


def test_a_site_may_only_be_stricter_about_its_own_model(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("rule: {tau: 0.8}\n")
    agreement = load(tmp_path, agreement_text("rule: {tau: 0.5, gamma: 0.9}\n"))
    rule = load_site(path, {}).rule_of(agreement)
    assert (rule.tau, rule.gamma, rule.name) == (0.8, 0.9, "lightyear")
    path.write_text("rule: {harm_max: 0}\n")
    rule = load_site(path, {}).rule_of(agreement)
    assert (rule.tau, rule.harm_allowed) == (0.5, 0.0)
    path.write_text("rule: {harm_max: false}\n")
    assert load_site(path, {}).rule_of(agreement).harm_allowed is None
    path.write_text("rule: {guard: false}\n")
    assert load_site(path, {}).rule_of(agreement).harm_allowed is None
    path.write_text("rule: {name: fedavg}\n")
    with pytest.raises(ConfigError, match="unknown key `name`"):
        load_site(path, {})


@pytest.mark.parametrize(
    ("terms", "allowed"),
    [
        ({}, 0.1),
        ({"guard": False}, None),
        ({"harm_max": False}, None),
        ({"harm_max": 0}, 0.0),  # which is not the same as false
        ({"harm_max": 0.0}, 0.0),
        ({"guard": False, "harm_max": 0.3}, 0.3),
        ({"name": "fedavg"}, None),
    ],
)
def test_merged_models_are_measured_under_the_guard_or_where_it_is_said(
    terms: dict[str, Any], allowed: float | None
) -> None:
    rule = RuleTerms(**terms)
    assert rule.harm_allowed == allowed
    # To the worker and to simulations the terms travel as JSON.
    assert RuleTerms(**json.loads(rule.model_dump_json())).harm_allowed == allowed
    assert rule.computed().get("harm_max") == allowed


@pytest.mark.parametrize("value", ["true", "-0.1", "1.5", "never", ".nan", "[0.1]"])
def test_what_a_merge_may_cost_is_a_share_or_false(tmp_path: Path, value: str) -> None:
    said = refusal(tmp_path, agreement_text(f"rule: {{harm_max: {value}}}\n"))
    assert said.startswith(":3: `rule.harm_max`: write a number from 0 to 1, or false")


def test_certificates_travel_in_the_file(tmp_path: Path) -> None:
    identity = make_identity("site-a", datetime.now(UTC))
    encoded = base64.b64encode(identity.certificate.der).decode()
    peers = (
        f'  - {{name: site-a, address: "a:1", fingerprint: "{identity.fingerprint}",'
        f' certificate: "{encoded}"}}\n'
    )
    agreement = load(tmp_path, agreement_text(peers=peers))
    assert agreement.find(identity.fingerprint) is agreement.peers[0]


def test_verdicts_stay_at_home_unless_a_site_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    assert load_site(path, {}).share_verdicts is False
    path.write_text("share_verdicts: true\n")
    assert load_site(path, {}).share_verdicts is True
    assert load_site(path, {"LIGHTYEAR_SHARE_VERDICTS": "false"}).share_verdicts is False
    path.write_text("share_verdicts: some\n")
    with pytest.raises(ConfigError, match="share_verdicts"):
        load_site(path, {})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("20GiB", 20 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2kB", 2000),
        ("1TB", 10**12),
        ("7B", 7),
        (4096, 4096),
    ],
)
def test_sizes_are_written_with_their_units(written: object, expected: int) -> None:
    assert DiskTerms(quota=written).quota == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["20", "20 apples", "-1GiB", "1GiBB", "GiB", "", "2PB"])
def test_what_is_no_size_is_refused_with_an_example(tmp_path: Path, written: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(f"disk:\n  quota: '{written}'\n")
    with pytest.raises(ConfigError, match=r"node.yaml:2: `disk.quota`.*write 500MiB"):
        load_site(path, {})


def test_disk_and_retention_have_defaults_and_bounds(tmp_path: Path) -> None:
    site = load_site(tmp_path / "none", {"LIGHTYEAR_DISK_RESERVE": "1GiB"})
    assert (site.disk.quota, site.disk.reserve, site.keep.models) == (None, 1 << 30, 3)
    (tmp_path / "node.yaml").write_text("keep:\n  models: 0\n")
    with pytest.raises(ConfigError, match=r"keep\.models"):
        load_site(tmp_path / "node.yaml", {})
