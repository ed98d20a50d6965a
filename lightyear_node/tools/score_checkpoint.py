"""Judges a checkpoint on an operator's request, as the node judges its peers' updates.

Runs the worker's code in a separate process and only reads the node's files; a node may be running
meanwhile.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightyear_node.audit.export import JOURNAL
from lightyear_node.audit.rounds import RoundEntry, verdict_of
from lightyear_node.errors import ConfigError, JournalCorrupt, LightyearError, StoreError
from lightyear_node.node.home import Home
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.storage import safetensors_header
from lightyear_node.storage.blobs import hash_file
from lightyear_node.tools.model_export import ModelKind
from lightyear_node.tools.model_export.stored_models import (
    BEST,
    LAST,
    StateRecord,
    no_longer_kept,
    read_record,
    select_model,
)
from lightyear_node.types import Digest, PeerName, Reason, Verdict
from lightyear_node.worker.job_types import CandidateFile, verdict_from_plain, verdict_to_plain

TRAINED = "trained"
"""Our own model after the newest round's training, with which the node judges peers."""
NO_PEER = PeerName("(file)")
"""The name for a checkpoint that no peer has sent."""
ATTEMPTS_MAX = 3
"""A running node may delete files that it no longer needs while we use them."""
_NAME_A_FILE = "name a .safetensors file"
_PICKLES = (b"PK\x03\x04", b"\x80")


class UnreadableCheckpoint(LightyearError):
    """A file that cannot be judged."""


@dataclass(frozen=True, slots=True)
class ScoreReference:
    """The model that a checkpoint is compared with, and the updates judged together with it."""

    which: str
    round: int
    own: Path
    before: Path
    carry: Path | None
    rule_state: Mapping[str, Any]
    digest: Digest | None = None
    others: Mapping[PeerName, CandidateFile] = field(default_factory=dict)
    """The updates that were judged in that round, as far as they are still stored."""

    def is_deleted(self) -> bool:
        """Whether the node has deleted one of its files meanwhile."""
        others = (Path(candidate.path) for candidate in self.others.values())
        files = (self.own, self.before, self.carry, *others)
        return any(path is not None and not path.exists() for path in files)


async def score(
    home: Home, file: Path, reference: str, on_step: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The verdict on `file` in plain values, with the explanations of `explain`."""
    check_readable(file)
    for attempt in range(1, ATTEMPTS_MAX + 1):
        found: ScoreReference | None = None
        try:
            found = find_reference(home, reference)
            with tempfile.TemporaryDirectory(prefix="lightyear-score-") as scratch:
                return await _score(home, file, found, Path(scratch), on_step)
        except LightyearError as problem:
            deleted = isinstance(problem, StoreError) if found is None else found.is_deleted()
            if attempt == ATTEMPTS_MAX or not deleted:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _score(
    home: Home,
    file: Path,
    reference: ScoreReference,
    scratch: Path,
    on_step: Callable[[str], None],
) -> dict[str, Any]:
    digest, size, _ = hash_file(file)
    peer = next((name for name, one in reference.others.items() if one.digest == digest), NO_PEER)
    worker = WorkerProcess(
        home.opening(),
        silence_s=home.config.worker.silence,
        full_errors=True,
        memory_max=home.config.worker.memory_max,
    )
    try:
        on_step(f"building the task {home.config.task.name}")
        await worker.open()
        on_step(f"judging {file.name}")
        own, before = reference.own, reference.before
        if reference.which not in (TRAINED, BEST, LAST):
            own = before = scratch / "reference"
            await _import_reference(worker, reference.own, own)
        candidate = scratch / "candidate"
        answer = await worker.call(
            "import_checkpoint", path=str(file), out=str(candidate), as_peer=True
        )
        refused = answer["refused"]
        if refused is not None and refused["reason"] is None:
            raise _unreadable(file, refused["about"])
        if refused is not None:
            verdict = Verdict(peer, False, Reason(refused["reason"]), None, 0.0, {}, digest)
        else:
            ours = reference.others.get(peer)
            this = CandidateFile(peer, str(candidate), ours.samples if ours else 0, digest)
            verdict = await _judged(worker, reference, own, before, this)
    finally:
        await worker.stop()
    plain = verdict_of(RoundEntry(reference.round), verdict_to_plain(verdict))
    plain |= {"weight": verdict.weight if peer != NO_PEER else None}
    return {
        "file": str(file),
        "bytes": size,
        **{key: plain[key] for key in plain if key not in ("generation", "update_round", "fate")},
        "detail": refused["about"] if refused else None,
        "round": reference.round,
        "rule": home.rule.name,
        "reference": {"which": reference.which, "digest": reference.digest},
        "beside": sorted(name for name in reference.others if name != peer),
    }


async def _judged(
    worker: WorkerProcess, reference: ScoreReference, own: Path, before: Path, this: CandidateFile
) -> Verdict:
    # In the peer's position among the others, because some rules compare all updates pairwise.
    candidates = {**reference.others, this.peer: this}
    answer = await worker.call(
        "judge",
        round=reference.round,
        own=str(own),
        before=str(before),
        carry=str(reference.carry) if reference.carry else None,
        peers=[candidate.to_plain() for candidate in candidates.values()],
        state=dict(reference.rule_state),
    )
    verdicts = map(verdict_from_plain, answer["verdicts"])
    return next(verdict for verdict in verdicts if verdict.peer == this.peer)


async def _import_reference(worker: WorkerProcess, path: Path, out: Path) -> None:
    answer = await worker.call("import_checkpoint", path=str(path), out=str(out), as_peer=False)
    if answer["refused"] is not None:
        raise ConfigError(
            f"{path} cannot be the reference: {answer['refused']['about']}",
            hint="name a checkpoint of this task's own model, or best, last or trained",
        )


def check_readable(path: Path) -> None:
    """Raise `UnreadableCheckpoint` unless it may be a safetensors file."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            about = os.fstat(fd)
            start = os.read(fd, 9) if stat.S_ISREG(about.st_mode) else b""
        finally:
            os.close(fd)
    except OSError as problem:
        raise UnreadableCheckpoint(
            f"{path} cannot be read: {problem.strerror}", hint=_NAME_A_FILE
        ) from None
    if not stat.S_ISREG(about.st_mode):
        raise UnreadableCheckpoint(f"{path} is not a regular file", hint=_NAME_A_FILE)
    if start.startswith(_PICKLES):
        raise UnreadableCheckpoint(
            f"{path} is a pickle (or a zip file), which could run any code: it was not opened",
            hint="load it where you trust it, and save the state dict with safetensors.torch",
        )
    length = safetensors_header.json_length(start)
    if len(start) < 9 or length > about.st_size - 8 or start[8:] != b"{":
        raise _unreadable(path, "it is no safetensors file, or is truncated")


def _unreadable(path: Path, about: str) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(
        f"{path} cannot be judged: {about}",
        hint="save the model's state dict with safetensors.torch.save_file",
    )


# -- References -----------------------------------------------------------------------------------


def find_reference(home: Home, wanted: str) -> ScoreReference:
    """`trained`, `best`, `last`, or the path of a safetensors file."""
    state_dir = home.directory / home.config.state_dir
    if wanted not in (TRAINED, BEST, LAST):
        return _from_file(state_dir, Path(wanted))
    record = read_record(state_dir)
    return _trained(record) if wanted == TRAINED else _merged(record, wanted)


def _trained(record: StateRecord) -> ScoreReference:
    work = record.memory.get("work")
    sealed = [entry for entry in record.rounds.values() if entry.sealed]
    if not work or not sealed:
        raise ConfigError(
            "this site has not trained yet, so there is nothing to compare with",
            hint="wait for its first round, or name a checkpoint with --reference",
        )
    entry = max(sealed, key=lambda one: one.seqs["seal"])
    if (entry.sealed.get("update") or {}).get("digest") != work["outgoing"]:
        raise JournalCorrupt(
            "the records and the saved state in this site's journal contradict each other",
            hint="`lightyear-node audit verify` shows where it was altered",
        )
    context = record.contexts[entry.round]
    own = _checked(record, "updates", work["own"])
    before = _checked(record, "models", f"{context.before}.safetensors", context.before)
    return ScoreReference(
        TRAINED,
        entry.round,
        own=own,
        before=before,
        carry=_checked(record, "carry", work["carry"]),
        rule_state=context.rule_state,
        digest=Digest(work["own"]),
        others=_judged_updates(record, entry),
    )


def _merged(record: StateRecord, wanted: str) -> ScoreReference:
    kept = select_model(record, wanted)
    if kept.model is None:
        raise no_longer_kept(record, kept, ModelKind.SHARED)
    model = _checked(record, "models", kept.model.name, kept.digest)
    return ScoreReference(
        wanted,
        # The round that starts from this model judges with it.
        kept.entry.round + 1,
        own=model,
        before=model,
        carry=kept.carry,
        rule_state=record.now.rule_state,
        digest=Digest(kept.digest),
    )


def _from_file(state_dir: Path, path: Path) -> ScoreReference:
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist",
            hint="--reference is trained, best, last or a .safetensors file",
        )
    check_readable(path)
    digest, _, _ = hash_file(path)
    # Not round 0, in which the guard requires no agreement.
    alone = ScoreReference(str(path), 1, path, path, carry=None, rule_state={}, digest=digest)
    if not (state_dir / JOURNAL).exists():
        return alone
    record = read_record(state_dir)
    carry = (record.memory.get("work") or {}).get("carry")
    return replace(
        alone,
        round=max(record.rounds, default=0) + 1,
        carry=_checked(record, "carry", carry) if carry else None,
        rule_state=record.now.rule_state,
    )


def _judged_updates(record: StateRecord, entry: RoundEntry) -> dict[PeerName, CandidateFile]:
    samples = _samples(record)
    found = {}
    for verdict in entry.verdicts:
        digest = verdict.get("digest")
        path = record.directory / "updates" / str(digest)
        if digest and path.is_file() and hash_file(path)[0] == digest:
            peer = PeerName(verdict["peer"])
            found[peer] = CandidateFile(peer, str(path), samples.get(digest, 0), Digest(digest))
    return found


def _samples(record: StateRecord) -> dict[str, int]:
    """Sample counts by update, from the signed manifests in the journal."""
    signed = [*(record.memory.get("seen") or [])]
    for entry in record.rounds.values():
        for other in entry.others:
            if other["kind"] == "witness":
                signed += other["body"].get("updates") or []
    manifests = [one["manifest"] for one in signed]
    return {one["update"]["digest"]: one["samples"] for one in manifests}


def _checked(record: StateRecord, folder: str, name: str, digest: str | None = None) -> Path:
    path = record.directory / folder / name
    if not path.is_file():
        raise StoreError(
            f"{path} is no longer kept",
            hint="`--reference last` needs only the newest model; `keep: {models: 3}` in node.yaml"
            " keeps the model that the newest round started from",
        )
    if hash_file(path)[0] != (digest or name):
        raise StoreError(f"{path} is damaged", hint="name another --reference")
    return path
