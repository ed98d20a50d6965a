"""What an experiment left in its folder, as records: finished jobs, failed ones, measured verdicts.

Reads `results.jsonl`, `acceptance.jsonl` and `manifest.json`; computes and draws nothing.  The
order of the records depends on their content alone, never on which job happened to finish first.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError

RESULTS_NAME = "results.jsonl"
ACCEPTANCE_NAME = "acceptance.jsonl"
MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = "1"

ALONE = "local"
CLEAN = "none"
LIGHTYEAR = "lightyear"

RULE_NAMES = {
    ALONE: "local only",
    "fedavg": "FedAvg",
    "afa": "AFA",
    "asmr": "ASMR",
    "cfl": "CFL",
    "ditto": "Ditto",
    "fedprox": "FedProx",
    "krum": "Krum",
    "balance": "BALANCE",
    "scclip": "SCCLIP",
    LIGHTYEAR: "LIGHTYEAR",
}
"""In the paper's order, which every table and picture keeps."""

MALFUNCTION_NAMES = {
    CLEAN: "no malfunction",
    "ana": "noise (ANA)",
    "sfa": "flipped signs (SFA)",
    "random": "random weights",
    "dynamic": "changing (dynamic)",
}


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    malfunctioning: bool
    final: float | None
    """None where the model diverged: its score was not a finite number."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs are compared only where all of this is equal."""

    task: str
    clients: int
    rounds: int
    args: str | None
    """Of the task, as JSON; None where the results do not tell."""
    exchange: str = "{}"
    """What is not as usual in how weights travel, as JSON."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A malfunction and its strength."""

    kind: str
    scale: float | None = None

    @property
    def order(self) -> tuple[int, str, float]:
        known = list(MALFUNCTION_NAMES)
        place = known.index(self.kind) if self.kind in known else len(known)
        return (place, self.kind, -1.0 if self.scale is None else self.scale)

    @property
    def words(self) -> str:
        name = MALFUNCTION_NAMES.get(self.kind, self.kind)
        return name if self.scale is None else f"{name}, scale {self.scale:g}"


NO_FAULT = Fault(CLEAN)


@dataclass(frozen=True, slots=True)
class Row:
    """One finished job."""

    suite: str
    grid: str
    setting: Setting
    metric: str
    seed: int
    rule: str
    label: str
    terms: Mapping[str, Any]
    fault: Fault
    bad: int
    sites: Sequence[Site]
    verdicts: Mapping[str, Mapping[str, int]]
    scores: Mapping[str, Sequence[float]]
    update_bytes: int | None
    seconds: float

    @property
    def rule_order(self) -> tuple[int, bool, str]:
        known = list(RULE_NAMES)
        if self.prominent:
            place = len(known) + 1  # the last, after rules of the user's own
        else:
            place = known.index(self.rule) if self.rule in known else len(known)
        return (place, bool(self.terms.get("guard")), self.label)

    @property
    def prominent(self) -> bool:
        return self.rule == LIGHTYEAR


@dataclass(frozen=True, slots=True)
class Failure:
    what: str
    message: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything the folder has."""

    rows: Sequence[Row]
    failures: Sequence[Failure]
    acceptance: Sequence[Mapping[str, Any]]
    manifest: Mapping[str, Any]
    unreadable: int
    """Lines of the results that a power cut has torn."""


def read(directory: Path) -> Experiment:
    path = directory / RESULTS_NAME
    if not path.is_file():
        raise ConfigError(
            f"{path}: there are no results to report on",
            hint="run 'lightyear-node experiment SUITE.yaml --out DIR' first, and name its DIR",
        )
    lines, unreadable = _json_lines(path)
    newest: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for number, line in lines:
        newest[str(line.get("key", number))] = (number, line)
    rows, failures = [], []
    for number, line in newest.values():
        try:
            if line["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {line['schema_version']!r}, not '1'")
            if "failed" in line:
                failures.append(_failure(line))
            else:
                rows.append(_row(line))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            said = f"{problem.args[0]!r} is missing" if isinstance(problem, KeyError) else problem
            raise ConfigError(
                f"{path}, line {number}: not a job's result: {said}",
                hint="remove the line and run the experiment again with --resume",
            ) from None
    acceptance, torn = _acceptance(directory)
    return Experiment(
        rows=_tell_labels_apart(sorted(rows, key=_order)),
        failures=sorted(failures, key=lambda one: (one.what, one.message)),
        acceptance=acceptance,
        manifest=_manifest(directory),
        unreadable=unreadable + torn,
    )


def number_or_none(value: object) -> float | None:
    """A finite number, or None; JSON has no NaN, but Python writes one when it is let."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _json_lines(path: Path) -> tuple[list[tuple[int, Mapping[str, Any]]], int]:
    lines: list[tuple[int, Mapping[str, Any]]] = []
    unreadable = 0
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            unreadable += 1
            continue
        if isinstance(value, dict):
            lines.append((number, value))
        else:
            unreadable += 1
    return lines, unreadable


def _row(line: Mapping[str, Any]) -> Row:
    rule, terms = str(line["rule"]), dict(line.get("rule_terms") or {})
    fault = _fault(line)
    return Row(
        suite=str(line.get("suite", "")),
        grid=str(line["grid"]),
        setting=Setting(
            task=str(line["task"]),
            clients=int(line["clients"]),
            rounds=int(line["rounds"]),
            args=json.dumps(line["args"], sort_keys=True) if "args" in line else None,
            exchange=json.dumps(line.get("exchange") or {}, sort_keys=True),
        ),
        metric=str(line["metric"]),
        seed=int(line["seed"]),
        rule=rule,
        label=_label(str(line.get("label") or rule), rule, terms),
        terms=terms,
        fault=fault,
        bad=0 if fault == NO_FAULT else int(line["bad"]),
        sites=[
            Site(str(site["name"]), bool(site["malfunctioning"]), number_or_none(site["final"]))
            for site in line["sites"]
        ],
        verdicts={
            nature: {str(reason): int(count) for reason, count in counts.items()}
            for nature, counts in (line.get("verdicts") or {}).items()
        },
        scores={
            nature: [number for number in map(number_or_none, values) if number is not None]
            for nature, values in (line.get("scores") or {}).items()
        },
        update_bytes=None if line.get("update_bytes") is None else int(line["update_bytes"]),
        seconds=number_or_none(line.get("seconds")) or 0.0,
    )


def _fault(line: Mapping[str, Any]) -> Fault:
    kind = str(line["malfunction"])
    # Alone, nobody hears what a malfunctioning site sends: one run stands for all.
    if kind == CLEAN or line["rule"] == ALONE:
        return NO_FAULT
    return Fault(kind, number_or_none((line.get("malfunction_terms") or {}).get("scale")))


def _label(given: str, rule: str, terms: Mapping[str, Any]) -> str:
    """The suite's own words for the rule; a bare name, or one with terms, is spelt as usual."""
    name = RULE_NAMES.get(rule, rule)
    if given == rule:
        guarded = rule == LIGHTYEAR and terms.get("guard", True)
        measured = terms.get("harm_max") is not None
        return name + " + guard" * guarded + " + do-no-harm" * measured
    return name + given.removeprefix(rule) if given.startswith(f"{rule} (") else given


def _failure(line: Mapping[str, Any]) -> Failure:
    fault = _fault(line)
    words = [line["task"], line["grid"], str(line.get("label") or line["rule"]), fault.words]
    if fault != NO_FAULT:
        words.append(f"{line['bad']} malfunctioning")
    return Failure(", ".join([*map(str, words), f"seed {line['seed']}"]), str(line["failed"]))


def _order(row: Row) -> tuple[Any, ...]:
    setting = row.setting
    return (
        *(setting.task, row.grid, setting.clients, setting.rounds, setting.args or ""),
        setting.exchange,
        *(row.fault.order, row.bad, row.rule_order, json.dumps(row.terms, sort_keys=True)),
        row.seed,
    )


def _tell_labels_apart(rows: Sequence[Row]) -> list[Row]:
    """Two rules of one grid that differ in their terms must not share a line of a table."""
    variants: dict[tuple[Setting, str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        place = (row.setting, row.grid, row.label)
        variants[place][json.dumps(row.terms, sort_keys=True)] = row.terms
    told_apart = []
    for row in rows:
        terms = list(variants[row.setting, row.grid, row.label].values())
        extra = ", ".join(differing(row.terms, terms)) if len(terms) > 1 else ""
        told_apart.append(replace(row, label=f"{row.label} ({extra})") if extra else row)
    return told_apart


def differing(own: Mapping[str, Any], all_terms: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those of a rule's terms that tell it from the others."""
    everybody = list(all_terms)
    names = sorted({name for terms in everybody for name in terms})
    return [
        f"{name} {own.get(name)}"
        for name in names
        if len({json.dumps(terms.get(name), sort_keys=True) for terms in everybody}) > 1
    ]


def _acceptance(directory: Path) -> tuple[list[Mapping[str, Any]], int]:
    path = directory / ACCEPTANCE_NAME
    if not path.is_file():
        return [], 0
    lines, unreadable = _json_lines(path)
    for number, line in lines:
        missing = {"task", "seed", "round", "malfunction", "paper", "guard", "reason"} - line.keys()
        if missing:
            raise ConfigError(
                f"{path}, line {number}: not a measured verdict: {sorted(missing)[0]!r} is missing",
                hint="remove the file and run the experiment again with --resume",
            )
    return sorted((line for _, line in lines), key=lambda one: json.dumps(one, sort_keys=True)), (
        unreadable
    )


def _manifest(directory: Path) -> Mapping[str, Any]:
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: not a manifest (JSON is expected)",
            hint="remove the file; the report can be made without it",
        )
    return value
