"""The model card: a model's provenance, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightyear_node import __version__
from lightyear_node.audit.rounds import RoundEntry, merge_text
from lightyear_node.tools.model_export import ModelKind
from lightyear_node.tools.model_export.stored_models import StateRecord, StoredModel
from lightyear_node.tools.model_export.tensors import TensorSlice
from lightyear_node.types import Worth

CARD_VERSION = 1
FILL_IN = "TO BE FILLED IN"
DISCLOSURE = (
    "A trained model may carry information about the data it was trained on, and from this one"
    " some of it might be reconstructed. Consider that before giving it to others."
)
_ROUNDS_SHOWN = 200
"""In the Markdown file; the JSON file has all."""


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of an exported file."""

    tensors: Sequence[TensorSlice]
    absent: Sequence[TensorSlice]
    """Tensors of the site's model that are not exchanged, and no longer kept for that round."""
    which: ModelKind
    measured: bool
    """Whether the recorded metrics are those of exactly this model."""


def card_of(
    record: StateRecord,
    kept: StoredModel,
    contents: FileContents,
    file: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The card in plain values, as written to the JSON file."""
    about, entry = record.about, kept.entry
    task = about.get("task") or settings.get("task")
    rounds = record.completed()
    return {
        "card_version": CARD_VERSION,
        "file": {
            **file,
            "tensors": len(contents.tensors),
            "parameters": sum(piece.elements for piece in contents.tensors if piece.is_float),
        },
        "model": {
            "which": str(contents.which),
            "digest": kept.digest,
            "round": entry.round,
            "best": kept.best,
            "last": kept.last,
            "carry": kept.carry_digest if kept.carry is not None else None,
            "absent": [piece.name for piece in contents.absent],
        },
        "federation": about.get("federation"),
        "site": about.get("site"),
        "task": task,
        "rule": {"name": about.get("rule"), "terms": about.get("rule_terms")},
        "rounds": {"completed": len(rounds), "agreed": about.get("rounds")},
        "metrics": {
            "before_merging": entry.sealed.get("metrics", {}),
            "after_merging": entry.committed.get("metrics", {}),
            "of_this_model": contents.measured,
            "trained_alone": (entry.committed.get("worth") or {}).get("alone", {}),
        },
        "worth": _worth(entry),
        "merge": merge_text(entry),
        "round": entry.to_plain(),
        "history": [_round_summary(one.entry) for one in rounds.values()],
        "software": {"trained_with": about.get("version"), "exported_with": __version__},
        "record": _heads(record, entry),
        "licence": FILL_IN,
        "intended_use": FILL_IN,
        "training_data": FILL_IN,
        "limitations": FILL_IN,
        "warnings": [DISCLOSURE, *_warnings(record, contents)],
        "loading": _loading(record, task, settings, file["name"]),
    }


def _worth(entry: RoundEntry) -> str | None:
    """Describe the federated model against the one trained alone; None without a shadow."""
    worth = entry.committed.get("worth")
    return Worth.from_plain(worth).description() if worth else None


def _round_summary(entry: RoundEntry) -> dict[str, Any]:
    verdicts = entry.to_plain()["verdicts"]

    def peers_with(fate: str) -> list[str]:
        return [verdict["peer"] for verdict in verdicts if verdict["fate"] == fate]

    summary = entry.summary()
    return {
        **{key: summary[key] for key in ("round", "time", "before", "after", "model")},
        **{fate: peers_with(fate) for fate in ("accepted", "rejected", "missing")},
    }


def _heads(record: StateRecord, entry: RoundEntry) -> dict[str, Any]:
    """The journal heads at this round and now; each covers all records before it."""
    seq = entry.seqs["commit"]
    hash, signature = record.heads.get(seq, (None, None))
    return {
        "round": {"seq": seq, "hash": hash, "signature": signature},
        "newest": {"seq": record.newest[0], "hash": record.newest[1]},
        "signing_key": record.about.get("signing_key"),
    }


def _warnings(record: StateRecord, contents: FileContents) -> list[str]:
    warnings = []
    if contents.which is ModelKind.ALONE:
        warnings.append(
            "This is the model that the site trained alone, of its newest training: on the site's"
            " own validation data the federated model was not better. The digest, the metrics and"
            " the merged models below are those of the federated one."
        )
    values = [piece.name for piece in contents.absent if piece.is_float]
    if values:
        warnings.append(
            f"{len(values)} tensors that stay at this site are not in the file, since they are kept"
            f" for the newest round only: {', '.join(values[:5])}{', …' * (len(values) > 5)}. The"
            " recorded metrics were measured with them."
        )
    elif not contents.measured and contents.which is not ModelKind.ALONE:
        warnings.append(
            "The recorded metrics are not those of exactly this model: they were measured with this"
            " site's personal model, or with BatchNorm statistics that stay at this site and are"
            " estimated again after every merge."
        )
    if record.bad is not None:
        warnings.append(
            f"Record {record.bad} of this site's journal does not fit the one before it: it and all"
            " later ones were left out. See `lightyear-node audit verify`."
        )
    return warnings


def _loading(
    record: StateRecord, task: str | None, settings: Mapping[str, Any], name: str
) -> str | None:
    """Python code that loads the model; complete if the task takes no arguments."""
    if task is None or ":" not in task:  # scripts and bundles build their models
        return None
    about = record.about
    sites: Sequence[str] = about.get("sites") or []
    arguments = ", ".join(f"{key!r}: ..." for key in settings.get("args") or {})
    context: dict[str, Any] = {"site_name": about.get("site")}
    if about.get("site") in sites:
        context |= {"site_index": sites.index(about["site"]), "site_count": len(sites)}
    context["seed"] = about.get("seed")
    return "\n".join(
        (
            "import torch",
            "from safetensors.torch import load_file",
            "",
            "from lightyear_node import load_task",
            "",
            f"arguments = {{{arguments}}}  # as `task.args` in node.yaml",
            f"task = load_task({task!r}, arguments, {context!r})",
            "model = task.model if isinstance(task.model, torch.nn.Module) else task.model()",
            f"found = model.load_state_dict(load_file({name!r}), strict=False)",
            "assert not found.unexpected_keys, found.unexpected_keys",
            "model.eval()",
        )
    )


def markdown_of(card: Mapping[str, Any]) -> str:
    """The card in Markdown."""
    model, file, entry = card["model"], card["file"], card["round"]
    names = " and ".join(name for name in ("best", "last") if model[name])
    head = card["record"]["round"]
    lines = [
        f"# Model of {card['site']}, round {model['round']} of federation {card['federation']}",
        "",
        *(f"> **Warning.** {warning}\n" for warning in card["warnings"]),
        "| | |",
        "|---|---|",
        *_table(
            {
                "file": f"`{file['name']}`, {file['bytes']} bytes, {file['tensors']} tensors,"
                f" {file['parameters']} parameters",
                "SHA-256 of the file": f"`{file['sha256']}`",
                "digest in the journal": f"`{model['digest']}` (of the weights as the node stores"
                " them, without the metadata that the export adds)",
                "which model": model["which"] + (f", the {names} one" if names else ""),
                "task": f"`{card['task']}`",
                "rule": f"{card['rule']['name']} {_options(card['rule']['terms'])}".strip(),
                "rounds": f"{card['rounds']['completed']} completed of"
                f" {card['rounds']['agreed'] or '?'}",
                "before merging": _numbers(card["metrics"]["before_merging"]),
                "after merging": _numbers(card["metrics"]["after_merging"]),
                **({"federated or alone": card["worth"]} if card["worth"] else {}),
                "time": entry["time"],
                "software": f"lightyear-node {card['software']['trained_with'] or '?'}, exported"
                f" with {card['software']['exported_with']}",
                "licence": card["licence"],
                "intended use": card["intended_use"],
                "training data": card["training_data"],
                "limitations": card["limitations"],
            }
        ),
        "",
        "## Merged models",
        "",
        *(f"- {sentence}" for sentence in card["merge"]),
        "",
        "| peer | verdict | reason | agreement | threshold | weight | update |",
        "|---|---|---|---|---|---|---|",
        *map(_verdict, entry["verdicts"]),
        "",
        "## Rounds",
        "",
        "| round | accepted | rejected | missing | before merging | after merging |",
        "|---|---|---|---|---|---|",
        *map(_round, card["history"][-_ROUNDS_SHOWN:]),
        "",
        "## Verifying the provenance",
        "",
        f"The round's last record in this site's journal is number {head['seq']} with hash"
        f" `{head['hash']}`, signed by the site as `{head['signature']}`. It covers all records"
        " before it: `lightyear-node audit verify`, and the heads that the other sites hold"
        " (`--peers peers.yaml`), show whether they are unchanged.",
        "",
        "## Loading",
        "",
    ]
    if card["loading"]:
        lines += ["```python", card["loading"], "```", ""]
    return "\n".join(lines)


def _table(rows: Mapping[str, str]) -> list[str]:
    return [f"| {name} | {_cell(text)} |" for name, text in rows.items()]


def _verdict(verdict: Mapping[str, Any]) -> str:
    cells = (
        verdict["peer"],
        verdict["fate"],
        f"{verdict['reason']}: {verdict['about']}",
        _number(verdict["score"]),
        _number(verdict["threshold"]),
        f"{verdict['weight']:.3f}",
        f"`{(verdict['digest'] or '')[:12]}`" if verdict["digest"] else "",
    )
    return f"| {' | '.join(_cell(str(cell)) for cell in cells)} |"


def _round(one: Mapping[str, Any]) -> str:
    fates = (", ".join(one[fate]) for fate in ("accepted", "rejected", "missing"))
    cells = (str(one["round"]), *fates, _numbers(one["before"]), _numbers(one["after"]))
    return f"| {' | '.join(map(_cell, cells))} |"


def _options(terms: Mapping[str, Any] | None) -> str:
    options = {key: value for key, value in (terms or {}).items() if key != "name"}
    return f"({json.dumps(options)})" if options else ""


def _numbers(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in metrics.items())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _cell(text: str) -> str:
    """Escape a table cell: metric names are chosen by users."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown.replace("|", "\\|")
