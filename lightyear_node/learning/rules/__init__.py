"""Aggregation rules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.base import Candidate, Rule, Share, mixed, shares_of
from lightyear_node.learning.rules.fedavg import FedAvg
from lightyear_node.learning.rules.lightyear import Lightyear

__all__ = [
    "RULES",
    "Candidate",
    "FedAvg",
    "Lightyear",
    "Rule",
    "Share",
    "make_rule",
    "mixed",
    "shares_of",
]

RULES: Mapping[str, Callable[..., Rule]] = {"lightyear": Lightyear, "fedavg": FedAvg}


def make_rule(name: str, options: Mapping[str, Any] | None = None) -> Rule:
    """The rule that peers.yaml names; a wrong name or option is refused with the nearest one."""
    if name not in RULES:
        raise ConfigError(f'there is no rule "{name}"', hint=_nearest(name, RULES))
    kind: Any = RULES[name]
    known = {field.name: field.type for field in fields(kind)}
    for option, value in (options or {}).items():
        if option not in known:
            message = f'rule {name} has no option "{option}"'
            raise ConfigError(message, hint=_nearest(option, known))
        accepted = (bool,) if known[option] == "bool" else (int, float)
        if not isinstance(value, accepted) or isinstance(value, bool) != (accepted == (bool,)):
            raise ConfigError(f"rule {name}: {option} is {value!r}, not a {known[option]}")
    rule: Rule = kind(**(options or {}))
    return rule


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(known)
