"""Sites that come late, die at a chosen point, sleep, and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

from asking import DEADLINE_S, kept_by
from failpoints import GATE, START, VARIABLE
from staging import history

from lightyear_node.journal import Record
from lightyear_node.lab.federation import POLL_S, Federation, SiteHome, Status, Statuses
from lightyear_node.observe.admin import NotRunning, ask
from lightyear_node.records import PeerName

SKEW_MAX = 2
"""Rounds that sites may be apart while all of them are well."""


class Gathering(Federation):
    """A federation whose `late` sites are not there at first, and whose sites have failpoints."""

    def __init__(self, homes: Sequence[SiteHome], late: Collection[PeerName] = ()) -> None:
        super().__init__(homes, START)
        self._late = frozenset(late)

    def __enter__(self) -> Self:
        try:
            for name in self.homes:
                if name not in self._late:
                    self.start(name)
        except BaseException:
            self.stop()
            raise
        return self


class Victim:
    """The site that dies again and again, and what it had made durable each time."""

    def __init__(self, federation: Gathering, home: SiteHome) -> None:
        self.deaths: list[str] = []
        self.kept: list[dict[str, Any]] = []
        self._federation = federation
        self._home = home

    def live_until(self, failpoint: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        name = self._home.name
        with _environment(VARIABLE, failpoint):
            self._federation.start(name)
        self._federation.kill(name, signal.SIGCONT)  # it is expected to end by itself
        meanwhile()
        code = self._federation.wait_for_exit(name, DEADLINE_S)
        assert code == -signal.SIGKILL, f"it ended with {code}, and not {failpoint}"
        self._federation.check()
        self._note(failpoint)

    def kill(self) -> None:
        self._federation.kill(self._home.name)
        self._federation.wait_for_exit(self._home.name)
        self._note("killed")

    def _note(self, death: str) -> None:
        self.deaths.append(death)
        self.kept.append(kept_by(self._home))


def status_of(home: SiteHome) -> Status | None:
    """What one site says of itself: others may be frozen."""
    try:
        status: Status = ask(home.state_dir, "status")
    except NotRunning:
        return None
    return status


def wait_for(condition: Callable[[], bool]) -> float:
    """When it held."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    return time.monotonic()


def round_of(home: SiteHome) -> int:
    status = status_of(home)
    return -1 if status is None else int(status["round"])


def train_until(homes: Sequence[SiteHome], round: int) -> None:
    """These sites train this round, and none after it before they are told so."""
    for home in homes:
        gate = home.directory / GATE
        fresh = gate.with_suffix(".new")
        fresh.write_text(str(round))
        fresh.rename(gate)


def all_in_round(round: int) -> Callable[[Statuses], bool]:
    return lambda statuses: all(
        status is not None and status["round"] == round for status in statuses.values()
    )


def check_caught_up(homes: Sequence[SiteHome], name: PeerName, since: int) -> None:
    """A site that was away is where the others are with its second update since record `since`.

    The first may be of the round that it was in when it went away.  The others' rounds are those
    that they had sealed by then, as Lamport stamps tell, of which it had still to hear some.
    """
    histories = {home.name: history(home) for home in homes}
    _, second, *_ = (r for r in histories[name] if r.kind == "seal" and r.seq > since)
    lag = lag_of(second, [records for other, records in histories.items() if other != name])
    assert abs(lag) <= SKEW_MAX, f"with round {second.round} it is {lag} rounds behind"


def lag_of(seal: Record, others: Sequence[Sequence[Record]]) -> int:
    """How many rounds an update was behind the newest of the others when it was sealed."""
    sealed = [r for records in others for r in records if r.kind == "seal"]
    return max(r.round for r in sealed if r.lamport < seal.lamport) - seal.round


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
