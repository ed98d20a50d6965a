"""The completed rounds, newest last, for whoever shows or follows them.

Made from the journal's records: read again at a start, and one by one as they are written.  Read
from several threads; what is listed is never changed afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

ROUNDS_MAX = 2000
"""Older rounds are in the journal only."""

Entry = dict[str, Any]


class History:
    def __init__(self) -> None:
        self.followers: list[Callable[[Entry], None]] = []
        """Called with each round that is completed from now on."""
        self._under_way: dict[int, Entry] = {}
        self._completed: deque[Entry] = deque(maxlen=ROUNDS_MAX)

    def add(self, kind: str, round: int, body: Mapping[str, Any], wall_ns: int) -> None:
        """One record, in the order of the journal."""
        if kind == "seal":
            entry = {"round": round, "update": body["update"], "local": body["metrics"]}
            self._under_way = {round: entry}
        elif kind == "decision":
            self._under_way.setdefault(round, {"round": round}).update(
                cause=body["cause"], why=body["why"], verdicts=body["verdicts"]
            )
        elif kind == "commit":
            entry = self._under_way.pop(round, {"round": round})
            entry.update(model=body["model"], merged=body["metrics"], time=wall_ns / 1e9)
            if "harm" in body:
                entry.update(harm=body["harm"])
            self._keep(entry)
            for follow in self.followers:
                follow(entry)

    def _keep(self, entry: Entry) -> None:
        # A site that had to begin again may do a round twice: the second time counts.
        if self._completed and self._completed[-1]["round"] >= entry["round"]:
            others = [one for one in self._completed if one["round"] != entry["round"]]
            self._completed = deque(others, ROUNDS_MAX)
        self._completed.append(entry)

    def rounds(self) -> list[Entry]:
        return list(self._completed)
