"""The file that says which experiments to run: tasks × rules × malfunctions × counts × seeds.

Read as strictly as the node's own files: an unknown key, task, rule or malfunction is refused with
its line and the nearest name, before anything runs.  What a grid expands to is `jobs`' business.
Neither torch nor numpy is loaded here, so the names of rules and malfunctions are written out; a
test compares them with those that exist.  A rule of an installed package is known by its name only:
its options are looked at when it runs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from lightyear_node import strict_yaml
from lightyear_node.config.agreement import SITES_MAX, ExchangeTerms, RuleTerms
from lightyear_node.config.fields import Frozen, Name
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.config.validation import validated
from lightyear_node.errors import ConfigError
from lightyear_node.tasks import BUILT_IN

NONE = "none"
"""In place of a malfunction: every site is honest."""
RULES = (
    "local",
    "fedavg",
    "krum",
    "fedprox",
    "ditto",
    "afa",
    "asmr",
    "cfl",
    "balance",
    "scclip",
    "lightyear",
)
MALFUNCTIONS = (
    "ana",
    "sfa",
    "random",
    "dynamic",
    "noise",
    "nan",
    "head-flip",
    "head-scale",
    "bias-shift",
    "label-flip",
    "stale",
    "free-rider",
)
RULES_GROUP = "lightyear_node.rules"
"""Under this name packages that are installed announce rules of their own."""
DATA_ARGUMENT = "data"


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"


def _one_of(what: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ValueError(f"there is no {what} `{word}`: {nearest(word, known)}")


def _known_kind(malfunction: Malfunction) -> Malfunction:
    _one_of("malfunction", malfunction.kind, (NONE, *MALFUNCTIONS))
    return malfunction


def _kind_alone(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


MalfunctionChoice = Annotated[
    Malfunction, BeforeValidator(_kind_alone), AfterValidator(_known_kind)
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class RuleChoice(Frozen):
    """A rule as the suite names it: its terms, and what tables call it."""

    terms: RuleTerms
    label: str = Field(min_length=1, max_length=80)

    @model_validator(mode="before")
    @classmethod
    def _label_beside_terms(cls, value: object) -> object:
        """Users write one mapping, or just a name."""
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or "name" not in given:
            raise ValueError("a rule is a name, or a mapping with `name`")
        terms = {key: item for key, item in given.items() if key != "label"}
        return {"terms": terms, "label": given.get("label", given["name"])}

    @field_validator("terms")
    @classmethod
    def _known_rule(cls, terms: RuleTerms) -> RuleTerms:
        installed = sorted(point.name for point in entry_points(group=RULES_GROUP))
        _one_of("rule", terms.name, (*RULES, *installed))
        return terms


class _OnTask(Frozen):
    """What grids and acceptance measurements share: a task, and how many sites train it."""

    task: str
    args: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(ge=2, le=SITES_MAX)
    malfunctions: tuple[MalfunctionChoice, ...] = Field(
        default=(Malfunction(kind=NONE),), min_length=1
    )
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    exchange: ExchangeTerms = ExchangeTerms()

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str) -> str:
        if ":" in task:
            TaskEntry(entry=task)
        else:
            _one_of("built-in task", task, BUILT_IN)
        return task

    @field_validator("args")
    @classmethod
    def _plain_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        if DATA_ARGUMENT in args:
            raise ValueError(
                "`data` does not belong into a suite, which others may want to run:"
                " name the directory with --data or LIGHTYEAR_DATA"
            )
        try:
            json.dumps(args, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("arguments are numbers, words, booleans, lists and mappings") from None
        return args

    @property
    def entry(self) -> TaskEntry:
        built_in = BUILT_IN.get(self.task)
        return TaskEntry(entry=built_in.entry if built_in else self.task, args=self.args)


def _with_defaults(value: object, *keys: str) -> object:
    """What the file leaves out is the built-in task's own; other tasks have no such defaults."""
    if not isinstance(value, Mapping) or value.get("task") not in BUILT_IN:
        return value
    built_in = BUILT_IN[value["task"]]
    return {**{key: getattr(built_in, key) for key in keys}, **value}


class Grid(_OnTask):
    """Every rule under every malfunction, with every number of bad clients and every seed."""

    name: Name
    rounds: int = Field(ge=1, le=1_000_000)
    metric: str = Field(min_length=1)
    rules: tuple[RuleChoice, ...] = Field(min_length=1)
    bad: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        return _with_defaults(value, "clients", "rounds", "metric")

    @model_validator(mode="after")
    def _sensible(self) -> Grid:
        for count in self.bad:
            if not 1 <= count < self.clients:
                raise ValueError(
                    f"`bad`: {count} of {self.clients} clients cannot malfunction:"
                    " at least one does and one does not; without any it is malfunction `none`"
                )
        kinds = [one.kind for one in self.malfunctions if one.kind != NONE]
        if kinds and not self.bad:
            raise ValueError(f"`bad` is empty: how many clients have the malfunction {kinds[0]}?")
        seen: dict[str, RuleTerms] = {}
        for rule in self.rules:
            # Without a label of its own a rule is told apart by its terms, wherever it is shown.
            if rule.label == rule.terms.name:
                continue
            if seen.setdefault(rule.label, rule.terms) != rule.terms:
                raise ValueError(f"`rules`: two different rules are called `{rule.label}`")
        return self


class AcceptanceBlock(_OnTask):
    """Which messages would be accepted, judged in these rounds of an honest federation."""

    rounds: tuple[Annotated[int, Field(ge=0, lt=1_000_000)], ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        return _with_defaults(value, "clients")


class Suite(Frozen):
    name: Name
    about: str = ""
    grids: tuple[Grid, ...] = ()
    acceptance: tuple[AcceptanceBlock, ...] = ()

    @model_validator(mode="after")
    def _something_named_once(self) -> Suite:
        if not self.grids and not self.acceptance:
            raise ValueError("nothing to run: add a grid under `grids`")
        names = [grid.name for grid in self.grids]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two grids are called `{twice[0]}`")
        return self

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for block in (*self.grids, *self.acceptance) for seed in block.seeds})


def load_suite(path: Path) -> Suite:
    if not path.exists():
        raise ConfigError(f"{path}: no such file", hint="name a suite file, ending in .yaml")
    document = strict_yaml.read(path)
    try:
        return validated(Suite, document.values, document)
    except ConfigError as problem:
        # `terms` is our word: in the file a rule's settings stand beside its name.
        raise ConfigError(str(problem).replace(".terms.", "."), hint=problem.hint) from None
