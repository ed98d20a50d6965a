"""Checks before a node starts: this site's configuration, and the connections to its peers.

Every check results in one line with advice.  Nothing is changed: the model is built in a temporary
folder, the journal is only read, and peers get a greeting that does not change their state.  A node
may be running here meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from lightyear_node.errors import LightyearError, PeerError, PeerUnreachable
from lightyear_node.node.gossip import PROTOCOL_VERSION
from lightyear_node.node.home import Home
from lightyear_node.node.local_api import http_keys
from lightyear_node.node.worker_jobs import OpenedModel, WorkerJobs
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.observe.admin_socket import NotRunning, ask
from lightyear_node.observe.http.auth import HttpAccess
from lightyear_node.storage.disk_space import (
    SpaceNeeds,
    check_quota,
    default_reserve,
    size_text,
    used_bytes,
)
from lightyear_node.storage.journal_reader import peek
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.tools.connectivity_probe import ProbeTarget
from lightyear_node.tools.diagnosis import (
    EXPIRY_WARNING,
    UNKNOWN_DIGEST,
    Diagnosis,
    LocalSummary,
    diagnose,
    without_address,
)
from lightyear_node.transport import limits
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.types import Check, Digest, Hello, Mark, PeerName, Reason, Round, SignedHead
from lightyear_node.worker.job_types import ExchangeSummary

NAMES_SHOWN = 8
SPARE_BYTES = 1 << 30
"""For logs and other programs, in addition to what the node writes."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What is known of our model, to compare it with those of the peers."""

    schema: Digest = UNKNOWN_DIGEST
    initial_model: Digest = UNKNOWN_DIGEST
    raw_bytes: int | None = None
    exchange: ExchangeSummary | None = None
    """Known only if the model was built now."""


def failed(name: str, problem: LightyearError) -> Check:
    return Check(name, Mark.BROKEN, str(problem), problem.hint or "")


def settings_checks(home: Home, now: datetime) -> Iterator[Check]:
    """Check what `load_home` has accepted."""
    config = home.federation
    try:
        home.parameters()
    except LightyearError as problem:
        yield failed("settings", problem)
    else:
        about = f"{home.us} of {config.federation}, {len(config.peers)} sites,"
        about += f" rule {home.rule.name}, peers.yaml {config.digest()[:12]}"
        yield Check("settings", Mark.HOLDS, about)
    yield _keys(home)
    yield _certificate(home, now)


def _keys(home: Home) -> Check:
    """`load_home` refuses key files that others can read; a writable folder is as bad."""
    folder = home.directory / home.config.keys_dir
    mode = folder.stat().st_mode & 0o777
    if mode & 0o022:
        return Check(
            "keys",
            Mark.DIFFERS,
            f"others can put files into {folder} (mode {mode:04o})",
            f"chmod 700 {folder}",
        )
    return Check("keys", Mark.HOLDS, f"private, {home.identity.fingerprint}")


def _certificate(home: Home, now: datetime) -> Check:
    ends = home.identity.certificate.expires
    about = f"{(ends - now).days} days left, until {ends:%Y-%m-%d}"
    if ends - now < EXPIRY_WARNING:
        advice = "renew it now, and have every site pin the new one before that day"
        return Check("certificate", Mark.DIFFERS, about, advice)
    return Check("certificate", Mark.HOLDS, about)


async def model_checks(home: Home) -> tuple[list[Check], LocalModel | None]:
    """Build the model as the node will, in a separate worker and a temporary folder.

    Then take one step of training, and measure one batch with every metric.
    """
    worker = WorkerProcess(
        home.opening(),
        silence_s=home.config.worker.silence,
        full_errors=True,  # they go to the operator's terminal, not to a log
        memory_max=home.config.worker.memory_max,
    )
    with tempfile.TemporaryDirectory(prefix="lightyear-check-") as folder:
        state = StateDirectory(Path(folder))
        jobs = WorkerJobs(worker, state, on_death=lambda reason, why: None)
        try:
            model = await jobs.open()
            tried, exchange = await _rehearsed(jobs)
        except LightyearError as problem:
            return [failed("model", problem)], None
        finally:
            await worker.stop()
            state.close()
    ours = LocalModel(model.schema, model.initial.digest, model.initial.raw_bytes, exchange)
    checks = [Check("device", Mark.HOLDS, model.opened.device), _built(home, model)]
    if exchange is not None:
        checks.append(_exchanged(exchange))
    return [*checks, *tried], ours


async def _rehearsed(jobs: WorkerJobs) -> tuple[list[Check], ExchangeSummary | None]:
    try:
        return await jobs.rehearse()
    except LightyearError as problem:  # the model is known nevertheless
        advice = "run the task's training and metrics on one batch by themselves"
        return [Check("training", Mark.BROKEN, str(problem), problem.hint or advice)], None


def _exchanged(exchange: ExchangeSummary) -> Check:
    about = f"{exchange.tensors} tensors, {size_text(exchange.bytes)} in each update"
    if not exchange.local_tensors:
        return Check("exchange", Mark.HOLDS, f"{about}; no tensor stays here")
    names = ", ".join(exchange.local[:NAMES_SHOWN])
    more = ", …" if exchange.local_tensors > NAMES_SHOWN else ""
    return Check(
        "exchange", Mark.HOLDS, f"{about}; {exchange.local_tensors} stay here: {names}{more}"
    )


def _built(home: Home, model: OpenedModel) -> Check:
    opened = model.opened
    about = (
        f"{home.config.task.name}: {opened.parameters:,} parameters,"
        f" {size_text(model.initial.raw_bytes)}, {opened.train_samples} training and"
        f" {opened.val_samples} validation samples"
    )
    threshold = home.rule.threshold
    if threshold is not None and opened.floor > threshold:
        return Check(
            "model",
            Mark.DIFFERS,
            f"{about}, so few that even unrelated models can agree to {opened.floor:.2f}",
            "use more validation data",
        )
    return Check("model", Mark.HOLDS, about)


def remembered_model(home: Home) -> LocalModel:
    """The model of the node that ran here, from its journal; raises if that is damaged."""
    memory, start = peek(_state_dir(home) / "journal.db")
    return LocalModel(
        schema=memory.get("schema", UNKNOWN_DIGEST),
        initial_model=start.get("initial_model", UNKNOWN_DIGEST),
        raw_bytes=(memory.get("work") or {}).get("raw_bytes"),
    )


def state_checks(home: Home, model: LocalModel | None) -> Iterator[Check]:
    """Check the state directory and its disk; `model` is the one built now, if any."""
    folder = _state_dir(home)
    try:
        recorded = remembered_model(home)
    except LightyearError as problem:
        yield failed("state", problem)
        return
    if model and recorded.schema not in (UNKNOWN_DIGEST, model.schema):
        yield Check(
            "state",
            Mark.BROKEN,
            f"{folder} was created by a model with other tensors",
            "use the task that it was created with, or set another `state_dir`",
        )
    else:
        yield _writable(folder)
    yield _disk(home, folder, (model or recorded).raw_bytes)


def _writable(folder: Path) -> Check:
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as problem:
        return Check(
            "state",
            Mark.BROKEN,
            f"{existing} cannot be written: {problem.strerror}",
            "check its owner and mode, and whether the disk is mounted read-only",
        )
    new = "" if existing == folder else ", will be created"
    return Check("state", Mark.HOLDS, f"{folder}{new}")


def _disk(home: Home, folder: Path, model_bytes: int | None) -> Check:
    """Compare the free space with what rounds will write, the reserve, and some spare space."""
    disk, size = home.config.disk, model_bytes or 0
    needs = SpaceNeeds(
        model=size,
        update=size,
        # Most optimizers keep one or two numbers for every weight.
        carry=2 * size,
        peers=len(home.others),
        models_kept=home.config.keep.models,
    )
    try:
        check_quota(disk.quota, replace(needs, carry=0))
    except LightyearError as problem:
        return failed("disk", problem)
    free = shutil.disk_usage(_existing(folder)).free
    reserve = default_reserve(size) if disk.reserve is None else disk.reserve
    copies = limits.ENCODED_UPLOADS_KEPT * size
    needed = max(0, needs.total + copies - used_bytes(folder)) + reserve
    about = f"{size_text(free)} free, {size_text(needed)} needed"
    about += f" of which {size_text(reserve)} are to stay free"
    if model_bytes is None:
        about += ", and more for the model, whose size is not known here"
    advice = f"free some space for {folder}, or move `state_dir`"
    if free < needed:
        return Check("disk", Mark.BROKEN, about, advice)
    if free < needed + SPARE_BYTES:
        return Check("disk", Mark.DIFFERS, f"{about}: little to spare", advice)
    return Check("disk", Mark.HOLDS, about)


def port_checks(home: Home) -> Iterator[Check]:
    ours = _our_node(home)
    if home.others and home.listen is None:
        yield Check("listen", Mark.HOLDS, "this site has no address: it dials all the others")
    elif home.others and home.listen is not None:
        yield _port("listen", home.listen, ours)
    else:
        yield Check("listen", Mark.HOLDS, "this site trains alone and opens no port")
    if home.config.http.listen:
        yield _http(home, ours)


def _http(home: Home, ours: str | None) -> Check:
    listen = home.config.http.listen
    try:
        warning = HttpAccess(listen, http_keys(home)).warning
    except LightyearError as problem:
        return failed("http", problem)
    check = _port("http", listen, ours)
    if check.mark is Mark.HOLDS and warning is not None:
        return Check("http", Mark.DIFFERS, warning, "see docs/monitoring.md")
    return check


def _our_node(home: Home) -> str | None:
    """A description of the node that runs in this folder; None if there is none."""
    try:
        status = ask(_state_dir(home), "status")
    except (NotRunning, OSError):
        return None
    if status["name"] != home.us:
        return None
    return "our own node, which is starting" if status.get("starting") else "our own running node"


def _port(name: str, address: str, ours: str | None) -> Check:
    """Whether a node can listen there; `ours` describes our own node, if it is running."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            pass
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE and ours is not None:
            return Check(name, Mark.HOLDS, f"{address}, in use by {ours}")
        advice = {
            errno.EADDRINUSE: "stop the other program, or set another port in node.yaml",
            errno.EACCES: "ports below 1024 are reserved: set another one in node.yaml",
        }.get(problem.errno or 0, f"set `listen: 0.0.0.0:{port}` in node.yaml")
        cause = os.strerror(problem.errno) if problem.errno else str(problem)
        return Check(name, Mark.BROKEN, f"cannot listen on {address}: {cause}", advice)
    return Check(name, Mark.HOLDS, f"{address} is free")


async def check_peers(
    home: Home,
    peers: Sequence[PeerName],
    model: LocalModel,
    *,
    now: datetime,
    timeout_s: float,
    on_result: Callable[[Diagnosis], None],
) -> list[Diagnosis]:
    """Check all peers concurrently; `on_result` is called as soon as each is done."""
    hello = _greeting(home, model)
    ours = LocalSummary(hello, home.identity, time.time_ns, now, timeout_s)
    addresses = {peer.name: peer.address for peer in home.federation.peers}

    async def check_one(peer: PeerName) -> Diagnosis:
        address = addresses[peer]
        if address is None:
            diagnosis = without_address(peer)
        else:
            keys_dir = home.directory / home.config.keys_dir
            target = ProbeTarget(peer, address, home.certificates[peer], keys_dir)
            diagnosis = await diagnose(target, ours)
        on_result(diagnosis)
        return diagnosis

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(check_one(peer)) for peer in peers]
    return [task.result() for task in tasks]


async def fetch_heads(
    home: Home, peers: Sequence[PeerName], model: LocalModel, *, timeout_s: float
) -> dict[PeerName, SignedHead | PeerError | None]:
    """The newest head of our journal that each peer holds; their state does not change.

    None for a peer that holds none, an error for one that did not answer.
    """
    addresses = {peer.name: peer.address for peer in home.federation.peers}
    greeting = _greeting(home, model)

    async def fetch_one(peer: PeerName) -> SignedHead | PeerError | None:
        address = addresses[peer]
        if address is None:
            about = "it has no address, and cannot be asked from here"
            return PeerUnreachable(peer, Reason.UNREACHABLE, about)
        client = PeerClient(
            peer, DirectChannel(peer, address, home.certificates[peer], home.identity)
        )
        try:
            async with asyncio.timeout(timeout_s):
                return (await client.hello(greeting)).your_head
        except TimeoutError:
            about = f"no answer within {timeout_s:g} s"
            return PeerUnreachable(peer, Reason.TIMEOUT, about)
        except PeerError as problem:
            return problem
        finally:
            await client.close()

    async with asyncio.TaskGroup() as group:
        tasks = {peer: group.create_task(fetch_one(peer)) for peer in peers}
    return {peer: task.result() for peer, task in tasks.items()}


def _greeting(home: Home, model: LocalModel) -> Hello:
    """A greeting that does not change the peer's state."""
    return Hello(
        version_min=PROTOCOL_VERSION,
        version_max=PROTOCOL_VERSION,
        federation=home.federation.federation,
        agreement=home.federation.digest(),
        schema=model.schema,
        initial_model=model.initial_model,
        round=Round(0),
        boot_id="check",
        wall_time_ns=time.time_ns(),
        lamport=0,
        probe=True,
    )


def _state_dir(home: Home) -> Path:
    return home.directory / home.config.state_dir


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
