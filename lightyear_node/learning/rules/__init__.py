"""Aggregation rules by name: the built-in ones, and those of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules import own as own_rules
from lightyear_node.learning.rules.afa import Afa
from lightyear_node.learning.rules.asmr import Asmr
from lightyear_node.learning.rules.balance import Balance
from lightyear_node.learning.rules.base import (
    Candidate,
    Judgement,
    Rule,
    Share,
    Turn,
    mixed,
    shares_of,
)
from lightyear_node.learning.rules.cfl import Cfl
from lightyear_node.learning.rules.ditto import Ditto
from lightyear_node.learning.rules.fedavg import FedAvg
from lightyear_node.learning.rules.fedprox import FedProx
from lightyear_node.learning.rules.krum import Krum
from lightyear_node.learning.rules.lightyear import Lightyear
from lightyear_node.learning.rules.local import Local
from lightyear_node.learning.rules.options import (
    check_options,
    nearest,
    options_of_class,
    options_of_function,
)
from lightyear_node.learning.rules.own import FunctionRule
from lightyear_node.learning.rules.scclip import SelfCentredClipping

__all__ = [
    "RULES",
    "Afa",
    "Asmr",
    "Balance",
    "Candidate",
    "Cfl",
    "Ditto",
    "FedAvg",
    "FedProx",
    "FunctionRule",
    "Judgement",
    "Krum",
    "Lightyear",
    "Local",
    "Rule",
    "SelfCentredClipping",
    "Share",
    "Turn",
    "make_rule",
    "mixed",
    "rule_names",
    "rule_options",
    "shares_of",
]

RULES: Mapping[str, Callable[..., Rule]] = {
    "lightyear": Lightyear,
    "fedavg": FedAvg,
    "krum": Krum,
    "afa": Afa,
    "asmr": Asmr,
    "cfl": Cfl,
    "ditto": Ditto,
    "fedprox": FedProx,
    "balance": Balance,
    "scclip": SelfCentredClipping,
    "local": Local,
}


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """The rule that peers.yaml names; a wrong name or option is refused with the nearest one."""
    given = dict(options or {})
    kind, known = _look_up(name)
    check_options(name, known, given)
    if name in RULES:
        return RULES[name](**given)
    return FunctionRule(name, kind, given)


def rule_names() -> list[str]:
    """All rules there are, the built-in ones first."""
    return [*RULES, *sorted(own_rules.installed().keys() - RULES.keys())]


def rule_options(name: str) -> dict[str, str]:
    """A rule's options and each one's kind, as in {"faulty": "int | None"}."""
    return _look_up(name)[1]


def _look_up(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    point = own_rules.installed().get(name)
    if name in RULES:
        if point is not None:
            raise ConfigError(
                f'{own_rules.package_of(point)} offers a rule "{name}", which is built in',
                hint="give it another name in that package's entry points",
            )
        return RULES[name], options_of_class(RULES[name])
    if point is None:
        raise ConfigError(f'there is no rule "{name}"', hint=nearest(name, rule_names()))
    function = own_rules.load(point)
    return function, options_of_function(name, function)
