"""What the dashboard shows of the status, the rounds and the log.

Leaves out keys, signatures and process ids, and replaces paths in log messages, which may name
patients' files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightyear_node.audit.reasons import guard_lines, reason_text
from lightyear_node.audit.rounds import (
    RoundEntry,
    explain_verdict,
    fate_of,
    merge_text,
    rounds_of,
    timestamp,
)
from lightyear_node.errors import ConfigError
from lightyear_node.storage.journal_reader import reading

Plain = Mapping[str, Any]
_PRIVATE = ("worker_pid",)
_PATH = re.compile(
    r"""(?P<quote>['"`])(?:~?/|\.{1,2}/|[A-Za-z]:\\).*?(?P=quote)"""  # quoted: may contain spaces
    r"""|(?<![\w:/.])(?:~|\.{1,2})?(?:/[^\s/'"`,;:]+){2,}/?"""
    r"""|(?<!\w)[A-Za-z]:\\[^\s'"`,;]+"""
)


def status_view(status: Plain) -> dict[str, Any]:
    """Return the status with an explanation of each peer's last verdict."""
    shown = {key: value for key, value in status.items() if key not in _PRIVATE}
    shown["peers"] = [_with_explanation(peer) for peer in status["peers"]]
    return shown


def _with_explanation(peer: Plain) -> dict[str, Any]:
    text = reason_text(peer["reason"], peer.get("details") or {}) if peer["reason"] else None
    return {
        **peer,
        "reason_about": text.about if text else None,
        "reason_advice": text.advice if text else None,
    }


def event_view(event: Plain) -> dict[str, Any]:
    return {**event, "message": without_paths(str(event["message"]))}


def without_paths(text: str) -> str:
    return _PATH.sub("[a path]", text)


def round_summary(entry: Plain) -> dict[str, Any]:
    """Summarize one completed round for lists and charts."""
    verdicts = entry.get("verdicts", [])
    counts = Counter(fate_of(verdict) for verdict in verdicts)
    harm, worth = entry.get("harm") or {}, entry.get("worth") or {}
    thresholds = [(verdict.get("checks") or {}).get("tau") for verdict in verdicts]
    return {
        "round": entry["round"],
        "time": timestamp(entry["time"] * 1e9),
        "cause": entry.get("cause"),
        "accepted": counts["accepted"],
        "rejected": counts["rejected"],
        "missing": counts["missing"],
        "before": entry.get("local", {}),
        "after": entry["merged"],
        "model": entry["model"],
        "threshold": next((one for one in thresholds if one is not None), None),
        "dropped": list(harm.get("dropped") or []),
        "kept_local": bool(harm.get("kept_local")),
        "alone": worth.get("alone") or {},
        "served": worth.get("served"),
        "verdicts": [
            {
                "peer": verdict["peer"],
                "fate": fate_of(verdict),
                "reason": verdict["reason"],
                "score": verdict["score"],
                "failed": _failed(verdict),
            }
            for verdict in verdicts
        ],
    }


def _failed(verdict: Plain) -> list[dict[str, Any]]:
    """The checks that a rejected update has failed."""
    if fate_of(verdict) != "rejected":
        return []
    lines = guard_lines(verdict.get("checks") or {})
    return [
        {"name": line.name, "value": line.value, "limit": line.limit, "at_most": line.at_most}
        for line in lines
        if line.holds is False
    ]


def round_view(journal: Path, number: int) -> dict[str, Any]:
    """Return one round with all its verdicts, from the journal."""
    entry = _recorded(journal, number)
    shown = entry.to_plain()
    del shown["heads"]
    shown["others"] = [{"seq": other["seq"], "kind": other["kind"]} for other in entry.others]
    return shown | {"merge": merge_text(entry)}


def peer_view(journal: Path, number: int, peer: str) -> dict[str, Any]:
    """Explain the verdict on one peer's update in one round, as `explain` prints it."""
    return explain_verdict(_recorded(journal, number), peer)


def _recorded(journal: Path, number: int) -> RoundEntry:
    with reading(journal) as copy:
        found = rounds_of(copy.rows(round=number)).get(number)
    if found is None:
        raise ConfigError(
            f"there is no round {number} in this site's journal",
            hint="it has not begun, or this site skipped it because the others were ahead",
        )
    return found
