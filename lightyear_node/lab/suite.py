"""The suite file: experiments as tasks × rules × malfunctions × counts × seeds.

Read strictly, like the node's own files: an unknown key, task, rule or malfunction is refused with
its line and the nearest name.  `jobs` expands the grids.  Neither torch nor numpy is loaded here,
so the names of rules are listed; a test compares them with the code.  Of a rule or malfunction from
an installed package only the name is checked; its options are checked when it runs.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from lightyear_node.config import strict_yaml
from lightyear_node.config.federation import LIGHTYEAR, SITES_MAX, ExchangeConfig, RuleConfig
from lightyear_node.config.fields import FrozenModel, Name
from lightyear_node.config.node import TaskConfig
from lightyear_node.config.validation import validated
from lightyear_node.errors import ConfigError
from lightyear_node.lab.malfunctions import MalfunctionConfig, is_known, known_malfunctions
from lightyear_node.lab.partition import PartitionConfig
from lightyear_node.lab.tasks import BUILT_IN

NONE = "none"
"""Instead of a malfunction: every site is honest."""
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
RULES_GROUP = "lightyear_node.rules"
"""Entry point group of the rules in installed packages."""
DATA_ARGUMENT = "data"


def known_rules() -> tuple[str, ...]:
    """Names of the built-in rules, then of those in installed packages."""
    installed = {point.name for point in entry_points(group=RULES_GROUP)}
    return (*RULES, *sorted(installed - set(RULES)))


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean `{close[0]}`?" if close else f"known: {', '.join(known)}"


def _one_of(what: str, word: str, known: Iterable[str]) -> None:
    if word not in known:
        raise ValueError(f"there is no {what} `{word}`: {nearest(word, known)}")


def _known_kind(malfunction: MalfunctionConfig) -> MalfunctionConfig:
    if malfunction.kind == NONE:
        return malfunction
    if not is_known(malfunction.kind):
        _one_of("malfunction", malfunction.kind, (NONE, *known_malfunctions()))
    try:
        return malfunction.checked()
    except ConfigError as problem:
        raise ValueError(str(problem)) from None


def _kind_alone(value: object) -> object:
    return {"kind": value} if isinstance(value, str) else value


MalfunctionChoice = Annotated[
    MalfunctionConfig, BeforeValidator(_kind_alone), AfterValidator(_known_kind)
]
PartitionChoice = Annotated[PartitionConfig, BeforeValidator(_kind_alone)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class RuleChoice(FrozenModel):
    """A rule of the suite: its terms, and its label in tables."""

    terms: RuleConfig
    label: str = Field(min_length=1, max_length=80)

    @model_validator(mode="before")
    @classmethod
    def _split_label_and_terms(cls, value: object) -> object:
        """In the file a rule is one mapping, or just a name."""
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or "name" not in given:
            raise ValueError("a rule is a name, or a mapping with `name`")
        terms = {key: item for key, item in given.items() if key != "label"}
        return {"terms": terms, "label": given.get("label", given["name"])}

    @field_validator("terms")
    @classmethod
    def _known_rule(cls, terms: RuleConfig) -> RuleConfig:
        _one_of("rule", terms.name, known_rules())
        return terms


DEFAULT_RULE = RuleChoice.model_validate(LIGHTYEAR)


class _OnTask(FrozenModel):
    """Fields that grids and acceptance measurements share."""

    task: str
    args: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(ge=2, le=SITES_MAX)
    malfunctions: tuple[MalfunctionChoice, ...] = Field(
        default=(MalfunctionConfig(kind=NONE),), min_length=1
    )
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    exchange: ExchangeConfig = ExchangeConfig()
    partition: PartitionChoice | None = None
    """Divide the task's data among the clients again."""

    @field_validator("task")
    @classmethod
    def _known_task(cls, task: str) -> str:
        if ":" in task:
            TaskConfig(entry=task)
        else:
            _one_of("built-in task", task, BUILT_IN)
        return task

    @field_validator("args")
    @classmethod
    def _plain_arguments(cls, args: dict[str, Any]) -> dict[str, Any]:
        if DATA_ARGUMENT in args:
            raise ValueError(
                "`data` is not allowed in a suite, because suites are shared:"
                " name the directory with --data or LIGHTYEAR_DATA"
            )
        try:
            json.dumps(args, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                "arguments are numbers, strings, booleans, lists or mappings"
            ) from None
        return args

    @property
    def entry(self) -> TaskConfig:
        built_in = BUILT_IN.get(self.task)
        return TaskConfig(entry=built_in.entry if built_in else self.task, args=self.args)


def _with_defaults(value: object, *keys: str) -> object:
    """Fill in the defaults of a built-in task; other tasks have none."""
    if not isinstance(value, Mapping) or value.get("task") not in BUILT_IN:
        return value
    built_in = BUILT_IN[value["task"]]
    return {**{key: getattr(built_in, key) for key in keys}, **value}


class ExperimentGrid(_OnTask):
    """Every rule under every malfunction, with every number of bad clients and every seed."""

    name: Name
    rounds: int = Field(ge=1, le=1_000_000)
    metric: str = Field(min_length=1)
    rules: tuple[RuleChoice, ...] = Field(min_length=1)
    bad: tuple[int, ...] = ()
    participation: float = Field(default=1.0, gt=0, le=1)
    """Probability with which a client takes part in a round."""
    curves: bool = True
    """Measure after every round, not only after the last; results are the same."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        return _with_defaults(value, "clients", "rounds", "metric")

    @model_validator(mode="after")
    def _sensible(self) -> ExperimentGrid:
        for count in self.bad:
            if not 1 <= count < self.clients:
                raise ValueError(
                    f"`bad`: {count} of {self.clients} clients cannot malfunction:"
                    " at least one does and one does not; without any it is malfunction `none`"
                )
        kinds = [one.kind for one in self.malfunctions if one.kind != NONE]
        if kinds and not self.bad:
            raise ValueError(f"`bad` is empty: how many clients have the malfunction {kinds[0]}?")
        seen: dict[str, RuleConfig] = {}
        for rule in self.rules:
            # Rules without a label are distinguished by their terms.
            if rule.label == rule.terms.name:
                continue
            if seen.setdefault(rule.label, rule.terms) != rule.terms:
                raise ValueError(f"`rules`: two different rules are called `{rule.label}`")
        return self


class AcceptanceBlock(_OnTask):
    """A measurement of which messages are accepted in these rounds of an honest federation."""

    rounds: tuple[Annotated[int, Field(ge=0, lt=1_000_000)], ...] = Field(min_length=1)
    rules: tuple[RuleChoice, ...] = Field(default=(DEFAULT_RULE,), min_length=1)
    """Settings of LIGHTYEAR; each is measured with the guard and without it."""

    @field_validator("rules")
    @classmethod
    def _is_lightyear(cls, rules: tuple[RuleChoice, ...]) -> tuple[RuleChoice, ...]:
        for rule in rules:
            if rule.terms.name != LIGHTYEAR:
                raise ValueError(f"acceptance is measured with {LIGHTYEAR}, not {rule.terms.name}")
        return rules

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: object) -> object:
        return _with_defaults(value, "clients")


class Suite(FrozenModel):
    name: Name
    about: str = ""
    grids: tuple[ExperimentGrid, ...] = ()
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
        # In the file a rule's terms are beside its name, without a key `terms`.
        raise ConfigError(str(problem).replace(".terms.", "."), hint=problem.hint) from None
