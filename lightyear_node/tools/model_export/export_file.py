"""Writes a model and its card, completely and verified, or not at all."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError, DiskFull, StoreError
from lightyear_node.storage.atomic_files import staged, sync
from lightyear_node.storage.blobs import hash_stream
from lightyear_node.storage.file_descriptors import DISK_FULL
from lightyear_node.storage.journal_segments import file_sha256
from lightyear_node.tools.model_export import ModelKind
from lightyear_node.tools.model_export.model_card import FileContents, card_of, markdown_of
from lightyear_node.tools.model_export.stored_models import (
    BEST,
    LAST,
    StateRecord,
    StoredModel,
    no_longer_kept,
    read_record,
    select_model,
    serves_alone,
)
from lightyear_node.tools.model_export.tensors import TensorSlice, pieces, under, write

SUFFIX = ".safetensors"
LOCAL = "carried.shared.tensors."
CARRIED = {
    ModelKind.PERSONAL: "carried.personal.tensors.",
    ModelKind.ALONE: "carried.shadow.tensors.",
}
"""Models that are part of the training state."""
_MISSING = {
    ModelKind.PERSONAL: "this site has no personal model: its rule keeps only the shared one",
    ModelKind.ALONE: "this site has no model that was trained alone: `rule.shadow` is not set",
}


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """The written files, the card, and warnings for the user."""

    files: tuple[Path, ...]
    card: Mapping[str, Any]
    warnings: tuple[str, ...]


def export_model(
    state_dir: Path,
    wanted: str,
    out: Path,
    *,
    which: ModelKind | None = None,
    force: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> ExportedModel:
    """Write the model of a round to `out`, and its card beside it.

    `which` defaults to the model that the site uses: the personal one if its rule has one; for
    `best` and `last` the one trained alone, if that is served; otherwise the shared one.
    `settings` are those of node.yaml, for fields that journals of earlier versions lack.
    """
    targets = _targets(out, force)
    record = read_record(state_dir)
    kept = select_model(record, wanted)
    if which is None and wanted in (BEST, LAST) and serves_alone(record):
        which = ModelKind.ALONE
    with contextlib.ExitStack() as files:
        newest = _open_newest_carry(record, files)
        has_personal = bool(under(CARRIED[ModelKind.PERSONAL], newest))
        which = which or (ModelKind.PERSONAL if has_personal else ModelKind.SHARED)
        if which in CARRIED and not under(CARRIED[which], newest):
            raise ConfigError(_MISSING[which], hint="omit `--which`, or use `--which shared`")
        tensors, absent = _tensors(record, kept, which, newest, files)
        # If there is a personal model, the metrics are those of that one.
        unmeasured = tuple(piece.name for piece in absent if piece.is_float)
        if which is ModelKind.SHARED:
            unmeasured += _statistics(under(LOCAL, newest))
        measured = which is ModelKind.PERSONAL if has_personal else not unmeasured
        measured = measured and which is not ModelKind.ALONE
        contents = FileContents(tensors, tuple(absent), which, measured)
        return _write(targets, record, kept, contents, settings or {})


def _tensors(
    record: StateRecord,
    kept: StoredModel,
    which: ModelKind,
    newest: list[TensorSlice],
    files: contextlib.ExitStack,
) -> tuple[list[TensorSlice], list[TensorSlice]]:
    """The tensors for the file, and those of the site's model that are no longer kept."""
    if which is ModelKind.ALONE:  # only the newest is kept
        return under(CARRIED[which], newest), []
    carried: list[TensorSlice] | None = None
    if kept.carry is not None and kept.carry_digest is not None:
        carried = pieces(files.enter_context(_checked(kept.carry, kept.carry_digest)))
    if which in CARRIED:
        if carried is None:
            raise no_longer_kept(record, kept, which)
        return under(CARRIED[which], carried), []
    if kept.model is None:
        raise no_longer_kept(record, kept, which)
    shared = pieces(files.enter_context(_checked(kept.model, kept.digest)))
    if carried is None:
        return shared, under(LOCAL, newest)
    return [*shared, *under(LOCAL, carried)], []


def _statistics(local: list[TensorSlice]) -> tuple[str, ...]:
    """BatchNorm statistics, which a guarded site re-estimates after merging, only to measure."""
    ends = ("running_mean", "running_var")
    return tuple(piece.name for piece in local if piece.name.endswith(ends))


def _open_newest_carry(record: StateRecord, files: contextlib.ExitStack) -> list[TensorSlice]:
    """Tensors of the newest training state: those that are not exchanged, and personal ones."""
    digest = (record.memory.get("work") or {}).get("carry")
    if digest is None:
        return []
    path = record.directory / "carry" / digest
    return pieces(files.enter_context(_checked(path, digest))) if path.is_file() else []


@contextlib.contextmanager
def _checked(path: Path, digest: str) -> Iterator[BufferedReader]:
    """Open a file and verify its digest; it stays readable if the node deletes it."""
    try:
        with path.open("rb") as file:
            found, _, _ = hash_stream(file)
            if found != digest:
                raise StoreError(
                    f"{path} is damaged: its content has digest {found}",
                    hint="nothing was written; `lightyear-node model list` shows which other rounds"
                    " are kept, and a backup may have this one",
                )
            yield file
    except FileNotFoundError:
        raise StoreError(
            f"{path} has just been deleted by the running node", hint="try again"
        ) from None


# -- Files ----------------------------------------------------------------------------------------


def _targets(out: Path, force: bool) -> tuple[Path, Path, Path]:
    """The files of the model and of its card, as Markdown and as JSON."""
    if out.suffix != SUFFIX:
        raise ConfigError(
            f"{out} does not end in {SUFFIX}", hint=f"use `-o {out.with_suffix(SUFFIX)}`"
        )
    targets = out, out.with_suffix(".md"), out.with_suffix(".json")
    existing = [path for path in targets if path.exists()]
    if existing and not force:
        raise ConfigError(
            f"{existing[0]} already exists", hint="name another file, or `--force` to replace it"
        )
    return targets


def _write(
    targets: tuple[Path, Path, Path],
    record: StateRecord,
    kept: StoredModel,
    contents: FileContents,
    settings: Mapping[str, Any],
) -> ExportedModel:
    # The model last, so that a model always has its card.  Unique names: exports may run at once.
    out, *cards = targets
    suffix = f".{secrets.token_hex(4)}.tmp"
    with _write_errors(out), staged(*cards, out, suffix=suffix) as (markdown, plain, model):
        with model.open("wb") as file:
            write(file, contents.tensors, _metadata(record, kept, contents))
        facts = {
            "name": out.name,
            "bytes": model.stat().st_size,
            "sha256": file_sha256(model),
        }
        card = card_of(record, kept, contents, facts, settings)
        markdown.write_text(markdown_of(card), encoding="utf-8")
        plain.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        for path in (markdown, plain, model):
            sync(path)
    return ExportedModel(targets, card, tuple(card["warnings"]))


def _metadata(record: StateRecord, kept: StoredModel, contents: FileContents) -> dict[str, str]:
    about = record.about
    fields = {
        "format": "pt",
        "lightyear.federation": about.get("federation"),
        "lightyear.site": about.get("site"),
        "lightyear.round": str(kept.entry.round),
        "lightyear.which": str(contents.which),
        "lightyear.model_digest": kept.digest,
        "lightyear.version": about.get("version"),
    }
    return {key: str(value) for key, value in fields.items() if value is not None}


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        if problem.errno in DISK_FULL:
            raise DiskFull(
                f"{path.parent}: no space left for the model; nothing was written",
                hint="free some space there, or name a file on another disk with -o",
            ) from None
        raise StoreError(
            f"{path} cannot be written: {problem.strerror}", hint="name another file with -o"
        ) from None
