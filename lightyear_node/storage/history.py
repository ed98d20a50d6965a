"""The completed rounds, newest last, for status and tracking.

Built from the journal's records at start and as they are written.  Entries are read from several
threads and never change after they were added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

ROUNDS_MAX = 2000
"""Older rounds are only in the journal."""

Entry = dict[str, Any]


class History:
    def __init__(self) -> None:
        self.followers: list[Callable[[Entry], None]] = []
        """Called with each completed round."""
        self._in_progress: dict[int, Entry] = {}
        self._completed: deque[Entry] = deque(maxlen=ROUNDS_MAX)

    def add(self, kind: str, round: int, body: Mapping[str, Any], wall_ns: int) -> None:
        """Add one record, in the order of the journal."""
        if kind == "seal":
            entry = {"round": round, "update": body["update"], "local": body["metrics"]}
            self._in_progress = {round: entry}
        elif kind == "decision":
            self._in_progress.setdefault(round, {"round": round}).update(
                cause=body["cause"], why=body["why"], verdicts=_with_details(body)
            )
        elif kind == "commit":
            entry = self._in_progress.pop(round, {"round": round})
            entry.update(model=body["model"], merged=body["metrics"], time=wall_ns / 1e9)
            entry.update({key: body[key] for key in ("harm", "left_out", "worth") if key in body})
            self._keep(entry)
            for follow in self.followers:
                follow(entry)

    def _keep(self, entry: Entry) -> None:
        # A site that lost its state may repeat a round: the later one counts.
        if self._completed and self._completed[-1]["round"] >= entry["round"]:
            others = [one for one in self._completed if one["round"] != entry["round"]]
            self._completed = deque(others, ROUNDS_MAX)
        self._completed.append(entry)

    def rounds(self) -> list[Entry]:
        return list(self._completed)


def _with_details(decision: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The verdicts of a record, which has their details beside them."""
    details = decision.get("details") or {}
    return [
        {**verdict, "details": details[verdict["peer"]]} if verdict["peer"] in details else verdict
        for verdict in decision["verdicts"]
    ]
