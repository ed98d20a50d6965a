"""A federation of real nodes on this machine: laid out in folders, started, watched, stopped.

Every site is its own process with its own home, keys and ports, exactly as in a hospital; only the
addresses are loopback.  Nothing here knows what the sites learn, and nothing survives the context
manager, whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

import lightyear_node
from lightyear_node.config.agreement import (
    SITES_MAX,
    Agreement,
    BarrierTerms,
    ExchangeTerms,
    RuleTerms,
)
from lightyear_node.config.site import ENVIRONMENT_PREFIX, Malfunction, TaskEntry
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.identity import make_identity
from lightyear_node.joining import Joined
from lightyear_node.observe.admin import NotRunning, ask
from lightyear_node.peers_file import peer_of, write_agreement
from lightyear_node.records import PeerName

LOOPBACK = "127.0.0.1"
LOG_NAME = "node.log"
PEERS_NAME = "peers.yaml"
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 16 << 10

LOCAL_BARRIER = BarrierTerms(heartbeat=0.5, grace=10.0, suspect=10.0, observe=2.0)
"""For sites that share one machine: nobody is far away, but all may be busy at the same time."""

Status = dict[str, Any]
Statuses = Mapping[PeerName, Status | None]

START = (sys.executable, "-m", "lightyear_node", "start", "--peers", PEERS_NAME)
"""How a site is started in its home, as its operator would."""


class LabError(LightyearError):
    """A local federation did not do what it was started for."""


@dataclass(frozen=True, slots=True)
class SiteHome:
    """Where one site of a local federation lives."""

    name: PeerName
    directory: Path
    address: str | None
    http_address: str
    malfunction: Malfunction | None = None

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    @property
    def log(self) -> Path:
        return self.directory / LOG_NAME


def site_names(count: int) -> list[PeerName]:
    """`site-a`, `site-b`, …: in order, because a site's share of the data goes by its place."""
    if not 2 <= count <= SITES_MAX:
        raise ConfigError(f"a federation has 2 to {SITES_MAX} sites, not {count}")
    if count <= 26:
        return [PeerName(f"site-{chr(ord('a') + index)}") for index in range(count)]
    return [PeerName(f"site-{index:02d}") for index in range(1, count + 1)]


def lay_out(
    directory: Path,
    sites: Sequence[PeerName],
    *,
    federation: str = "demo",
    seed: int = 0,
    rounds: int = 20,
    rule: RuleTerms | None = None,
    barrier: BarrierTerms = LOCAL_BARRIER,
    malfunctions: Mapping[PeerName, Malfunction] | None = None,
    task: TaskEntry | None = None,
    unreachable: Collection[PeerName] = (),
    exchange: ExchangeTerms | None = None,
) -> list[SiteHome]:
    """Make a home for every site below `directory`, all with the same peers.yaml.

    The `unreachable` have no address, and open no port to the others.
    """
    malfunctions = malfunctions or {}
    ports = free_ports(2 * len(sites))
    homes, peers = [], []
    for name, port, http_port in zip(sites, ports[::2], ports[1::2], strict=True):
        home = SiteHome(
            name=name,
            directory=directory / name,
            address=None if name in unreachable else f"{LOOPBACK}:{port}",
            http_address=f"{LOOPBACK}:{http_port}",
            malfunction=malfunctions.get(name),
        )
        identity = make_identity(name, datetime.now(UTC))
        identity.save(home.directory / "keys")
        _write_yaml(home.directory / "node.yaml", _settings(home, task))
        peers.append(peer_of(Joined(identity.name, home.address, identity.certificate)))
        homes.append(home)
    agreement = Agreement(
        version=1,
        federation=federation,
        seed=seed,
        rounds=rounds,
        rule=rule or RuleTerms(),
        barrier=barrier,
        exchange=exchange or ExchangeTerms(),
        peers=tuple(peers),
    )
    for folder in (directory, *(home.directory for home in homes)):
        write_agreement(folder / PEERS_NAME, agreement)
    return homes


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until the last is found, so none comes twice."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


class Federation:
    """The running sites.  Used as a context manager, it starts all of them and leaves none."""

    def __init__(self, homes: Sequence[SiteHome], command: Sequence[str] = START) -> None:
        self.homes = {home.name: home for home in homes}
        self._command = list(command)
        self._processes: dict[PeerName, subprocess.Popen[bytes]] = {}
        self._ended_by_us: set[PeerName] = set()

    def __enter__(self) -> Self:
        try:
            for name in self.homes:
                self.start(name)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: PeerName) -> None:
        """Start a site, or start it again on the state it left; its log file goes on."""
        running = self._processes.get(name)
        if running is not None and running.poll() is None:
            raise LabError(f"{name} is running already")
        home = self.homes[name]
        with home.log.open("ab") as log:
            self._processes[name] = subprocess.Popen(
                self._command,
                cwd=home.directory,
                env=package_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal is for us; we end the sites in order.
                start_new_session=True,
            )
        self._ended_by_us.discard(name)

    def kill(self, name: PeerName, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a site's daemon; if it ends by it, that is no failure."""
        self._ended_by_us.add(name)
        self._processes[name].send_signal(number)

    def pid(self, name: PeerName) -> int:
        return self._processes[name].pid

    def wait_for_exit(self, name: PeerName, deadline_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code of a site that was told to end."""
        try:
            return self._processes[name].wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise LabError(f"{name} has not ended after {deadline_s:.0f} s") from None

    def stop(self) -> None:
        """Ask every site to end, wait, and kill what is left with all its children."""
        processes = [process for process in self._processes.values() if process.poll() is None]
        self._ended_by_us.update(self._processes)
        try:
            for process in processes:
                process.terminate()
                # A site that a test has paused could not see the request.
                process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                # The whole group: a worker whose daemon was killed may still be on its way out.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()

    def check(self) -> None:
        """Raise if a site has ended that nobody told to."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and name not in self._ended_by_us:
                raise LabError(
                    f"{name} ended with exit code {code}; the end of its log:\n"
                    + log_tail(self.homes[name].log),
                    hint=f"its whole log is {self.homes[name].log}",
                )

    def status(self) -> dict[PeerName, Status | None]:
        """What every site says of itself; None from one that does not answer (yet)."""
        return {name: self._ask(name, "status") for name in self.homes}

    def rounds(self, name: PeerName) -> list[dict[str, Any]]:
        """A site's history, from its journal."""
        answer = self._ask(name, "rounds")
        if answer is None:
            raise LabError(f"{name} does not tell its rounds")
        return list(answer)

    def wait_until(
        self,
        predicate: Callable[[Statuses], bool],
        deadline_s: float,
        watch: Callable[[Statuses], None] = lambda statuses: None,
    ) -> Statuses:
        """Ask the sites again and again until the predicate holds; `watch` sees every answer."""
        deadline = time.monotonic() + deadline_s
        while True:
            self.check()
            statuses = self.status()
            watch(statuses)
            if predicate(statuses):
                return statuses
            if time.monotonic() > deadline:
                raise LabError(
                    f"not reached within {deadline_s:.0f} s; the sites say:\n" + described(statuses)
                )
            time.sleep(POLL_S)

    def _ask(self, name: PeerName, question: str) -> Any:
        try:
            return ask(self.homes[name].state_dir, question)
        except NotRunning:
            return None


def described(statuses: Statuses) -> str:
    return "\n".join(
        f"  {name}: {status['phase']}, {status['waiting']}" if status else f"  {name}: no answer"
        for name, status in statuses.items()
    )


def log_tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:]) or "  (an empty log)"


def _settings(home: SiteHome, task: TaskEntry | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "listen": home.address,
        "state_dir": home.state_dir.name,
        "http": {"listen": home.http_address},
        # As many workers as sites share this machine's cores.
        "worker": {"threads": 1},
    }
    if task is not None:
        settings["task"] = task.model_dump(mode="json")
    if home.malfunction is not None:
        settings["malfunction"] = home.malfunction.model_dump(mode="json", exclude_none=True)
    return settings


def package_environment() -> dict[str, str]:
    """Ours, without what would override every site's own settings, and with this very package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    package_root = Path(lightyear_node.__file__).resolve().parents[1]
    if package_root.name not in ("site-packages", "dist-packages"):
        # Run from a checkout: the sites have another working directory than we do.
        kept["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(package_root), kept.get("PYTHONPATH")) if part
        )
    return kept


def _write_yaml(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False), encoding="utf-8")
