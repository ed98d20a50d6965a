"""What can be found out before a node starts: is this site ready, and are the others?

Every check is one line that an operator can act on.  Nothing here changes anything: the model is
built in a temporary folder, the journal is only read, and peers are asked with a greeting that
they answer and forget.  A node may be running here meanwhile.
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

from lightyear_node.conversation import PROTOCOL_VERSION
from lightyear_node.errors import LightyearError, PeerError, PeerUnreachable
from lightyear_node.home import Home, State
from lightyear_node.journal import peek
from lightyear_node.learner import Learner, OpenedModel
from lightyear_node.observe.access import Access
from lightyear_node.observe.admin import NotRunning, ask
from lightyear_node.records import Check, Digest, Hello, Mark, PeerName, Reason, Round, SignedHead
from lightyear_node.reporting import http_keys
from lightyear_node.space import Needs, check_quota, default_reserve, size_text, used_bytes
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.diagnose import (
    EXPIRY_WARNING,
    UNKNOWN_DIGEST,
    Diagnosis,
    Question,
    cannot_be_asked,
    diagnose,
)
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.look import Door
from lightyear_node.worker.handle import Worker

ENCODED_COPIES = 3
"""Of our updates, as they cross the wire; they are files without a name."""
SPARE_BYTES = 1 << 30
"""Beside what the node writes: logs, and whatever the rest of the machine does."""


@dataclass(frozen=True, slots=True)
class OurModel:
    """What is known here of the model, to be compared with the peers'."""

    schema: Digest = UNKNOWN_DIGEST
    initial_model: Digest = UNKNOWN_DIGEST
    raw_bytes: int | None = None


def failed(name: str, problem: LightyearError) -> Check:
    return Check(name, Mark.BROKEN, str(problem), problem.hint or "")


def settings_checks(home: Home, now: datetime) -> Iterator[Check]:
    """Of what `load_home` has read; it has refused whatever could not be used at all."""
    agreement = home.agreement
    try:
        home.terms()
    except LightyearError as problem:
        yield failed("settings", problem)
    else:
        about = f"{home.us} of {agreement.federation}, {len(agreement.peers)} sites,"
        about += f" rule {home.rule.name}, peers.yaml {agreement.digest()[:12]}"
        yield Check("settings", Mark.HOLDS, about)
    yield _keys(home)
    yield _certificate(home, now)


def _keys(home: Home) -> Check:
    """The files were refused if others could read them; a folder they can write is as bad."""
    folder = home.directory / home.site.keys_dir
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


async def model_checks(home: Home) -> tuple[list[Check], OurModel | None]:
    """Build the model as the node will, in a worker of its own and a folder of its own."""
    worker = Worker(
        # At the screen of whoever asks, not in a log.
        home.opening(),
        silence_s=home.site.worker.silence,
        full_errors=True,
    )
    with tempfile.TemporaryDirectory(prefix="lightyear-check-") as folder:
        state = State(Path(folder))
        try:
            model = await Learner(worker, state, on_death=lambda reason, why: None).open()
        except LightyearError as problem:
            return [failed("model", problem)], None
        finally:
            await worker.stop()
            state.close()
    ours = OurModel(model.schema, model.initial.digest, model.initial.raw_bytes)
    return [Check("device", Mark.HOLDS, model.opened.device), _built(home, model)], ours


def _built(home: Home, model: OpenedModel) -> Check:
    opened = model.opened
    about = (
        f"{home.site.task.entry}: {opened.parameters:,} parameters,"
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


def remembered_model(home: Home) -> OurModel:
    """What the state directory remembers of the model that ran here; raises if it is damaged."""
    memory, begun = peek(_state_dir(home) / "journal.db")
    return OurModel(
        schema=memory.get("schema", UNKNOWN_DIGEST),
        initial_model=begun.get("initial_model", UNKNOWN_DIGEST),
        raw_bytes=(memory.get("work") or {}).get("raw_bytes"),
    )


def state_checks(home: Home, model: OurModel | None) -> Iterator[Check]:
    """The state directory and its disk; `model` is the one that was built, if it was."""
    folder = _state_dir(home)
    try:
        before = remembered_model(home)
    except LightyearError as problem:
        yield failed("state", problem)
        return
    if model and before.schema not in (UNKNOWN_DIGEST, model.schema):
        yield Check(
            "state",
            Mark.BROKEN,
            f"{folder} was begun with a model of other tensors",
            "go back to the task it was begun with, or set another `state_dir`",
        )
    else:
        yield _writable(folder)
    yield _disk(home, folder, (model or before).raw_bytes)


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
    new = "" if existing == folder else ", will be made"
    return Check("state", Mark.HOLDS, f"{folder}{new}")


def _disk(home: Home, folder: Path, model_bytes: int | None) -> Check:
    """What the rounds will write beside what is there, what is to stay free, and some air."""
    disk, size = home.site.disk, model_bytes or 0
    needs = Needs(
        model=size,
        update=size,
        # Most optimizers keep one or two numbers for every weight.
        carry=2 * size,
        peers=len(home.others),
        models_kept=home.site.keep.models,
    )
    try:
        check_quota(disk.quota, replace(needs, carry=0))
    except LightyearError as problem:
        return failed("disk", problem)
    free = shutil.disk_usage(_existing(folder)).free
    reserve = default_reserve(size) if disk.reserve is None else disk.reserve
    copies = ENCODED_COPIES * size
    needed = max(0, needs.total + copies - used_bytes(folder)) + reserve
    about = f"{size_text(free)} free, {size_text(needed)} needed"
    about += f" of which {size_text(reserve)} are to stay free"
    if model_bytes is None:
        about += ", and more for the model, which is not known here"
    advice = f"make room for {folder}, or move `state_dir`"
    if free < needed:
        return Check("disk", Mark.BROKEN, about, advice)
    if free < needed + SPARE_BYTES:
        return Check("disk", Mark.DIFFERS, f"{about}: little to spare", advice)
    return Check("disk", Mark.HOLDS, about)


def port_checks(home: Home) -> Iterator[Check]:
    running = _runs_here(home)
    if home.others and home.listen is None:
        yield Check("listen", Mark.HOLDS, "this site has no address: it dials all the others")
    elif home.others and home.listen is not None:
        yield _port("listen", home.listen, running)
    else:
        yield Check("listen", Mark.HOLDS, "this site trains alone and opens no port")
    if home.site.http.listen:
        yield _http(home, running)


def _http(home: Home, running: bool) -> Check:
    listen = home.site.http.listen
    try:
        warning = Access(listen, http_keys(home)).warning
    except LightyearError as problem:
        return failed("http", problem)
    check = _port("http", listen, running)
    if check.mark is Mark.HOLDS and warning is not None:
        return Check("http", Mark.DIFFERS, warning, "see docs/monitoring.md")
    return check


def _runs_here(home: Home) -> bool:
    try:
        return bool(ask(_state_dir(home), "status")["name"] == home.us)
    except (NotRunning, OSError):
        return False


def _port(name: str, address: str, running: bool) -> Check:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            pass
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE and running:
            return Check(name, Mark.HOLDS, f"{address}, in use by our own running node")
        advice = {
            errno.EADDRINUSE: "stop the other program, or set another port in node.yaml",
            errno.EACCES: "ports below 1024 are reserved: set another one in node.yaml",
        }.get(problem.errno or 0, f"set `listen: 0.0.0.0:{port}` in node.yaml")
        words = os.strerror(problem.errno) if problem.errno else str(problem)
        return Check(name, Mark.BROKEN, f"cannot listen on {address}: {words}", advice)
    return Check(name, Mark.HOLDS, f"{address} is free")


async def ask_peers(
    home: Home,
    peers: Sequence[PeerName],
    model: OurModel,
    *,
    now: datetime,
    timeout_s: float,
    tell: Callable[[Diagnosis], None],
) -> list[Diagnosis]:
    """All at the same time; `tell` hears of each as soon as it is done."""
    hello = _greeting(home, model)
    question = Question(hello, home.identity, time.time_ns, now, timeout_s)
    addresses = {peer.name: peer.address for peer in home.agreement.peers}

    async def one(peer: PeerName) -> Diagnosis:
        address = addresses[peer]
        if address is None:
            diagnosis = cannot_be_asked(peer)
        else:
            keys_dir = home.directory / home.site.keys_dir
            door = Door(peer, address, home.certificates[peer], keys_dir)
            diagnosis = await diagnose(door, question)
        tell(diagnosis)
        return diagnosis

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(one(peer)) for peer in peers]
    return [task.result() for task in asked]


async def ask_for_heads(
    home: Home, peers: Sequence[PeerName], model: OurModel, *, timeout_s: float
) -> dict[PeerName, SignedHead | PeerError | None]:
    """The newest head of our journal that each of these peers holds; they go on undisturbed.

    None for a peer that holds none, an error for one that could not be asked.
    """
    addresses = {peer.name: peer.address for peer in home.agreement.peers}
    greeting = _greeting(home, model)

    async def one(peer: PeerName) -> SignedHead | PeerError | None:
        address = addresses[peer]
        if address is None:
            about = "it has no address, and cannot be asked from here"
            return PeerUnreachable(peer, Reason.UNREACHABLE, about)
        client = PeerClient(peer, Direct(peer, address, home.certificates[peer], home.identity))
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
        asked = {peer: group.create_task(one(peer)) for peer in peers}
    return {peer: task.result() for peer, task in asked.items()}


def _greeting(home: Home, model: OurModel) -> Hello:
    """A question, which leaves no trace at the peer."""
    return Hello(
        version_min=PROTOCOL_VERSION,
        version_max=PROTOCOL_VERSION,
        federation=home.agreement.federation,
        agreement=home.agreement.digest(),
        schema=model.schema,
        initial_model=model.initial_model,
        round=Round(0),
        boot_id="check",
        wall_time_ns=time.time_ns(),
        lamport=0,
        probe=True,
    )


def _state_dir(home: Home) -> Path:
    return home.directory / home.site.state_dir


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
