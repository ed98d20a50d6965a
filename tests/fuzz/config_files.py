"""Fuzz target: peers.yaml and node.yaml, from the file to the validated settings."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lightyear_node.config.federation import load_federation_config
from lightyear_node.config.node import load_node_config
from lightyear_node.config.strict_yaml import parse_scalar
from lightyear_node.errors import ConfigError
from lightyear_node.tools.peers_file import write_peers_file

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-config-")
FOLDER = Path(_FOLDER.name)
SCALAR_CHARS = 200
"""Length of a scalar, as in an environment variable."""
PIN = "SHA256:" + "A" * 43
VALID = f"""\
version: 1
federation: chest-xray
seed: 7
rounds: 20
rule: {{name: lightyear, tau: 0.6, gamma: .95, guard: true, weights: samples}}
barrier: {{min_peers: 1, faulty_max: 0, grace: 30 s, heartbeat: 500ms}}
exchange: {{dtype: bfloat16, delta: no, include: ["*"], exclude: ["head.*"]}}
peers:
  - name: site-a
    address: "a.example.org:7443"
    fingerprint: {PIN}
    certificate: MIIB
  - {{name: site-b, address: null, fingerprint: [{PIN[:-1]}B], certificate: [x, y]}}
"""
SITE = """\
listen: "0.0.0.0:7443"
task: {entry: "tasks.mine:build", args: {path: /data, size: 0x10, when: 2026-01-01, half: 1:30}}
http: {listen: "127.0.0.1:9464"}
worker: {threads: 1, silence: 1.0e+3}
"""
WORDS = (
    "!!bool !!int !!float !!null !!str !!timestamp !!map !!seq !!set !x & * << ? | > %YAML --- ..."
    " .inf .nan ~ 0x 0b 1_0 1:30 2026-01-01 yes off version rule options name exchange peers"
)
"""Dictionary for mutations."""


def seeds() -> Iterator[bytes]:
    for text in (VALID, SITE, "a: &x [1]\nb: *x\n", "a: !!binary aGk=\n", "? [1]\n: 2\n", "{"):
        yield text.encode()
    yield b"rule: {name: krum, options: {f: 1, deep: {x: [~, 'a', \"\\u00e9\"]}}}\n"


def check(text: bytes) -> None:
    path = FOLDER / "read.yaml"
    path.write_bytes(text)
    try:
        agreement = load_federation_config(path)
    except ConfigError as problem:
        _check_message(problem)
    else:
        written = FOLDER / "written.yaml"
        write_peers_file(written, agreement)
        assert load_federation_config(written).digest() == agreement.digest()
    try:
        load_node_config(path, {})
    except ConfigError as problem:
        _check_message(problem)
    with contextlib.suppress(ConfigError):
        parse_scalar(text.decode(errors="replace")[:SCALAR_CHARS])


def _check_message(problem: ConfigError) -> None:
    assert len(str(problem)) < 2000, "the message is too long to read"
