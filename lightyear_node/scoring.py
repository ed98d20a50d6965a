"""Judging a checkpoint by hand, as the node judges its peers' updates.

The worker's own code does it, in a process of its own; the node's files are only read, and a node
may be running meanwhile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightyear_node.audit.export import JOURNAL
from lightyear_node.audit.rounds import RoundEntry, verdict_of
from lightyear_node.errors import ConfigError, JournalCorrupt, LightyearError, StoreError
from lightyear_node.export import Which
from lightyear_node.export.kept import BEST, LAST, Record, chosen, gone, read_record
from lightyear_node.home import Home
from lightyear_node.records import Digest, PeerName, Reason, Verdict
from lightyear_node.store import hash_file
from lightyear_node.worker.handle import Worker
from lightyear_node.worker.jobs import Candidate, verdict_from_plain, verdict_to_plain

TRAINED = "trained"
"""Our own model as the newest round's training left it: what the node judges peers with."""
NOBODY = PeerName("(file)")
"""The name of a checkpoint that no peer has sent."""
TRIES = 3
"""A running node deletes what it no longer needs, perhaps while we look for it."""
_PICKLES = (b"PK\x03\x04", b"\x80")


class Unreadable(LightyearError):
    """A file that nobody could judge."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What a checkpoint is compared with, and together with whom."""

    which: str
    round: int
    own: Path
    before: Path
    carry: Path | None
    rule_state: Mapping[str, Any]
    digest: Digest | None = None
    others: Mapping[PeerName, Candidate] = field(default_factory=dict)
    """The updates that were judged in that round, as far as they are here."""

    def lost(self) -> bool:
        """Whether the node has deleted a part of it meanwhile."""
        others = (Path(candidate.path) for candidate in self.others.values())
        files = (self.own, self.before, self.carry, *others)
        return any(path is not None and not path.exists() for path in files)


async def score(
    home: Home, file: Path, reference: str, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The verdict on `file` in plain values, in the words of `explain`."""
    check_readable(file)
    for attempt in range(1, TRIES + 1):
        found: Reference | None = None
        try:
            found = find_reference(home, reference)
            with tempfile.TemporaryDirectory(prefix="lightyear-score-") as scratch:
                return await _score(home, file, found, Path(scratch), tell)
        except LightyearError as problem:
            lost = isinstance(problem, StoreError) if found is None else found.lost()
            if attempt == TRIES or not lost:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _score(
    home: Home, file: Path, reference: Reference, scratch: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    digest, size, _ = hash_file(file)
    peer = next((name for name, one in reference.others.items() if one.digest == digest), NOBODY)
    worker = Worker(home.opening(), silence_s=home.site.worker.silence, full_errors=True)
    try:
        tell(f"building the task {home.site.task.entry}")
        await worker.open()
        tell(f"judging {file.name}")
        own, before = reference.own, reference.before
        if reference.which not in (TRAINED, BEST, LAST):
            own = before = scratch / "reference"
            await _must_fit(worker, reference.own, own)
        candidate = scratch / "candidate"
        answer = await worker.call("take_in", path=str(file), out=str(candidate), as_peer=True)
        refused = answer["refused"]
        if refused is not None and refused["reason"] is None:
            raise _unreadable(file, refused["about"])
        if refused is not None:
            verdict = Verdict(peer, False, Reason(refused["reason"]), None, 0.0, {}, digest)
        else:
            ours = reference.others.get(peer)
            this = Candidate(peer, str(candidate), ours.samples if ours else 0, digest)
            verdict = await _judged(worker, reference, own, before, this)
    finally:
        await worker.stop()
    plain = verdict_of(RoundEntry(reference.round), verdict_to_plain(verdict))
    plain |= {"weight": verdict.weight if peer != NOBODY else None}
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
    worker: Worker, reference: Reference, own: Path, before: Path, this: Candidate
) -> Verdict:
    # In the place that the peer had among the others: some rules compare everybody with everybody.
    everybody = {**reference.others, this.peer: this}
    answer = await worker.call(
        "judge",
        round=reference.round,
        own=str(own),
        before=str(before),
        carry=str(reference.carry) if reference.carry else None,
        peers=[candidate.to_plain() for candidate in everybody.values()],
        state=dict(reference.rule_state),
    )
    verdicts = map(verdict_from_plain, answer["verdicts"])
    return next(verdict for verdict in verdicts if verdict.peer == this.peer)


async def _must_fit(worker: Worker, path: Path, out: Path) -> None:
    answer = await worker.call("take_in", path=str(path), out=str(out), as_peer=False)
    if answer["refused"] is not None:
        raise ConfigError(
            f"{path} cannot be the reference: {answer['refused']['about']}",
            hint="name a checkpoint of this task's own model, or best, last or trained",
        )


def check_readable(path: Path) -> None:
    """Whether it can be a safetensors file at all; raises `Unreadable`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(9)
    except OSError as problem:
        raise Unreadable(
            f"{path} cannot be read: {problem.strerror}", hint="name a .safetensors file"
        ) from None
    if start.startswith(_PICKLES):
        raise Unreadable(
            f"{path} is a pickle (or a zip file), which could run anything: it was not opened",
            hint="load it where you trust it, and save the state dict with safetensors.torch",
        )
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or length > size - 8 or start[8:] != b"{":
        raise _unreadable(path, "it is no safetensors file, or was cut short")


def _unreadable(path: Path, about: str) -> Unreadable:
    return Unreadable(
        f"{path} cannot be judged: {about}",
        hint="save the model's state dict with safetensors.torch.save_file",
    )


# What to compare with.


def find_reference(home: Home, wanted: str) -> Reference:
    state_dir = home.directory / home.site.state_dir
    if wanted not in (TRAINED, BEST, LAST):
        return _from_file(state_dir, Path(wanted))
    record = read_record(state_dir)
    return _trained(record) if wanted == TRAINED else _merged(record, wanted)


def _trained(record: Record) -> Reference:
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
            "this site's record and its memory do not fit to each other",
            hint="`lightyear-node audit verify` says where it was altered",
        )
    context = record.contexts[entry.round]
    own = _checked(record, "updates", work["own"])
    before = _checked(record, "models", f"{context.before}.safetensors", context.before)
    return Reference(
        TRAINED,
        entry.round,
        own=own,
        before=before,
        carry=_checked(record, "carry", work["carry"]),
        rule_state=context.rule_state,
        digest=Digest(work["own"]),
        others=_judged_then(record, entry),
    )


def _merged(record: Record, wanted: str) -> Reference:
    kept = chosen(record, wanted)
    if kept.model is None:
        raise gone(record, kept, Which.SHARED)
    model = _checked(record, "models", kept.model.name, kept.digest)
    return Reference(
        wanted,
        # It would be judged with in the round that begins with it.
        kept.entry.round + 1,
        own=model,
        before=model,
        carry=kept.carry,
        rule_state=record.now.rule_state,
        digest=Digest(kept.digest),
    )


def _from_file(state_dir: Path, path: Path) -> Reference:
    if not path.exists():
        raise ConfigError(
            f"{path} is not there", hint="--reference is trained, best, last or a .safetensors file"
        )
    check_readable(path)
    digest, _, _ = hash_file(path)
    # In the first round the guard asks for no agreement, which is not what anybody wants to know.
    alone = Reference(str(path), 1, path, path, carry=None, rule_state={}, digest=digest)
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


def _judged_then(record: Record, entry: RoundEntry) -> dict[PeerName, Candidate]:
    samples = _samples(record)
    found = {}
    for verdict in entry.verdicts:
        digest = verdict.get("digest")
        path = record.directory / "updates" / str(digest)
        if digest and path.is_file() and hash_file(path)[0] == digest:
            peer = PeerName(verdict["peer"])
            found[peer] = Candidate(peer, str(path), samples.get(digest, 0), Digest(digest))
    return found


def _samples(record: Record) -> dict[str, int]:
    """What peers have signed about their updates, of those that we vouch for."""
    signed = [*(record.memory.get("seen") or [])]
    for entry in record.rounds.values():
        for other in entry.others:
            if other["kind"] == "witness":
                signed += other["body"].get("updates") or []
    manifests = [one["manifest"] for one in signed]
    return {one["update"]["digest"]: one["samples"] for one in manifests}


def _checked(record: Record, folder: str, name: str, digest: str | None = None) -> Path:
    path = record.directory / folder / name
    if not path.is_file():
        raise StoreError(
            f"{path} is not kept any more",
            hint="`--reference last` needs only the newest model; `keep: {models: 3}` in node.yaml"
            " keeps what the newest round began with",
        )
    if hash_file(path)[0] != (digest or name):
        raise StoreError(f"{path} is damaged", hint="name another --reference")
    return path
