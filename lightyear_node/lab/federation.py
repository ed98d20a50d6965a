"""A federation of real nodes on this machine: creates their homes, starts, queries and stops them.

Every site is a process with its own home, keys and ports, as in a hospital, but on loopback.  The
context manager ends all processes, however it is left.
"""

from __future__ import annotations

import contextlib
import itertools
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
from lightyear_node.config.federation import (
    SITES_MAX,
    BarrierConfig,
    ExchangeConfig,
    FederationConfig,
    RuleConfig,
)
from lightyear_node.config.node import ENVIRONMENT_PREFIX, TaskConfig
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.identity.invite import Invite
from lightyear_node.identity.keys import make_identity
from lightyear_node.lab.malfunctions import FAULTY_NODE, MalfunctionConfig
from lightyear_node.observe.admin_socket import NotRunning, ask
from lightyear_node.tools.peers_file import peer_of, write_peers_file
from lightyear_node.types import PeerName

LOOPBACK = "127.0.0.1"
LOG_NAME = "node.log"
PEERS_NAME = "peers.yaml"
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
PORTS = range(20_000, 32_768)
"""Below those that a system gives to outgoing connections, which could take a port before its node
starts."""
_PORT_NUMBERS = itertools.count(os.getpid() * 7919)
"""Starts elsewhere in every process, so that federations started at once do not meet."""
LOG_TAIL_LINES = 12
LOG_TAIL_BYTES = 16 << 10

LOCAL_BARRIER = BarrierConfig(heartbeat=0.5, grace=10.0, suspect=10.0, observe=2.0)
"""For sites on one machine: no network delay, but all may be busy at the same time."""

Status = dict[str, Any]
Statuses = Mapping[PeerName, Status | None]

NODE_START = ("lightyear_node", "start")
START = (sys.executable, "-m", *NODE_START, "--peers", PEERS_NAME)
"""Starts a site in its home, as its operator would."""


class LabError(LightyearError):
    """A local federation failed."""


@dataclass(frozen=True, slots=True)
class SiteHome:
    """The folder and addresses of one site of a local federation."""

    name: PeerName
    directory: Path
    address: str | None
    http_address: str
    malfunction: MalfunctionConfig | None = None

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    @property
    def log(self) -> Path:
        return self.directory / LOG_NAME


def site_names(count: int) -> list[PeerName]:
    """Return `site-a`, `site-b`, …, sorted: a site's share of the data follows from its place."""
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
    rule: RuleConfig | None = None,
    barrier: BarrierConfig = LOCAL_BARRIER,
    malfunctions: Mapping[PeerName, MalfunctionConfig] | None = None,
    task: TaskConfig | None = None,
    unreachable: Collection[PeerName] = (),
    exchange: ExchangeConfig | None = None,
) -> list[SiteHome]:
    """Create a home for every site below `directory`, all with the same peers.yaml.

    The `unreachable` sites have no address and open no port to the others.
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
        peers.append(peer_of(Invite(identity.name, home.address, identity.certificate)))
        homes.append(home)
    config = FederationConfig(
        version=1,
        federation=federation,
        seed=seed,
        rounds=rounds,
        rule=rule or RuleConfig(),
        barrier=barrier,
        exchange=exchange or ExchangeConfig(),
        peers=tuple(peers),
    )
    for folder in (directory, *(home.directory for home in homes)):
        write_peers_file(folder / PEERS_NAME, config)
    return homes


def free_ports(count: int) -> list[int]:
    """Return free ports; none is returned again before all others were tried."""
    found: list[int] = []
    for number in itertools.islice(_PORT_NUMBERS, len(PORTS)):
        if len(found) == count:
            break
        port = PORTS[number % len(PORTS)]
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind((LOOPBACK, port))
            found.append(port)
    if len(found) < count:
        raise LabError(f"only {len(found)} of {count} ports are free from {PORTS[0]} on")
    return found


class Federation:
    """The running sites.  The context manager starts all of them, and stops them on exit."""

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
        """Start a site, or restart it on its old state; its log is appended."""
        running = self._processes.get(name)
        if running is not None and running.poll() is None:
            raise LabError(f"{name} is running already")
        home = self.homes[name]
        with home.log.open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command_of(home, self._command),
                cwd=home.directory,
                env=package_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal goes to this process only, which then stops the sites.
                start_new_session=True,
            )
        self._ended_by_us.discard(name)

    def kill(self, name: PeerName, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a site's daemon; its exit then counts as intended."""
        self._ended_by_us.add(name)
        self._processes[name].send_signal(number)

    def pid(self, name: PeerName) -> int:
        return self._processes[name].pid

    def wait_for_exit(self, name: PeerName, deadline_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for a site that was stopped; return its exit code."""
        try:
            return self._processes[name].wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise LabError(f"{name} has not ended after {deadline_s:.0f} s") from None

    def stop(self) -> None:
        """Terminate every site, wait, then kill the remaining ones with their children."""
        processes = [process for process in self._processes.values() if process.poll() is None]
        self._ended_by_us.update(self._processes)
        try:
            for process in processes:
                process.terminate()
                # A site that a test has paused cannot handle the signal.
                process.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                # The whole group: a worker whose daemon was killed may still be running.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()

    def check(self) -> None:
        """Raise if a site has ended without being stopped."""
        for name, process in self._processes.items():
            code = process.poll()
            if code is not None and name not in self._ended_by_us:
                raise LabError(
                    f"{name} ended with exit code {code}; the end of its log:\n"
                    + log_tail(self.homes[name].log),
                    hint=f"its whole log is {self.homes[name].log}",
                )

    def status(self) -> dict[PeerName, Status | None]:
        """Return every site's status; None while it does not answer or is starting."""
        answers = {name: self._ask(name, "status") for name in self.homes}
        return {
            name: None if answer is None or answer.get("starting") else answer
            for name, answer in answers.items()
        }

    def rounds(self, name: PeerName) -> list[dict[str, Any]]:
        """Return a site's history, from its journal."""
        answer = self._ask(name, "rounds")
        if answer is None:
            raise LabError(f"{name} does not answer")
        return list(answer)

    def wait_until(
        self,
        predicate: Callable[[Statuses], bool],
        deadline_s: float,
        watch: Callable[[Statuses], None] = lambda statuses: None,
    ) -> Statuses:
        """Poll the sites until the predicate holds; `watch` is called with every answer."""
        deadline = time.monotonic() + deadline_s
        while True:
            self.check()
            statuses = self.status()
            watch(statuses)
            if predicate(statuses):
                return statuses
            if time.monotonic() > deadline:
                raise LabError(
                    f"not reached within {deadline_s:.0f} s; the sites:\n" + described(statuses)
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


def command_of(home: SiteHome, command: Sequence[str]) -> list[str]:
    """`START`, alone or wrapped, with `faulty_node` in place of `lightyear-node start` if needed.

    Any other command is left unchanged.
    """
    at = next((i for i in range(len(command)) if tuple(command[i:][:2]) == NODE_START), None)
    if home.malfunction is None or at is None:
        return list(command)
    malfunction = home.malfunction.model_dump_json(exclude_none=True)
    return [*command[:at], FAULTY_NODE, "--malfunction", malfunction, *command[at + 2 :]]


def _settings(home: SiteHome, task: TaskConfig | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "listen": home.address,
        "state_dir": home.state_dir.name,
        "http": {"listen": home.http_address},
        # The workers of all sites share this machine's cores.
        "worker": {"threads": 1},
    }
    if task is not None:
        settings["task"] = task.model_dump(mode="json")
    return settings


def package_environment() -> dict[str, str]:
    """Our environment without the variables that override settings; imports this package."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    package_root = Path(lightyear_node.__file__).resolve().parents[1]
    if package_root.name not in ("site-packages", "dist-packages"):
        # A checkout is found by path: the sites have another working directory.
        kept["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(package_root), kept.get("PYTHONPATH")) if part
        )
    return kept


def _write_yaml(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(yaml.safe_dump(dict(document), sort_keys=False), encoding="utf-8")
