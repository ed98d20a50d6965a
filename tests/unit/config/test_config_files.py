"""peers.yaml and node.yaml: valid files are read, errors name the line."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import FederationConfig, RuleConfig, load_federation_config
from lightyear_node.config.node import DiskConfig, TaskConfig, load_node_config
from lightyear_node.config.strict_yaml import parse_scalar
from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import make_identity
from lightyear_node.tools.peers_file import write_peers_file

PIN = "SHA256:" + "A" * 43
OTHER_PIN = "SHA256:" + "B" * 43


def agreement_text(extra: str = "", peers: str | None = None) -> str:
    listed = peers or (
        f'  - {{name: site-a, address: "a:1", fingerprint: "{PIN}", certificate: x}}\n'
        f'  - {{name: site-b, address: "b:1", fingerprint: "{OTHER_PIN}", certificate: x}}\n'
    )
    return f"version: 1\nfederation: chest-xray\n{extra}peers:\n{listed}"


def load(tmp_path: Path, text: str | bytes) -> FederationConfig:
    path = tmp_path / "peers.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_federation_config(path)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.exit_code == 78
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "peers.yaml"))
    assert "\n" not in message
    return message.removeprefix(str(tmp_path / "peers.yaml"))


def test_a_complete_file_is_read(tmp_path: Path) -> None:
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
        # Each of these tags would change the meaning of the text.
        (agreement_text("rounds: !!int ''\n"), ":3: tags"),
        (agreement_text("rule: {guard: !!bool perhaps}\n"), ":3: tags"),
        (agreement_text("seed: !!timestamp soon\n"), ":3: tags"),
        (agreement_text("rule: !!python/object:os.system {}\n"), ":3: tags"),
        (agreement_text(f"seed: 0x{'F' * 5000}\n"), ":3: a number of more than 64 bits"),
        (agreement_text(f"seed: 1{':00' * 200}.5\n"), ": not valid YAML: int too large"),
        # The misspelt key is reported, not the key that is missing because of it.
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
def test_an_environment_variable_that_is_not_yaml_is_text(value: str) -> None:
    assert parse_scalar(value) == value


def test_options_of_a_rule_keep_their_types_from_every_source(tmp_path: Path) -> None:
    given = {"none": None, "yes": True, "whole": 1, "half": 0.5, "round": 2.0, "word": "1"}
    options = "{none: null, yes: true, whole: 1, half: 0.5, round: 2.0, word: '1'}"
    agreement = load(tmp_path, agreement_text(f"rule: {{name: mine, options: {options}}}\n"))

    def same(options: Mapping[str, object]) -> bool:
        return options == given and [*map(type, options.values())] == [*map(type, given.values())]

    assert same(agreement.rule.options)
    write_peers_file(tmp_path / "again.yaml", agreement)
    assert same(load_federation_config(tmp_path / "again.yaml").rule.options)
    assert load_federation_config(tmp_path / "again.yaml").digest() == agreement.digest()
    for plain in (agreement.rule.model_dump(), agreement.rule.model_dump(mode="json")):
        assert same(RuleConfig(**json.loads(json.dumps(plain))).options)


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
        load_federation_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_federation_config(tmp_path)


def test_the_digest_depends_on_values_not_spelling(tmp_path: Path) -> None:
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
    assert load_node_config(tmp_path / "none.yaml", {}).device == "auto"
    assert load_node_config(path, {}).device == "cpu"
    environment = {"LIGHTYEAR_DEVICE": "cuda:1", "LIGHTYEAR_HTTP_LISTEN": "127.0.0.1:2"}
    site = load_node_config(path, environment)
    assert (site.device, site.http.listen) == ("cuda:1", "127.0.0.1:2")
    site = load_node_config(path, environment, {"device": "mps", "http": {"listen": ""}})
    assert (site.device, site.http.listen) == ("mps", "")


def test_a_site_may_only_be_stricter_about_its_own_model(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("rule: {tau: 0.8}\n")
    agreement = load(tmp_path, agreement_text("rule: {tau: 0.5, gamma: 0.9}\n"))
    rule = load_node_config(path, {}).rule_of(agreement)
    assert (rule.tau, rule.gamma, rule.name) == (0.8, 0.9, "lightyear")
    path.write_text("rule: {harm_max: 0}\n")
    rule = load_node_config(path, {}).rule_of(agreement)
    assert (rule.tau, rule.harm_allowed) == (0.5, 0.0)
    path.write_text("rule: {harm_max: false}\n")
    assert load_node_config(path, {}).rule_of(agreement).harm_allowed is None
    path.write_text("rule: {guard: false}\n")
    assert load_node_config(path, {}).rule_of(agreement).harm_allowed is None
    path.write_text("rule: {name: fedavg}\n")
    with pytest.raises(ConfigError, match="unknown key `name`"):
        load_node_config(path, {})


def test_no_setting_makes_a_node_malfunction(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("malfunction: {kind: sfa}\n")
    with pytest.raises(ConfigError, match=":1: unknown key `malfunction`"):
        load_node_config(path, {})
    path.write_text("worker: {program: lightyear_node.lab.faulty_worker}\n")
    with pytest.raises(ConfigError, match=":1: unknown key `program`"):
        load_node_config(path, {})
    path.write_text("")
    variables = {"LIGHTYEAR_MALFUNCTION": "sfa", "LIGHTYEAR_MALFUNCTION_KIND": "sfa"}
    assert load_node_config(path, variables) == load_node_config(path, {})


@pytest.mark.parametrize(
    ("settings", "allowed"),
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
def test_merged_models_are_checked_with_the_guard_or_harm_max(
    settings: dict[str, Any], allowed: float | None
) -> None:
    rule = RuleConfig(**settings)
    assert rule.harm_allowed == allowed
    # The worker and simulations receive the settings as JSON.
    assert RuleConfig(**json.loads(rule.model_dump_json())).harm_allowed == allowed
    assert rule.computed().get("harm_max") == allowed


@pytest.mark.parametrize("value", ["true", "-0.1", "1.5", "never", ".nan", "[0.1]"])
def test_harm_max_is_a_share_or_false(tmp_path: Path, value: str) -> None:
    text = refusal(tmp_path, agreement_text(f"rule: {{harm_max: {value}}}\n"))
    assert text.startswith(":3: `rule.harm_max`: write a number from 0 to 1, or false")


def test_certificates_are_part_of_the_file(tmp_path: Path) -> None:
    identity = make_identity("site-a", datetime.now(UTC))
    encoded = base64.b64encode(identity.certificate.der).decode()
    peers = (
        f'  - {{name: site-a, address: "a:1", fingerprint: "{identity.fingerprint}",'
        f' certificate: "{encoded}"}}\n'
    )
    agreement = load(tmp_path, agreement_text(peers=peers))
    assert agreement.find(identity.fingerprint) is agreement.peers[0]


def test_verdicts_are_not_shared_by_default(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    assert load_node_config(path, {}).share_verdicts is False
    path.write_text("share_verdicts: true\n")
    assert load_node_config(path, {}).share_verdicts is True
    assert load_node_config(path, {"LIGHTYEAR_SHARE_VERDICTS": "false"}).share_verdicts is False
    path.write_text("share_verdicts: some\n")
    with pytest.raises(ConfigError, match="share_verdicts"):
        load_node_config(path, {})


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
def test_sizes_have_units(written: object, expected: int) -> None:
    assert DiskConfig(quota=written).quota == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["20", "20 apples", "-1GiB", "1GiBB", "GiB", "", "2PB"])
def test_an_invalid_size_is_refused_with_an_example(tmp_path: Path, written: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(f"disk:\n  quota: '{written}'\n")
    with pytest.raises(ConfigError, match=r"node.yaml:2: `disk.quota`.*write 500MiB"):
        load_node_config(path, {})


def test_disk_and_retention_have_defaults_and_bounds(tmp_path: Path) -> None:
    site = load_node_config(tmp_path / "none", {"LIGHTYEAR_DISK_RESERVE": "1GiB"})
    assert (site.disk.quota, site.disk.reserve, site.keep.models) == (None, 1 << 30, 3)
    (tmp_path / "node.yaml").write_text("keep:\n  models: 0\n")
    with pytest.raises(ConfigError, match=r"keep\.models"):
        load_node_config(tmp_path / "node.yaml", {})


ADDRESS_KEYS = ["address: {}", "listen: {}", "http: {{listen: {}}}"]


@pytest.mark.parametrize("key", ADDRESS_KEYS)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0.0.0.0", "expected host:port, for example"),
        ("7443", "expected host:port, for example"),
        ("'host:'", "expected host:port, for example"),
        ("':7443'", "expected host:port, for example"),
        ("host:port", "expected host:port, for example"),
        ("'::1:7443'", "expected host:port, for example"),
        ("'[::1]'", "expected host:port, for example"),
        ("[7443]", "expected host:port, for example"),
        ("'[::1::]:7443'", "::1:: is not an IPv6 address"),
        ("host:65536", "a port is at most 65535"),
    ],
)
def test_an_invalid_address_is_named_with_its_key_and_line(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("device: cpu\n" + key.format(value) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_node_config(path, {})
    name = "http.listen" if key.startswith("http") else key.partition(":")[0]
    assert str(caught.value).startswith(f"{path}:2: `{name}`: {words}")


@pytest.mark.parametrize("key", ADDRESS_KEYS)
@pytest.mark.parametrize(
    "value", ["0.0.0.0:7443", "fl.a.example:1", "[2001:db8::1]:7443", "[::]:1"]
)
def test_addresses_that_can_be_listened_on(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(key.format(f'"{value}"') + "\n")
    site = load_node_config(path, {})
    assert value in (site.address, site.listen, site.http.listen)


def test_an_address_in_the_environment_is_checked_like_one_in_the_file(tmp_path: Path) -> None:
    for variable in ("LIGHTYEAR_LISTEN", "LIGHTYEAR_HTTP_LISTEN", "LIGHTYEAR_ADDRESS"):
        with pytest.raises(ConfigError, match="expected host:port"):
            load_node_config(tmp_path / "node.yaml", {variable: "0.0.0.0"})


def test_an_ipv6_address_without_quotes_gets_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("device: cpu\nlisten: [::]:7443\n")
    with pytest.raises(ConfigError) as caught:
        load_node_config(path, {})
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "needs quotes" in (caught.value.hint or "")


def test_a_task_is_an_entry_or_a_bundle_and_the_digits_by_default(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"

    def task(text: str) -> TaskConfig:
        path.write_text(text)
        return load_node_config(path, {}).task

    assert task("device: cpu").name == "lightyear_node.lab.tasks.digits:build"
    bundle = task("task: {bundle: spleen, args: {epochs: 2}}")
    assert bundle.name == "spleen"
    assert bundle.model_dump() == {"bundle": "spleen", "args": {"epochs": 2}}
    assert TaskConfig(**bundle.model_dump()) == bundle
    entry = task("task: {entry: 'lightyear_node.tasks.digits:build'}")
    assert entry.model_dump() == {"entry": "lightyear_node.lab.tasks.digits:build", "args": {}}
    with pytest.raises(ConfigError, match="`entry` and `bundle` exclude each other"):
        task("task: {entry: 'a:b', bundle: spleen}")


def test_a_task_is_an_entry_or_a_script(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    assert load_node_config(path, {}).task.name == "lightyear_node.lab.tasks.digits:build"
    path.write_text("task: {args: {epochs: 2}}\n")
    assert load_node_config(path, {}).task.model_dump() == {
        "entry": "lightyear_node.lab.tasks.digits:build",
        "args": {"epochs": 2},
    }
    path.write_text("task: {script: train.py, args: [--lr, 0.1, --epochs, 3]}\n")
    task = load_node_config(path, {}).task
    assert task.model_dump(mode="json") == {
        "script": "train.py",
        "args": ["--lr", "0.1", "--epochs", "3"],
    }
    assert task.name == "train.py"
    assert load_node_config(path, {"LIGHTYEAR_TASK_SCRIPT": "other.py"}).task.name == "other.py"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{script: train.py, entry: 'a:b'}", "`entry` and `script` exclude each other"),
        ("{script: train.py, args: {lr: 0.1}}", r"`args` of a script is a list"),
        ("{entry: 'a:b', args: [--lr]}", r"`args` of `entry` is a table"),
        ("{script: train.py, args: --lr}", r"`task.args`: arguments are a table"),
        ("{script: train.py, args: [[1]]}", r"`task.args`: arguments are a table"),
        ("{script: ''}", r"`task.script`"),
        ("{scirpt: train.py}", r"did you mean `script`"),
    ],
)
def test_a_mistake_in_the_task_is_named(tmp_path: Path, written: str, expected: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(f"device: cpu\ntask: {written}\n")
    with pytest.raises(ConfigError, match=rf"node.yaml:2: .*{expected}"):
        load_node_config(path, {})


def test_readings_of_the_score_change_the_digest_only_if_they_are_set() -> None:
    """Nodes of 0.1.0, which do not have these keys, compare digests; so do finished results."""

    def digest(**rule: Any) -> str:
        config = {"version": 1, "federation": "f", "peers": (), "rule": RuleConfig(**rule)}
        return FederationConfig(**config).digest()

    usual = {"output": "logits", "reference": "trained", "unbiased": False}
    assert digest() == digest(**usual)
    assert digest() == "004ebdc12fc2384ee35951868105c781270cca51f4ef03e10c9cf31e1a9d52fa"
    assert not RuleConfig(**usual).computed().keys() & usual.keys()
    other = {"output": "softmax", "reference": "previous", "unbiased": True}
    assert len({digest(), *(digest(**{key: value}) for key, value in other.items())}) == 4
    rule = RuleConfig(**other)
    assert other.items() <= rule.computed().items()
    assert RuleConfig(**json.loads(rule.model_dump_json())) == rule


@pytest.mark.parametrize(
    ("key", "value"), [("output", "probabilities"), ("reference", "own"), ("unbiased", "few")]
)
def test_a_reading_that_does_not_exist_is_refused(tmp_path: Path, key: str, value: str) -> None:
    text = refusal(tmp_path, agreement_text(f"rule: {{{key}: {value}}}\n"))
    assert text.startswith(f":3: `rule.{key}`: ")


def test_readings_belong_to_lightyear(tmp_path: Path) -> None:
    text = refusal(tmp_path, agreement_text("rule: {name: krum, output: softmax}\n"))
    assert "`output` is a setting of lightyear; those of krum stand under `options`" in text
