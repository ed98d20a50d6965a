"""Aggregation rules by name: built-in ones and those of installed packages.

Modules:

    base       interface of a rule: judge, then merge as a weighted mean
    options    options of rules and their types
    plugins    user-defined rules, found by entry point
    pairwise   distances and cosines of models from one Gram matrix
    verdicts   common verdicts of rules other than LIGHTYEAR
    lightyear  models that agree on the own validation data
    fedavg     mean of all models, weighted by samples
    fedprox    FedAvg with training regularized towards the round's start
    ditto      FedAvg with a personal model beside it
    krum       the model closest to its nearest neighbours
    afa        mean weighted by reputation, without outliers
    asmr       all models except outliers
    cfl        the larger of two clusters
    balance    models within a shrinking radius
    scclip     differences clipped to the second largest
    local      no other models: the site trains alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules import plugins
from lightyear_node.learning.rules.afa import Afa
from lightyear_node.learning.rules.asmr import Asmr
from lightyear_node.learning.rules.balance import Balance
from lightyear_node.learning.rules.base import (
    Candidate,
    Judgement,
    MergeShare,
    RoundContext,
    Rule,
    shares_of,
    weighted_mean,
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
from lightyear_node.learning.rules.plugins import FunctionRule
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
    "MergeShare",
    "RoundContext",
    "Rule",
    "SelfCentredClipping",
    "make_rule",
    "rule_names",
    "rule_options",
    "shares_of",
    "weighted_mean",
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
    """Make the rule of peers.yaml; errors for unknown names or options suggest the nearest one."""
    given = dict(options or {})
    kind, known = _look_up(name)
    check_options(name, known, given)
    if name in RULES:
        return RULES[name](**given)
    return FunctionRule(name, kind, given)


def rule_names() -> list[str]:
    """Names of all rules, the built-in ones first."""
    return [*RULES, *sorted(plugins.installed().keys() - RULES.keys())]


def rule_options(name: str) -> dict[str, str]:
    """A rule's options and their types, as in {"faulty": "int | None"}."""
    return _look_up(name)[1]


def _look_up(name: str) -> tuple[Callable[..., Any], dict[str, str]]:
    point = plugins.installed().get(name)
    if name in RULES:
        if point is not None:
            raise ConfigError(
                f'{plugins.package_of(point)} offers a rule "{name}", which is built in',
                hint="give it another name in that package's entry points",
            )
        return RULES[name], options_of_class(RULES[name])
    if point is None:
        raise ConfigError(f'there is no rule "{name}"', hint=nearest(name, rule_names()))
    function = plugins.load(point)
    return function, options_of_function(name, function)
