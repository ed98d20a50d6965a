"""Sites that start late, die at a failpoint, are suspended, and restart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

from lightyear_node.lab.federation import POLL_S, Federation, SiteHome, Status, Statuses
from lightyear_node.observe.admin_socket import NotRunning, ask
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from tests.support.bad_network_setup import history
from tests.support.failpoints import GATE, START, VARIABLE
from tests.support.site_queries import DEADLINE_S, durable_values

SKEW_MAX = 2
"""How many rounds healthy sites may be apart."""


class FailpointFederation(Federation):
    """A federation whose sites have failpoints, and whose `late` sites are not started at first."""

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


class KilledSite:
    """A site that is killed repeatedly, with its durable values after each kill."""

    def __init__(self, federation: FailpointFederation, home: SiteHome) -> None:
        self.deaths: list[str] = []
        self.durable: list[dict[str, Any]] = []
        self._federation = federation
        self._home = home

    def run_until(self, failpoint: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        name = self._home.name
        with _environment(VARIABLE, failpoint):
            self._federation.start(name)
        self._federation.kill(name, signal.SIGCONT)  # it is expected to exit by itself
        meanwhile()
        code = self._federation.wait_for_exit(name, DEADLINE_S)
        assert code == -signal.SIGKILL, f"exit code {code} instead of a kill {failpoint}"
        self._federation.check()
        self._note(failpoint)

    def kill(self) -> None:
        self._federation.kill(self._home.name)
        self._federation.wait_for_exit(self._home.name)
        self._note("killed")

    def _note(self, death: str) -> None:
        self.deaths.append(death)
        self.durable.append(durable_values(self._home))


def status_of(home: SiteHome) -> Status | None:
    """Ask one site only: the others may be suspended."""
    try:
        status: Status = ask(home.state_dir, "status")
    except NotRunning:
        return None
    return None if status["starting"] else status


def wait_for(condition: Callable[[], bool]) -> float:
    """Wait for the condition; return the monotonic time at which it held."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    return time.monotonic()


def round_of(home: SiteHome) -> int:
    status = status_of(home)
    return -1 if status is None else int(status["round"])


def train_until(homes: Sequence[SiteHome], round: int) -> None:
    """Let these sites train up to this round and hold them there."""
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
    """Check that a restarted site is level with the others by its second update since `since`.

    `since` is a record number.  The first update may belong to the round before the interruption.
    The others' rounds are those that they had sealed by then, ordered by the shared wall clock; the
    site may not have heard of the newest yet.
    """
    histories = {home.name: history(home) for home in homes}
    _, second, *_ = (r for r in histories[name] if r.kind == "seal" and r.seq > since)
    lag = lag_of(second, [records for other, records in histories.items() if other != name])
    assert abs(lag) <= SKEW_MAX, f"with round {second.round} it is {lag} rounds behind"


def lag_of(seal: Record, others: Sequence[Sequence[Record]]) -> int:
    """Return how many rounds an update was behind the others' newest when it was sealed."""
    sealed = [r for records in others for r in records if r.kind == "seal"]
    return max(r.round for r in sealed if r.wall_ns < seal.wall_ns) - seal.round


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
