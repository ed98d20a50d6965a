"""A round as flat rows and named numbers, the same for every file and tracking server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lightyear_node.audit.rounds import fate_of, timestamp
from lightyear_node.storage.history import Entry

FATES = ("accepted", "rejected", "missing")
Value = str | int | float | None


def round_row(entry: Entry) -> dict[str, Value]:
    """One row for the round; metrics as `local.loss` (before the merge) and `merged.loss`."""
    counts = Counter(fate_of(verdict) for verdict in entry.get("verdicts", []))
    harm: Mapping[str, Any] = entry.get("harm") or {}
    return {
        "round": entry["round"],
        "time": timestamp(entry["time"] * 1e9),
        "closed": entry.get("cause"),
        **{name: counts[name] for name in FATES},
        "dropped": " ".join(harm.get("dropped") or []),
        "kept_local": int(bool(harm.get("kept_local"))),
        "update": (entry.get("update") or {}).get("digest"),
        "model": entry["model"],
        **{f"local.{name}": value for name, value in (entry.get("local") or {}).items()},
        **{f"merged.{name}": value for name, value in (entry.get("merged") or {}).items()},
    }


def verdict_rows(entry: Entry) -> list[dict[str, Value]]:
    """One row per peer; the rule's measurements keep their names."""
    return [
        {
            "round": entry["round"],
            "time": timestamp(entry["time"] * 1e9),
            "peer": verdict["peer"],
            "verdict": fate_of(verdict),
            "reason": str(verdict["reason"]),
            "score": verdict["score"],
            "weight": verdict["weight"],
            "update": verdict["digest"],
            **(verdict.get("checks") or {}),
        }
        for verdict in entry.get("verdicts", [])
    ]


def series(entry: Entry) -> dict[str, float]:
    """The values to plot over the rounds; TensorBoard and MLflow group names by the slash."""
    counts = Counter(fate_of(verdict) for verdict in entry.get("verdicts", []))
    values = {f"peers/{name}": float(counts[name]) for name in FATES}
    for stage in ("local", "merged"):
        for name, value in (entry.get(stage) or {}).items():
            values[f"{stage}/{name}"] = float(value)
    for verdict in entry.get("verdicts", []):
        values[f"accepted/{verdict['peer']}"] = float(bool(verdict["accepted"]))
        values[f"weight/{verdict['peer']}"] = float(verdict["weight"])
        if verdict["score"] is not None:
            values[f"score/{verdict['peer']}"] = float(verdict["score"])
    return values


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Replace values that are not finite by None: JSON has no NaN."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
