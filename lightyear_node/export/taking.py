"""Writing a model and its card: whole and checked, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.export import Which
from lightyear_node.export.card import Contents, card_of, in_words
from lightyear_node.export.kept import Kept, Record, chosen, gone, read_record
from lightyear_node.export.tensors import COPY_BYTES, Piece, pieces, under, write
from lightyear_node.store import hash_stream

SUFFIX = ".safetensors"
AT_HOME = "carried.shared.tensors."
PERSONAL = "carried.personal.tensors."


@dataclass(frozen=True, slots=True)
class Taken:
    """What was written, and what whoever took it should know."""

    files: tuple[Path, ...]
    card: Mapping[str, Any]
    warnings: tuple[str, ...]


def take(
    state_dir: Path,
    wanted: str,
    out: Path,
    *,
    which: Which | None = None,
    force: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Taken:
    """Write the model of a round to `out`, and its card beside it.

    Without `which`, the personal model where this site has one: it is the one that is measured
    and used.  `settings` is what node.yaml says, for what the record of earlier versions lacks.
    """
    targets = _targets(out, force)
    record = read_record(state_dir)
    kept = chosen(record, wanted)
    with contextlib.ExitStack() as files:
        newest = _open_newest_carry(record, files)
        has_personal = bool(under(PERSONAL, newest))
        which = which or (Which.PERSONAL if has_personal else Which.SHARED)
        if which is Which.PERSONAL and not has_personal:
            raise ConfigError(
                "this site has no personal model: its rule keeps only the shared one",
                hint="leave `--which` out, or write `--which shared`",
            )
        tensors, absent = _tensors(record, kept, which, newest, files)
        # Where there is a personal model, it is the one that was measured.
        doubtful = tuple(piece.name for piece in absent if piece.is_float)
        if which is Which.SHARED:
            doubtful += _statistics(under(AT_HOME, newest))
        measured = which is Which.PERSONAL if has_personal else not doubtful
        contents = Contents(tensors, tuple(absent), which, measured)
        return _write(targets, record, kept, contents, settings or {})


def _tensors(
    record: Record, kept: Kept, which: Which, newest: list[Piece], files: contextlib.ExitStack
) -> tuple[list[Piece], list[Piece]]:
    """What goes into the file, and what of the site's model cannot: it is no longer kept."""
    carried: list[Piece] | None = None
    if kept.carry is not None and kept.carry_digest is not None:
        carried = pieces(files.enter_context(_checked(kept.carry, kept.carry_digest)))
    if which is Which.PERSONAL:
        if carried is None:
            raise gone(record, kept, which)
        return under(PERSONAL, carried), []
    if kept.model is None:
        raise gone(record, kept, which)
    shared = pieces(files.enter_context(_checked(kept.model, kept.digest)))
    if carried is None:
        return shared, under(AT_HOME, newest)
    return [*shared, *under(AT_HOME, carried)], []


def _statistics(at_home: list[Piece]) -> tuple[str, ...]:
    """BatchNorm's, which a guarded site estimates anew after merging, to measure, and forgets."""
    ends = ("running_mean", "running_var")
    return tuple(piece.name for piece in at_home if piece.name.endswith(ends))


def _open_newest_carry(record: Record, files: contextlib.ExitStack) -> list[Piece]:
    """What the newest training has left: which tensors stay at home, and if one is personal."""
    digest = (record.memory.get("work") or {}).get("carry")
    if digest is None:
        return []
    path = record.directory / "carry" / digest
    return pieces(files.enter_context(_checked(path, digest))) if path.is_file() else []


@contextlib.contextmanager
def _checked(path: Path, digest: str) -> Iterator[BufferedReader]:
    """Open, and still what its name says; the node may delete it meanwhile, we have it."""
    try:
        with path.open("rb") as file:
            found, _, _ = hash_stream(file)
            if found != digest:
                raise StoreError(
                    f"{path} is damaged: its content has digest {found}",
                    hint="nothing was written; `lightyear-node model list` says which other rounds"
                    " are there, and a backup may have this one",
                )
            yield file
    except FileNotFoundError:
        raise StoreError(
            f"{path} has just been deleted, for the node has gone on", hint="try again"
        ) from None


# The files.


@dataclass(frozen=True, slots=True)
class _Targets:
    model: Path
    words: Path
    plain: Path

    @property
    def all(self) -> tuple[Path, ...]:
        return self.model, self.words, self.plain


def _targets(out: Path, force: bool) -> _Targets:
    if out.suffix != SUFFIX:
        raise ConfigError(
            f"{out} does not end in {SUFFIX}", hint=f"write `-o {out.with_suffix(SUFFIX)}`"
        )
    targets = _Targets(out, out.with_suffix(".md"), out.with_suffix(".json"))
    there = [path for path in targets.all if path.exists()]
    if there and not force:
        raise ConfigError(
            f"{there[0]} is there already", hint="name another file, or `--force` to replace it"
        )
    return targets


def _write(
    targets: _Targets,
    record: Record,
    kept: Kept,
    contents: Contents,
    settings: Mapping[str, Any],
) -> Taken:
    with _disk(targets.model), _scratch(targets) as (model, words, plain):
        with model.open("wb") as file:
            write(file, contents.tensors, _metadata(record, kept, contents))
            _sync(file.fileno(), file.flush)
        file_about = {
            "name": targets.model.name,
            "bytes": model.stat().st_size,
            "sha256": _sha256(model),
        }
        card = card_of(record, kept, contents, file_about, settings)
        for path, text in ((words, in_words(card)), (plain, json.dumps(card, indent=1) + "\n")):
            with path.open("w", encoding="utf-8") as out:
                out.write(text)
                _sync(out.fileno(), out.flush)
        # The model last: where it is, its card is.
        for source, target in ((words, targets.words), (plain, targets.plain)):
            source.replace(target)
        model.replace(targets.model)
    return Taken(targets.all, card, tuple(card["warnings"]))


def _metadata(record: Record, kept: Kept, contents: Contents) -> dict[str, str]:
    about = record.about
    said = {
        "format": "pt",
        "lightyear.federation": about.get("federation"),
        "lightyear.site": about.get("site"),
        "lightyear.round": str(kept.entry.round),
        "lightyear.which": str(contents.which),
        "lightyear.model_digest": kept.digest,
        "lightyear.version": about.get("version"),
    }
    return {key: str(value) for key, value in said.items() if value is not None}


def _sync(fd: int, flush: Any) -> None:
    flush()
    os.fsync(fd)


def _sha256(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while read := file.read(COPY_BYTES):
            content.update(read)
    return content.hexdigest()


@contextlib.contextmanager
def _scratch(targets: _Targets) -> Iterator[list[Path]]:
    """Names beside the targets; whatever is left under them afterwards is deleted."""
    token = secrets.token_hex(4)
    paths = [path.with_name(f".{path.name}.{token}.tmp") for path in targets.all]
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{path.parent}: no space left for the model; nothing was written",
                hint="make room there, or name a file on another disk with -o",
            ) from None
        raise StoreError(
            f"{path} cannot be written: {problem.strerror}", hint="name another file with -o"
        ) from None
