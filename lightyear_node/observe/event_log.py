"""Writes the node's events to the log, each with the current round and phase."""

from __future__ import annotations

import logging
from collections.abc import Container

from lightyear_node.observe.log_limits import LogLimits
from lightyear_node.types import PeerName


class EventLog:
    def __init__(self, logger: logging.Logger, limits: LogLimits) -> None:
        self._logger = logger
        self._limits = limits
        self.round = 0
        self.phase = "starting"

    def write(
        self,
        level: int,
        event: str,
        text: str,
        *args: object,
        peer: PeerName | None = None,
        kind: str = "",
    ) -> None:
        """Log one line, with fields for programs.

        `peer` is the peer that may have caused it; its lines are limited per event and `kind`.
        """
        fields = {"event": event, "round": self.round, "phase": self.phase, "peer": peer}
        self._logger.log(level, text, *args, extra={**fields, "kind": kind})

    def report_suppressed(self, peers: Container[str]) -> None:
        """Log how many lines were suppressed in each hour that has ended; call often."""
        for source, lines in self._limits.ended_hours():
            text = "%d further messages about %s suppressed in the last hour"
            peer = PeerName(source) if source in peers else None
            self.write(logging.WARNING, "suppressed", text, lines, source, peer=peer)
