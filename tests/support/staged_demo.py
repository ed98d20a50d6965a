"""Fake nodes that have finished, and the invented results of a demo."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightyear_node.lab.demo_results import DemoResults, PeerJudgement, SiteResult
from lightyear_node.lab.federation import SiteHome
from lightyear_node.types import PeerName

FAKE_NODE = (sys.executable, str(Path(__file__).parent / "fake_node.py"))

MakeResults = Callable[..., DemoResults]


def status_of(
    name: PeerName, others: Sequence[PeerName], *, rounds: int, bad: Sequence[PeerName] = ()
) -> dict[str, Any]:
    """The status of a node that has finished and accepts all peers that are not bad."""
    return {
        "name": name,
        "federation": "demo",
        "rounds": rounds,
        "round": rounds,
        "phase": "finished",
        "waiting": "finished: still serving our last update",
        "finished": True,
        "progress": None,
        "metrics": {"local": {"accuracy": 0.9}, "merged": {"accuracy": 0.95}},
        "bytes": {"raw": 1000, "wire": 400, "raw_sent": 0, "wire_sent": 0},
        "peers": [
            {
                "name": other,
                "verdict": "rejected" if other in bad else "accepted",
                "reason": "too_far" if other in bad else "ok",
                "agreement": 0.41 if other in bad else 0.97,
            }
            for other in others
        ],
    }


def rounds_of(
    others: Sequence[PeerName], *, rounds: int, bad: Sequence[PeerName] = ()
) -> list[dict[str, Any]]:
    return [
        {
            "round": number,
            "verdicts": [
                {
                    "peer": other,
                    "accepted": other not in bad,
                    "reason": "too_far" if other in bad else "ok",
                    "score": 0.41 if other in bad else 0.97,
                    "weight": 0.2,
                    "digest": "d" * 64,
                }
                for other in others
            ],
            "local": {"accuracy": 0.8},
            "merged": {"accuracy": 0.9 + number / 100},
        }
        for number in range(rounds)
    ]


def write_finished_answers(homes: Sequence[SiteHome], *, rounds: int) -> None:
    """Give every site the answers of a node that has finished."""
    bad = [home.name for home in homes if home.malfunction]
    for home in homes:
        others = [other.name for other in homes if other is not home]
        answers = {
            "status": status_of(home.name, others, rounds=rounds, bad=bad),
            "rounds": rounds_of(others, rounds=rounds, bad=bad),
        }
        (home.directory / "answers.json").write_text(json.dumps(answers))


def staged_results(
    folder: Path,
    *,
    alone: float = 0.8,
    federated: float = 0.9,
    averaged: float = 0.3,
    bad: int = 1,
    bad_accepted: bool = False,
    sites: int = 4,
    rounds: int = 3,
) -> DemoResults:
    names = [PeerName(f"site-{letter}") for letter in "abcdefghijklmnopqrst"[:sites]]
    bad_names = set(names[sites - bad :])
    return DemoResults(
        federation="demo",
        rounds=rounds,
        seed=7,
        malfunction="sfa" if bad else "none",
        rule="lightyear with guard",
        tau=0.6,
        sites=[
            # The bad sites' scores must not influence the means over honest sites.
            SiteResult(name, name in bad_names, alone, federated, averaged)
            if name not in bad_names
            else SiteResult(name, True, 0.1, 0.2, 0.05)
            for name in names
        ],
        judgements=[
            PeerJudgement(
                round=number,
                judge=judge,
                peer=peer,
                accepted=bad_accepted if peer in bad_names else True,
                reason="ok" if bad_accepted or peer not in bad_names else "too_far",
                score=0.5 if peer in bad_names else 0.9,
                delivered=True,
            )
            for number in range(rounds)
            for judge in names
            for peer in names
            if peer != judge
        ],
        raw_bytes=2_000_000,
        wire_bytes=1_500_000,
        seconds=42.0,
        report=folder / "report.html",
    )
