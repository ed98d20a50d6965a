"""Invented results of an experiment, in the format of the runner."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def job(
    rule: str,
    finals: Sequence[float | None],
    *,
    malfunction: str = "none",
    scale: float | None = None,
    bad: int = 0,
    seed: int = 0,
    label: str | None = None,
    terms: Mapping[str, Any] | None = None,
    task: str = "femnist",
    grid: str = "main",
    verdicts: Mapping[str, Mapping[str, int]] | None = None,
    **more: Any,
) -> Line:
    """A finished job; the first `bad` clients are the malfunctioning ones."""
    line: Line = {
        "schema_version": "1",
        "suite": "made-up",
        "grid": grid,
        "task": task,
        "metric": "accuracy",
        "clients": len(finals),
        "rounds": 3,
        "seed": seed,
        "rule": rule,
        "label": label or rule,
        "rule_terms": {"name": rule, "tau": 0.6, "gamma": 0.95, "guard": True} | dict(terms or {}),
        "malfunction": malfunction,
        "malfunction_terms": (
            None if malfunction == "none" else {"kind": malfunction, "scale": scale}
        ),
        "bad": bad,
        "sites": [
            {"name": f"client-{index}", "malfunctioning": index < bad, "final": final}
            for index, final in enumerate(finals)
        ],
        "verdicts": dict(verdicts or {}),
        "update_bytes": 1_000_000,
        "seconds": 2.5,
    }
    line |= more
    identity = {key: line[key] for key in sorted(line) if key not in ("sites", "verdicts", "key")}
    line.setdefault("key", json.dumps(identity, sort_keys=True))
    return line


def verdict(malfunction: str, agreement: float | None, distance: float | None) -> Line:
    """One row of acceptance.jsonl."""
    return {
        "task": "femnist", "seed": 0, "round": 0, "malfunction": malfunction,
        "judge": "client-0", "sender": "client-1", "reason": "ok", "paper": True, "guard": True,
        "checks": {
            "agreement": agreement, "tau": 0.6, "distance": distance, "distance_max": 0.5,
        },
    }  # fmt: skip


def write(folder: Path, lines: Iterable[Mapping[str, Any]], name: str = "results.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
