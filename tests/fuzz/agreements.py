"""peers.yaml and node.yaml: a file that somebody sent, up to the terms that a node would run by."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lightyear_node.config.agreement import load_agreement
from lightyear_node.config.site import load_site
from lightyear_node.errors import ConfigError
from lightyear_node.peers_file import write_agreement
from lightyear_node.strict_yaml import parse_scalar

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-agreements-")
FOLDER = Path(_FOLDER.name)
SCALAR_CHARS = 200
"""What somebody might write into an environment variable."""
PIN = "SHA256:" + "A" * 43
SOUND = f"""\
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
malfunction: {kind: nan, scale: 1.0e+3}
"""
WORDS = (
    "!!bool !!int !!float !!null !!str !!timestamp !!map !!seq !!set !x & * << ? | > %YAML --- ..."
    " .inf .nan ~ 0x 0b 1_0 1:30 2026-01-01 yes off version rule options name exchange peers"
)
"""What mutations are made of, besides bytes."""


def seeds() -> Iterator[bytes]:
    for text in (SOUND, SITE, "a: &x [1]\nb: *x\n", "a: !!binary aGk=\n", "? [1]\n: 2\n", "{"):
        yield text.encode()
    yield b"rule: {name: krum, options: {f: 1, deep: {x: [~, 'a', \"\\u00e9\"]}}}\n"


def check(text: bytes) -> None:
    path = FOLDER / "read.yaml"
    path.write_bytes(text)
    try:
        agreement = load_agreement(path)
    except ConfigError as problem:
        _one_line(problem)
    else:
        written = FOLDER / "written.yaml"
        write_agreement(written, agreement)
        assert load_agreement(written).digest() == agreement.digest()
    try:
        load_site(path, {})
    except ConfigError as problem:
        _one_line(problem)
    with contextlib.suppress(ConfigError):
        parse_scalar(text.decode(errors="replace")[:SCALAR_CHARS])


def _one_line(problem: ConfigError) -> None:
    assert len(str(problem)) < 2000, "a message for a person"
