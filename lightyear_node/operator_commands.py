"""What an operator may tell a running node: pause, resume, stop, block, unblock, unquarantine.

Each becomes an event for the barrier and a record in the journal.  Must not know how a command
reaches the node: the admin socket brings it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightyear_node.barrier import Barrier, Blocked, Event, Pardoned, Paused
from lightyear_node.errors import DiskFull
from lightyear_node.ledger import Ledger
from lightyear_node.records import PeerName

Request = Mapping[str, Any]
Answer = dict[str, Any]
"""`done` in words, or `refused` with the reason."""


class Operator:
    def __init__(
        self,
        barrier: Barrier,
        ledger: Ledger,
        tell: Callable[[Event], None],
        stop: Callable[[bool], None],
    ) -> None:
        self._barrier = barrier
        self._ledger = ledger
        self._tell = tell
        self._stop = stop

    def routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        commands = {
            "pause": self._pause,
            "resume": self._resume,
            "stop": self._end,
            "block": self._block,
            "unblock": self._unblock,
            "unquarantine": self._unquarantine,
        }
        return {name: partial(_while_there_is_room, command) for name, command in commands.items()}

    def _pause(self, request: Request) -> Answer:
        if self._barrier.paused:
            return _done("paused already")
        self._record("pause", request)
        self._tell(Paused(True))
        return _done("pausing: the round under way is completed, no other is begun")

    def _resume(self, request: Request) -> Answer:
        if not self._barrier.paused:
            return _done("not paused")
        self._record("resume", request)
        self._tell(Paused(False))
        return _done("going on")

    def _end(self, request: Request) -> Answer:
        now = bool(request.get("now"))
        self._record("stop", request)
        self._stop(not now)
        return _done("stopping" if now else "stopping when the round under way is completed")

    def _block(self, request: Request) -> Answer:
        peer, blocked = self._peer(request), self._ledger.memory.blocked
        if isinstance(peer, dict):
            return peer
        if peer in blocked:
            return _done(f"{peer} is blocked already")
        self._record("block", request)
        self._tell(Blocked(blocked | {peer}))
        return _done(f"{peer} is blocked: nothing of it is merged, nothing is sent to it")

    def _unblock(self, request: Request) -> Answer:
        peer, blocked = self._peer(request), self._ledger.memory.blocked
        if isinstance(peer, dict):
            return peer
        if peer not in blocked:
            return _done(f"{peer} is not blocked")
        self._record("unblock", request)
        self._tell(Blocked(blocked - {peer}))
        return _done(f"{peer} is no longer blocked")

    def _unquarantine(self, request: Request) -> Answer:
        peer = self._peer(request)
        if isinstance(peer, dict):
            return peer
        if peer not in self._ledger.memory.quarantined:
            return _done(f"{peer} is not in quarantine")
        self._record("unquarantine", request)
        self._tell(Pardoned(peer))
        return _done(f"{peer} is out of quarantine; the proofs stay in the record")

    def _peer(self, request: Request) -> PeerName | Answer:
        name, known = str(request.get("peer", "")), sorted(self._barrier.terms.peers)
        if name in known:
            return PeerName(name)
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
        return {"refused": f"there is no peer {name!r} here", "hint": hint}

    def _record(self, command: str, request: Request) -> None:
        about = {key: value for key, value in request.items() if key in ("peer", "now", "user")}
        self._ledger.operator(command, about)


def _while_there_is_room(command: Callable[[Request], Answer], request: Request) -> Answer:
    """Nothing is done that could not be recorded first."""
    try:
        return command(request)
    except DiskFull as problem:
        return {"refused": f"not recorded, and so not done: {problem}", "hint": "make room first"}


def _done(words: str) -> Answer:
    return {"done": words}
