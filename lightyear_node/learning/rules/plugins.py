"""Rules of installed packages: a function, found by its entry point, wrapped as a rule.

    def rule(own, peers, validation, context, **options) -> {peer: share of its model in the mean}

The function gets only models that can be averaged, in the order of their names.  Peers with a share
of 0, or without one, are refused; the rest of the mean is our own model.  To give reasons, checks
or a state it may return `Verdict`s or a `Judgement` instead.  The result is checked; invalid shares
are an error of the rule.

This module loads code that the operator has installed; nothing here comes from a peer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lightyear_node.errors import ConfigError, LightyearError, TaskFailed
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import PeerName, Reason, Verdict

GROUP = "lightyear_node.rules"
"""Group of the entry points in a package's pyproject.toml."""
SHARES_MAX = 1 + 1e-9
"""1, and a margin for rounding."""


@dataclass(frozen=True, slots=True)
class FunctionRule(Averaging):
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        try:
            answer = self.function(own, usable, validation, context, **self.options)
        except LightyearError:
            raise
        except Exception as error:
            raise TaskFailed(
                f"rule {self.name} raised {type(error).__name__}", private=str(error)
            ) from error
        names = {peer.peer for peer in usable}
        found, state = self._read(answer)
        self._check(found, names)
        refused = PeerFinding(Reason.REFUSED_BY_RULE)
        findings |= {name: found.get(name, refused) for name in names}
        return Judgement(verdicts_of(peers, findings), state)

    def _read(self, answer: Any) -> tuple[dict[PeerName, PeerFinding], Mapping[str, Any]]:
        if isinstance(answer, Judgement):
            return self._from_verdicts(answer.verdicts), self._checked_state(answer.state)
        if isinstance(answer, Mapping):
            return {name: self._from_share(name, share) for name, share in answer.items()}, {}
        if isinstance(answer, Sequence) and all(isinstance(item, Verdict) for item in answer):
            return self._from_verdicts(answer), {}
        raise self._wrong(f"returned a {type(answer).__name__}, not the peers' shares by name")

    def _from_share(self, name: PeerName, share: Any) -> PeerFinding:
        try:
            weight = float(share)
        except (TypeError, ValueError):
            raise self._wrong(f"gave {name} a share that is no number", repr(share)) from None
        return PeerFinding(Reason.REFUSED_BY_RULE if weight == 0 else Reason.OK, weight)

    def _from_verdicts(self, verdicts: Sequence[Verdict]) -> dict[PeerName, PeerFinding]:
        for verdict in verdicts:
            if verdict.accepted != (verdict.reason is Reason.OK):
                raise self._wrong(f"accepted {verdict.peer}: {verdict.accepted}, {verdict.reason}")
            if verdict.accepted != (verdict.weight != 0):
                raise self._wrong(
                    f"accepted {verdict.peer}: {verdict.accepted}, with weight {verdict.weight}"
                )
        return {v.peer: PeerFinding(v.reason, v.weight, v.checks) for v in verdicts}

    def _check(self, found: Mapping[PeerName, PeerFinding], names: set[PeerName]) -> None:
        if unknown := sorted(str(name) for name in found.keys() - names):
            raise self._wrong("gave a share to a name that is not among its peers", unknown[0])
        for name, finding in found.items():
            if not 0 <= finding.weight < math.inf:
                raise self._wrong(f"gave {name} the share {finding.weight}")
        total = math.fsum(finding.weight for finding in found.values())
        if total > SHARES_MAX:
            raise self._wrong(f"gave out shares that add up to {total:g}, more than a whole")

    def _checked_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state as the journal returns it, so that simulations and restarted nodes agree."""
        try:
            kept: dict[str, Any] = json.loads(json.dumps(dict(state), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise self._wrong("returned a state that JSON cannot hold", str(error)) from error
        return kept

    def _wrong(self, what: str, private: str | None = None) -> TaskFailed:
        hint = "shares are finite, not below 0, and add up to 1 at most; see docs/own-rule.md"
        return TaskFailed(f"rule {self.name} {what}", hint=hint, private=private)


def installed() -> dict[str, EntryPoint]:
    """Entry points of installed packages' rules, by name; imports nothing."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:  # the same package may be on the path twice
            raise ConfigError(
                f'{package_of(other)} and {package_of(point)} both offer a rule "{point.name}"',
                hint="uninstall one of them",
            )
    return found


def load(point: EntryPoint) -> Callable[..., Any]:
    """Import a rule's function; raises `ConfigError` for any exception of its package."""
    try:
        function = point.load()
    except Exception as error:
        raise ConfigError(
            f'rule "{point.name}" of {package_of(point)} cannot be imported:'
            f" {type(error).__name__}",
            hint=f"its entry point is {point.value}",
            private=str(error),
        ) from error
    if not callable(function):
        raise ConfigError(f'rule "{point.name}" of {package_of(point)} is not a function')
    result: Callable[..., Any] = function
    return result


def package_of(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else point.value
