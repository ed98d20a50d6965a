"""The error tree, ordered by who must act and whether a retry makes sense.

    LightyearError                 exit 1
    ├── ConfigError                the operator, before start                        exit 78
    ├── AlreadyRunning             the operator: another node has this state         exit 75
    ├── PeerError                  a remote site or the link; never fatal
    │   ├── PeerUnreachable            retried
    │   ├── PeerRefusedUs              the remote refuses us; its reason is shown
    │   └── PeerMisbehaved             wrong digest, too big, bad signature
    ├── WorkerError                the child process; retried.  At the start: the node stops, exit 3
    │   ├── WorkerDied                 killed, out of memory
    │   │   └── WorkerSilent               sent nothing for too long, and was killed
    │   └── TaskFailed                 the user's model or data raised
    │       └── InvalidTask                they cannot be used; found by our own checks
    ├── StoreError                 the disk; stop before wrong data is recorded       exit 4
    │   ├── JournalCorrupt
    │   └── Shortage                   retried until it is over; never fatal
    │       ├── DiskFull                   no space left
    │       └── TooManyFiles               no file descriptors left
    └── BarrierMisuse              our own mistake; crash with the journal intact     exit 70

A low score is a `Verdict` and a missing peer is part of a round's outcome: neither is an error.

The text of every error in this tree is our own and is logged.  Text from the user's code or data
goes into `private`: it may name a patient, and a node does not log it.
"""

from __future__ import annotations

from lightyear_node.types import PeerName, Reason


class LightyearError(Exception):
    """Shown to the user as one line; `hint` says what to do about it.

    `private` is appended on a terminal, and omitted from a node's log.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, hint: str | None = None, private: str | None = None
    ) -> None:
        super().__init__(message if private is None else f"{message}: {private}")
        self.hint = hint
        self.public = message
        self.private = private


class ConfigError(LightyearError):
    exit_code = 78


class AlreadyRunning(LightyearError):
    exit_code = 75


class PeerError(LightyearError):
    """`about` is the message without the name of the peer.

    `message_for_peer` states the same fact for the operator of the peer.
    """

    def __init__(
        self, peer: PeerName, reason: Reason, message: str, *, message_for_peer: str | None = None
    ) -> None:
        super().__init__(f"{peer}: {message}")
        self.peer = peer
        self.reason = reason
        self.about = message
        self.message_for_peer = message_for_peer or message


class PeerUnreachable(PeerError):
    pass


class PeerRefusedUs(PeerError):
    pass


class PeerMisbehaved(PeerError):
    pass


class WorkerError(LightyearError):
    exit_code = 3
    reason = "failed"
    """Why the worker is replaced; a metric label."""


class WorkerDied(WorkerError):
    reason = "died"


class WorkerSilent(WorkerDied):
    reason = "silent"


class TaskFailed(WorkerError):
    pass


class InvalidTask(TaskFailed, ValueError):
    """The task's model or data cannot be trained or judged here."""


class StoreError(LightyearError):
    exit_code = 4


class JournalCorrupt(StoreError):
    pass


class DamagedFile(StoreError):
    """A stored file is missing, or its content no longer matches its digest."""


class Shortage(StoreError):
    """A resource is used up; nothing was changed, and a retry succeeds when there is more."""


class DiskFull(Shortage):
    """No space left on the disk."""


class TooManyFiles(Shortage):
    """No file descriptors left, in this process or on the machine."""


class BarrierMisuse(LightyearError):
    exit_code = 70
