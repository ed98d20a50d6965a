"""Errors, sorted by who must act and whether trying again is sensible.

    LightyearError                 exit 1
    ├── ConfigError                the operator, before start                        exit 78
    ├── AlreadyRunning             the operator: another node has this state         exit 75
    ├── PeerError                  a remote site or the link; never fatal
    │   ├── PeerUnreachable            trying again is sensible
    │   ├── PeerRefusedUs              the remote will not talk to us; its reason is ours to show
    │   └── PeerMisbehaved             wrong digest, too big, bad signature
    ├── WorkerError                the child process; retried, then the node stops    exit 3
    │   ├── WorkerDied                 killed, out of memory
    │   │   └── WorkerSilent               said nothing for too long, and was killed
    │   └── TaskFailed                 the user's model or data raised
    ├── StoreError                 the disk; stop before a lie is recorded            exit 4
    │   ├── JournalCorrupt
    │   └── DiskFull                   no space left; tried again until there is, never fatal
    └── BarrierMisuse              our own mistake; crash with the journal intact     exit 70

A low score is a `Verdict` and a missing peer is part of a round's outcome: neither is an error.
"""

from __future__ import annotations

from lightyear_node.records import PeerName, Reason


class LightyearError(Exception):
    """Shown to the user as one line; `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(LightyearError):
    exit_code = 78


class AlreadyRunning(LightyearError):
    exit_code = 75


class PeerError(LightyearError):
    def __init__(self, peer: PeerName, reason: Reason, message: str) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer
        self.reason = reason


class PeerUnreachable(PeerError):
    pass


class PeerRefusedUs(PeerError):
    pass


class PeerMisbehaved(PeerError):
    pass


class WorkerError(LightyearError):
    exit_code = 3
    reason = "failed"
    """Why the worker is replaced, in one word."""


class WorkerDied(WorkerError):
    reason = "died"


class WorkerSilent(WorkerDied):
    reason = "silent"


class TaskFailed(WorkerError):
    pass


class StoreError(LightyearError):
    exit_code = 4


class JournalCorrupt(StoreError):
    pass


class DiskFull(StoreError):
    """Nothing was written that counts; the same step succeeds when there is room again."""


class BarrierMisuse(LightyearError):
    exit_code = 70
