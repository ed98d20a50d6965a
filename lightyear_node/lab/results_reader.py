"""Reads an experiment's folder: finished jobs, failed jobs, measured verdicts.

From `results.jsonl`, `acceptance.jsonl` and `manifest.json`.  The order of the records depends on
their content only, not on the order in which jobs finished.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""In the paper's order, which every table and figure uses."""

MALFUNCTION_NAMES = {
    CLEAN: "no malfunction",
    "ana": "noise (ANA)",
    "sfa": "flipped signs (SFA)",
    "random": "random weights",
    "dynamic": "changing (dynamic)",
}


@dataclass(frozen=True, slots=True)
class SiteResultRow:
    name: str
    malfunctioning: bool
    final: float | None
    """None if the model diverged: its score is not finite."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Of the last merged model."""
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """A value for each round, by `local.*` and `merged.*`; older results have none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Only runs with equal settings are compared."""

    task: str
    clients: int
    rounds: int
    args: str | None
    """The task's arguments as JSON; None if the results do not contain them."""
    exchange: str = "{}"
    """Exchange settings that are not the default, as JSON."""
    partition: str = ""
    """A new partition of the data, as JSON; empty if the task's own was used."""
    participation: float = 1.0


@dataclass(frozen=True, slots=True)
class FaultSetting:
    """A malfunction and its strength."""

    kind: str
    scale: float | None = None
    options: str = ""
    """Of the user's own malfunction: `key=value`, separated by spaces."""

    @property
    def order(self) -> tuple[int, str, float, str]:
        known = list(MALFUNCTION_NAMES)
        place = known.index(self.kind) if self.kind in known else len(known)
        return (place, self.kind, -1.0 if self.scale is None else self.scale, self.options)

    @property
    def name(self) -> str:
        """The kind with its options."""
        return f"{self.kind} {self.options}" if self.options else self.kind

    @property
    def text(self) -> str:
        name = MALFUNCTION_NAMES.get(self.kind, self.name)
        return name if self.scale is None else f"{name}, scale {self.scale:g}"


NO_FAULT = FaultSetting(CLEAN)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One finished job."""

    suite: str
    grid: str
    setting: Setting
    metric: str
    seed: int
    rule: str
    label: str
    terms: Mapping[str, Any]
    fault: FaultSetting
    bad: int
    sites: Sequence[SiteResultRow]
    verdicts: Mapping[str, Mapping[str, int]]
    scores: Mapping[str, Sequence[float]]
    update_bytes: int | None
    seconds: float

    @property
    def rule_order(self) -> tuple[int, bool, str]:
        known = list(RULE_NAMES)
        if self.prominent:
            place = len(known) + 1  # last, after the user's own rules
        else:
            place = known.index(self.rule) if self.rule in known else len(known)
        return (place, bool(self.terms.get("guard")), self.label)

    @property
    def prominent(self) -> bool:
        return self.rule == LIGHTYEAR


@dataclass(frozen=True, slots=True)
class FailedJob:
    what: str
    message: str


@dataclass(frozen=True, slots=True)
class Experiment:
    """The contents of the folder."""

    rows: Sequence[JobRow]
    failures: Sequence[FailedJob]
    acceptance: Sequence[Mapping[str, Any]]
    manifest: Mapping[str, Any]
    unreadable: int
    """Number of incomplete lines, for example after a power cut."""

    @property
    def incomplete(self) -> str:
        """A sentence if runs of the suite have no result yet, otherwise empty."""
        planned = self.manifest.get("jobs")
        if not isinstance(planned, int) or planned <= len(self.rows):
            return ""
        return f"Incomplete: {len(self.rows)} of {planned} runs have a result."


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
            about = f"{problem.args[0]!r} is missing" if isinstance(problem, KeyError) else problem
            raise ConfigError(
                f"{path}, line {number}: not a job's result: {about}",
                hint="remove the line and run the experiment again with --resume",
            ) from None
    acceptance, torn = _acceptance(directory)
    return Experiment(
        rows=_with_distinct_labels(sorted(rows, key=_order)),
        failures=sorted(failures, key=lambda one: (one.what, one.message)),
        acceptance=acceptance,
        manifest=_manifest(directory),
        unreadable=unreadable + torn,
    )


def number_or_none(value: object) -> float | None:
    """Return a finite number or None; Python's JSON may contain NaN."""
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


def _row(line: Mapping[str, Any]) -> JobRow:
    rule, terms = str(line["rule"]), dict(line.get("rule_terms") or {})
    fault = _fault(line)
    return JobRow(
        suite=str(line.get("suite", "")),
        grid=str(line["grid"]),
        setting=Setting(
            task=str(line["task"]),
            clients=int(line["clients"]),
            rounds=int(line["rounds"]),
            args=json.dumps(line["args"], sort_keys=True) if "args" in line else None,
            exchange=json.dumps(line.get("exchange") or {}, sort_keys=True),
            partition=json.dumps(line["partition"], sort_keys=True)
            if line.get("partition")
            else "",
            participation=float(line.get("participation", 1.0)),
        ),
        metric=str(line["metric"]),
        seed=int(line["seed"]),
        rule=rule,
        label=_label(str(line.get("label") or rule), rule, terms),
        terms=terms,
        fault=fault,
        bad=0 if fault == NO_FAULT else int(line["bad"]),
        sites=[_site(site) for site in line["sites"]],
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


def _site(site: Mapping[str, Any]) -> SiteResultRow:
    return SiteResultRow(
        name=str(site["name"]),
        malfunctioning=bool(site["malfunctioning"]),
        final=number_or_none(site["final"]),
        metrics={name: number_or_none(v) for name, v in (site.get("metrics") or {}).items()},
        curves={
            name: [number_or_none(value) for value in values]
            for name, values in (site.get("curves") or {}).items()
        },
    )


def _fault(line: Mapping[str, Any]) -> FaultSetting:
    kind = str(line["malfunction"])
    # Alone, sites receive nothing: one run stands for all malfunctions.
    if kind == CLEAN or line["rule"] == ALONE:
        return NO_FAULT
    terms = line.get("malfunction_terms") or {}
    options = [f"{key}={value}" for key, value in sorted((terms.get("options") or {}).items())]
    return FaultSetting(kind, number_or_none(terms.get("scale")), " ".join(options))


def _label(given: str, rule: str, terms: Mapping[str, Any]) -> str:
    """The label of the suite; a rule without one gets its usual name."""
    name = RULE_NAMES.get(rule, rule)
    if given == rule:
        guarded = rule == LIGHTYEAR and terms.get("guard", True)
        measured = terms.get("harm_max") is not None
        shadow = bool(terms.get("shadow"))
        return name + " + guard" * guarded + " + do-no-harm" * measured + " + shadow" * shadow
    return name + given.removeprefix(rule) if given.startswith(f"{rule} (") else given


def _failure(line: Mapping[str, Any]) -> FailedJob:
    fault = _fault(line)
    parts = [line["task"], line["grid"], str(line.get("label") or line["rule"]), fault.text]
    if fault != NO_FAULT:
        parts.append(f"{line['bad']} malfunctioning")
    return FailedJob(", ".join([*map(str, parts), f"seed {line['seed']}"]), str(line["failed"]))


def _order(row: JobRow) -> tuple[Any, ...]:
    setting = row.setting
    return (
        *(setting.task, row.grid, setting.clients, setting.rounds, setting.args or ""),
        *(setting.exchange, setting.partition, setting.participation),
        *(row.fault.order, row.bad, row.rule_order, json.dumps(row.terms, sort_keys=True)),
        row.seed,
    )


def _with_distinct_labels(rows: Sequence[JobRow]) -> list[JobRow]:
    """Add the terms to labels of one grid that stand for different rules."""
    variants: dict[tuple[Setting, str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        place = (row.setting, row.grid, row.label)
        variants[place][json.dumps(row.terms, sort_keys=True)] = row.terms
    found = []
    for row in rows:
        terms = list(variants[row.setting, row.grid, row.label].values())
        extra = ", ".join(differing(row.terms, terms)) if len(terms) > 1 else ""
        found.append(replace(row, label=f"{row.label} ({extra})") if extra else row)
    return found


def differing(own: Mapping[str, Any], all_terms: Iterable[Mapping[str, Any]]) -> list[str]:
    """The terms of a rule that differ among the given rules."""
    every = list(all_terms)
    names = sorted({name for terms in every for name in terms})
    return [
        f"{name} {own.get(name)}"
        for name in names
        if len({json.dumps(terms.get(name), sort_keys=True) for terms in every}) > 1
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
            hint="remove the file; the report does not need it",
        )
    return value
