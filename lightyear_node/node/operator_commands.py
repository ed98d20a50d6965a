"""Operators' commands to a running node: pause, resume, stop, block, unblock, unquarantine.

Each becomes an event for the barrier and a record in the journal.  Must not know how a command
reaches the node.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightyear_node.errors import ConfigError, JournalCorrupt, Shortage
from lightyear_node.protocol.events import Blocked, Event, Paused, Unquarantined
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import PeerName

Request = Mapping[str, Any]
Answer = dict[str, Any]
"""`done` with a sentence, or `refused` with the reason."""


@dataclass(eq=False, repr=False)
class OperatorCommands:
    _barrier: Barrier
    _round_journal: RoundJournal
    _emit: Callable[[Event], None]
    _stop: Callable[[bool], None]

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            name: partial(_recorded_first, partial(command, self))
            for name, command in COMMANDS.items()
        }

    def _pause(self, request: Request) -> Answer:
        if self._barrier.paused:
            return _done("paused already")
        self._record("pause", request)
        self._emit(Paused(True))
        return _done("pausing: the round under way is completed, no other is begun")

    def _resume(self, request: Request) -> Answer:
        if not self._barrier.paused:
            return _done("not paused")
        self._record("resume", request)
        self._emit(Paused(False))
        return _done("going on")

    def _end(self, request: Request) -> Answer:
        now = bool(request.get("now"))
        self._record("stop", request)
        self._stop(not now)
        return _done("stopping" if now else "stopping when the round under way is completed")

    def _block(self, request: Request) -> Answer:
        peer, blocked = self._peer(request), self._round_journal.memory.blocked
        if peer in blocked:
            return _done(f"{peer} is blocked already")
        self._record("block", request)
        self._emit(Blocked(blocked | {peer}))
        return _done(f"{peer} is blocked: nothing of it is merged, nothing is sent to it")

    def _unblock(self, request: Request) -> Answer:
        peer, blocked = self._peer(request), self._round_journal.memory.blocked
        if peer not in blocked:
            return _done(f"{peer} is not blocked")
        self._record("unblock", request)
        self._emit(Blocked(blocked - {peer}))
        return _done(f"{peer} is no longer blocked")

    def _unquarantine(self, request: Request) -> Answer:
        peer = self._peer(request)
        if peer not in self._round_journal.memory.quarantined:
            return _done(f"{peer} is not in quarantine")
        self._record("unquarantine", request)
        self._emit(Unquarantined(peer))
        return _done(f"{peer} is out of quarantine; the proofs stay in the record")

    def _peer(self, request: Request) -> PeerName:
        name, known = str(request.get("peer", "")), sorted(self._barrier.parameters.peers)
        if name in known:
            return PeerName(name)
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
        raise ConfigError(f"there is no peer {name!r} here", hint=hint)

    def _record(self, command: str, request: Request) -> None:
        about = {key: value for key, value in request.items() if key in ("peer", "now", "user")}
        self._round_journal.operator(command, about)


COMMANDS: Mapping[str, Callable[[OperatorCommands, Request], Answer]] = {
    "pause": OperatorCommands._pause,
    "resume": OperatorCommands._resume,
    "stop": OperatorCommands._end,
    "block": OperatorCommands._block,
    "unblock": OperatorCommands._unblock,
    "unquarantine": OperatorCommands._unquarantine,
}


def _recorded_first(command: Callable[[Request], Answer], request: Request) -> Answer:
    """Execute a command only if it can be recorded first."""
    try:
        return command(request)
    except ConfigError as problem:
        return {"refused": str(problem), "hint": problem.hint}
    except Shortage as problem:
        return {"refused": f"not recorded, and so not done: {problem}", "hint": "make room first"}
    except JournalCorrupt as problem:
        hint = f"end the node with SIGTERM; {problem.hint}"
        return {"refused": f"not recorded, and so not done: {problem}", "hint": hint}


def _done(words: str) -> Answer:
    return {"done": words}
