"""What the node's page is told: the status and the rounds in words, and nothing else.

No keys, no signatures, no process numbers; no paths in what the log says, because they may be those
of patients' files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightyear_node.audit.reasons import guard_lines, words
from lightyear_node.audit.rounds import (
    RoundEntry,
    explained,
    fate_of,
    merge_words,
    rounds_of,
    timestamp,
)
from lightyear_node.errors import ConfigError
from lightyear_node.journal import reading

Plain = Mapping[str, Any]
_PRIVATE = ("worker_pid",)
_PATH = re.compile(
    r"""(?P<quote>['"`])(?:~?/|\.{1,2}/|[A-Za-z]:\\).*?(?P=quote)"""  # quoted: with spaces
    r"""|(?<![\w:/.])(?:~|\.{1,2})?(?:/[^\s/'"`,;:]+){2,}/?"""
    r"""|(?<!\w)[A-Za-z]:\\[^\s'"`,;]+"""
)


def status_told(status: Plain) -> dict[str, Any]:
    """With the last verdict's reason in words for each peer."""
    told = {key: value for key, value in status.items() if key not in _PRIVATE}
    told["peers"] = [_with_words(peer) for peer in status["peers"]]
    return told


def _with_words(peer: Plain) -> dict[str, Any]:
    said = words(peer["reason"]) if peer["reason"] else None
    return {
        **peer,
        "reason_about": said.about if said else None,
        "reason_advice": said.advice if said else None,
    }


def event_told(event: Plain) -> dict[str, Any]:
    return {**event, "message": without_paths(str(event["message"]))}


def without_paths(text: str) -> str:
    return _PATH.sub("[a path]", text)


def round_in_short(entry: Plain) -> dict[str, Any]:
    """One completed round for lists and charts."""
    verdicts = entry.get("verdicts", [])
    counts = Counter(fate_of(verdict) for verdict in verdicts)
    harm = entry.get("harm") or {}
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
    """What was measured of a rejected update and did not hold."""
    if fate_of(verdict) != "rejected":
        return []
    lines = guard_lines(verdict.get("checks") or {})
    return [
        {"name": line.name, "value": line.value, "limit": line.limit, "at_most": line.at_most}
        for line in lines
        if line.holds is False
    ]


def round_told(journal: Path, number: int) -> dict[str, Any]:
    """Everything about one round, from the record."""
    entry = _recorded(journal, number)
    told = entry.to_plain()
    del told["heads"]
    told["others"] = [{"seq": other["seq"], "kind": other["kind"]} for other in entry.others]
    return told | {"merge": merge_words(entry)}


def peer_told(journal: Path, number: int, peer: str) -> dict[str, Any]:
    """Why a peer's update was used in a round, or was not: what `explain` prints."""
    return explained(_recorded(journal, number), peer)


def _recorded(journal: Path, number: int) -> RoundEntry:
    with reading(journal) as copy:
        found = rounds_of(copy.rows(round=number)).get(number)
    if found is None:
        raise ConfigError(
            f"there is no round {number} in this site's record",
            hint="it is still to come, or was left out because the others were ahead",
        )
    return found
