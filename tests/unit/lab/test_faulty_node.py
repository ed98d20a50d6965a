"""Fault injection: how the laboratory starts it, and that the product contains none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightyear_node.lab import faulty_worker
from lightyear_node.lab.federation import START, command_of, lay_out, package_environment
from lightyear_node.lab.malfunctions import FAULTY_NODE, Malfunction, MalfunctionConfig
from lightyear_node.types import PeerName
from tests.support.paths import PACKAGE

COMMAND = [sys.executable, "-m", FAULTY_NODE, "--malfunction"]
A, B = PeerName("site-a"), PeerName("site-b")
LAB_COMMANDS = {PACKAGE / "cli" / "demo.py", PACKAGE / "cli" / "lab.py"}
"""Command lines of the laboratory; they name malfunctions and import lab/ when they run."""
DISTINCT_KINDS = set(Malfunction) - {"stale", "random"}
"""Names that have no other meaning in the product."""
PASS_PROGRAM_ON = [PACKAGE / "node" / name for name in ("run.py", "daemon.py")]
PRODUCT = [
    path
    for path in PACKAGE.rglob("*.py")
    if PACKAGE / "lab" not in path.parents and path not in LAB_COMMANDS
]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_of_the_product_can_corrupt_an_update(path: Path) -> None:
    text = path.read_text()
    names = re.findall(r"malfunction(?!ing)|faulty_(?:site|worker|node)|flipped_labels", text, re.I)
    assert not names
    assert not [kind for kind in DISTINCT_KINDS if f'"{kind}"' in text]
    # Only the laboratory runs another worker than the ordinary one.
    assert "worker_program=" not in text or path in PASS_PROGRAM_ON


def test_only_a_malfunctioning_site_is_started_by_the_laboratory(tmp_path: Path) -> None:
    malfunction = MalfunctionConfig(kind="ana", scale=2.0)
    honest, faulty = lay_out(tmp_path, [A, B], malfunctions={B: malfunction})
    assert command_of(honest, START) == list(START)
    started = command_of(faulty, ("nice", *START))
    assert started[:4] == ["nice", sys.executable, "-m", FAULTY_NODE]
    assert MalfunctionConfig(**json.loads(started[5])) == malfunction
    assert started[6:] == ["--peers", "peers.yaml"]
    assert command_of(faulty, ("another", "start")) == ["another", "start"]
    settings = [(home.directory / "node.yaml").read_text() for home in (honest, faulty)]
    assert settings[0].count("\n") == settings[1].count("\n")


def test_a_faulty_node_refuses_an_unknown_malfunction(tmp_path: Path) -> None:
    for malfunction, words in (
        ('{"kind": "sfaa"}', "there is no malfunction `sfaa`"),
        ('{"kind": "sfa", "strength": 1}', "strength"),
    ):
        answer = subprocess.run(
            [*COMMAND, malfunction, "--peers", "peers.yaml"],
            cwd=tmp_path,
            env=package_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 2
        assert words in answer.stderr


def test_a_faulty_node_reports_a_wrong_setting_like_any_other(tmp_path: Path) -> None:
    answer = subprocess.run(
        [*COMMAND, '{"kind": "sfa"}', "--peers", "peers.yaml"],
        cwd=tmp_path,
        env=package_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 78
    assert "peers.yaml" in answer.stderr


def test_a_faulty_worker_sends_a_corrupted_update_and_keeps_an_honest_one(tmp_path: Path) -> None:
    opening = {
        "entry": "tests.support.tiny_task:build", "args": {}, "name": "a", "sites": ["a", "b"],
        "seed": 3, "rule": {}, "rounds": 2, "device": "cpu", "threads": 1, "exchange": {},
    }  # fmt: skip
    files = {name: str(tmp_path / name) for name in ("own", "outgoing", "carry_out")}
    base = str(tmp_path / "base")
    requests = [
        {"id": 1, "job": "open", **opening},
        {"id": 2, "job": "initial", "out": base, "wire_header": str(tmp_path / "header")},
        {"id": 3, "job": "train", "round": 0, "base": base, "carry": None, **files},
    ]

    def run(*program: str) -> None:
        (tmp_path / "outgoing").unlink(missing_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-m", *program],
            env=package_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        for request in requests:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
            while "progress" in answer:
                answer = json.loads(child.stdout.readline())
            assert "ok" in answer, answer
        child.stdin.close()
        assert child.wait(60) == 0
        child.stdout.close()

    run("lightyear_node.worker")
    honest = (tmp_path / "own").read_bytes()
    assert not (tmp_path / "outgoing").exists()
    run(faulty_worker.__name__, faulty_worker.MALFUNCTION + '{"kind": "sfa"}')
    assert (tmp_path / "own").read_bytes() == honest
    flipped = (tmp_path / "outgoing").read_bytes()
    assert flipped != honest
    # The user's own malfunction, which here computes the same.
    own = '{"kind": "tests.support.attacks:negated"}'
    run(faulty_worker.__name__, faulty_worker.MALFUNCTION + own)
    assert (tmp_path / "own").read_bytes() == honest
    assert (tmp_path / "outgoing").read_bytes() == flipped
