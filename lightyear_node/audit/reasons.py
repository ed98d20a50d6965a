"""An explanation of every reason of a verdict, and what an operator can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class ReasonText:
    about: str
    advice: str


_ASK_SITE = "ask that site to check its training data and its log"
_TEST_CONNECTION = "`lightyear-node peers ping` tests the connection to that site step by step"
_SAME_CONFIG = "both sites need the same version, task and peers.yaml: `lightyear-node check`"

REASON_TEXTS: Mapping[Reason, ReasonText] = {
    Reason.OK: ReasonText("it was accepted: its model was merged into ours", "nothing"),
    Reason.CAUGHT_UP: ReasonText(
        "our model had fallen far behind all others, and its model is the best one on our"
        " validation data and near most others, or better by far: it has replaced ours",
        "nothing: our model is close to the others again",
    ),
    Reason.AGREEMENT_BELOW_TAU: ReasonText(
        "its agreement with our own model on our validation data is below the threshold",
        "a single rejection is normal; if it persists, compare labels and preprocessing of the"
        " data with that site, or lower `rule.tau` in node.yaml",
    ),
    Reason.TOO_FAR: ReasonText(
        "in at least one layer its weights are farther from ours than a round of training explains",
        "if it persists, that site trains with other settings, is broken or hostile: " + _ASK_SITE,
    ),
    Reason.LOSS_REGRET: ReasonText(
        "its loss on our validation data is far above that of our own model",
        "if it persists, its data are very different from ours or wrongly labelled: " + _ASK_SITE,
    ),
    Reason.OUTLIER: ReasonText(
        "the rule classified it as an outlier among the sites' updates",
        "if it persists, " + _ASK_SITE,
    ),
    Reason.OTHER_CLUSTER: ReasonText(
        "the rule assigned it to another cluster of sites than ours",
        "nothing: each cluster trains on its own",
    ),
    Reason.NOT_SELECTED: ReasonText(
        "the rule uses only some updates in each round, and did not select this one", "nothing"
    ),
    Reason.REFUSED_BY_RULE: ReasonText(
        "the rule gave it no weight", "see the documentation of the rule"
    ),
    Reason.NONFINITE: ReasonText(
        "it contains numbers that are not finite, or leads to such numbers",
        "that site's training diverges or its machine is faulty: " + _ASK_SITE,
    ),
    Reason.DOMAIN: ReasonText(
        "it contains a negative variance, which no training produces",
        "that site's node is broken or hostile: " + _ASK_SITE,
    ),
    Reason.SCHEMA_MISMATCH: ReasonText("its tensors are not those of our model", _SAME_CONFIG),
    Reason.STALE_ROUND: ReasonText(
        "it had no newer update than the one we already used, or is rounds behind us",
        "nothing: it still receives updates and catches up; if it does not, it is too slow for"
        " `grace`",
    ),
    Reason.CHECKSUM: ReasonText(
        "the bytes received are not those that it announced",
        "the network or that site's disk corrupts data: " + _TEST_CONNECTION,
    ),
    Reason.SIGNATURE: ReasonText(
        "its announcement is not signed with its key",
        "if it has new keys, ask for its new join line and run `lightyear-node peers add`",
    ),
    Reason.IDENTITY: ReasonText(
        "it used another site's name, or is no longer in peers.yaml",
        "compare peers.yaml with that site by telephone",
    ),
    Reason.FEDERATION: ReasonText("it belongs to another federation", _SAME_CONFIG),
    Reason.VERSION: ReasonText("it uses another version of the protocol", "upgrade the older site"),
    Reason.ECHO: ReasonText(
        "it announced one of our updates as its own", "that site's node is broken or hostile"
    ),
    Reason.TOO_LARGE: ReasonText("it sent more bytes than our model has", _SAME_CONFIG),
    Reason.TRUNCATED: ReasonText("its transfer ended too early", _TEST_CONNECTION),
    Reason.TIMEOUT: ReasonText(
        "it had not arrived when the round was closed",
        f"if it persists, its network or machine is too slow for `grace`: {_TEST_CONNECTION}",
    ),
    Reason.DISK_FULL: ReasonText(
        "our disk had no space for it",
        "free some space: `lightyear-node health` shows how much is needed",
    ),
    Reason.DAMAGED: ReasonText(
        "our stored copy of it was damaged or missing, and could not be downloaded again in time",
        "if it happens again, check our own disk",
    ),
    Reason.UNREACHABLE: ReasonText("it could not be reached in this round", _TEST_CONNECTION),
    Reason.UNSCORED: ReasonText(
        "it arrived, but could not be judged", "see our own log of that round"
    ),
    Reason.UNCONFIRMED: ReasonText(
        "too few other sites have confirmed that they received the same update from it",
        "nothing at first; if it persists, some sites do not reach each other, or it sends them"
        " different updates",
    ),
    Reason.PROBATION: ReasonText(
        "it has returned without its state, and is only observed for some rounds", "nothing"
    ),
    Reason.QUARANTINED: ReasonText(
        "it has signed two different updates for one round: the proof is in our journal",
        "find the cause with that site, then run `lightyear-node peers unquarantine`",
    ),
    Reason.BLOCKED: ReasonText(
        "it is blocked here: by our operator, by the rule, or because it left peers.yaml",
        "`lightyear-node peers unblock` if it was our operator",
    ),
    Reason.MALFORMED: ReasonText(
        "it sent an invalid message, or its model cannot be read or evaluated here", _SAME_CONFIG
    ),
}


_COMPARE_TARGETS = (
    "compare the scale and unit of the targets, the preprocessing and the learning rate with that"
    " site"
)

_MEASURED_TEXTS: Mapping[Reason, ReasonText] = {
    Reason.AGREEMENT_BELOW_TAU: ReasonText(
        REASON_TEXTS[Reason.AGREEMENT_BELOW_TAU].about,
        f"a single rejection is normal; if it persists, {_COMPARE_TARGETS}, or lower `rule.tau` in"
        " node.yaml",
    ),
    Reason.TOO_FAR: ReasonText(
        REASON_TEXTS[Reason.TOO_FAR].about,
        f"if it persists, {_COMPARE_TARGETS}; targets far from zero or with a large deviation make"
        " large steps: standardize them at all sites",
    ),
    Reason.LOSS_REGRET: ReasonText(
        REASON_TEXTS[Reason.LOSS_REGRET].about, f"if it persists, {_COMPARE_TARGETS}"
    ),
}
"""Texts for tasks without class labels, such as a regression."""


def reason_text(reason: str, details: Mapping[str, Any] = MappingProxyType({})) -> ReasonText:
    """Return the text of a reason, which may come from a newer version.

    `details` are those of the verdict; see `types.Verdict`.
    """
    try:
        known = Reason(reason)
        text = REASON_TEXTS[known]
    except (KeyError, ValueError):
        return ReasonText(f"the reason `{reason}` is unknown here", "upgrade lightyear-node")
    if details.get("loss") == "measured":
        text = _MEASURED_TEXTS.get(known, text)
    tensor = details.get("tensor")
    if known is Reason.TOO_FAR and isinstance(tensor, str):
        about = f"its `{tensor}` is farther from ours than a round of training explains"
        return ReasonText(about, text.advice)
    return text


@dataclass(frozen=True, slots=True)
class GuardLine:
    """One measurement of a verdict with its limit."""

    name: str
    value: float
    limit: float | None
    at_most: bool
    holds: bool | None
    """None if there is no limit."""
    meaning: str


_MEASUREMENTS = {
    "distance": (
        "distance_max",
        True,
        "distance of its most different layer from ours, relative to the norm of our layer",
    ),
    "agreement": ("tau", False, "NTK agreement of both models on our validation data, from 0 to 1"),
    "regret": (
        "regret_max",
        True,
        "its loss on our validation data minus that of our own model",
    ),
}
"""In the order of the guard's checks; see `learning.guard`."""


def guard_lines(checks: Mapping[str, Any]) -> list[GuardLine]:
    lines = []
    known = set()
    for name, (limit_name, at_most, meaning) in _MEASUREMENTS.items():
        if name not in checks:
            continue
        value, limit = checks[name], checks.get(limit_name)
        known |= {name, limit_name}
        holds = None if limit is None else (value <= limit if at_most else value >= limit)
        lines.append(GuardLine(name, value, limit, at_most, holds, meaning))
    # Measurements of other rules have a name, but no limit that is known here.
    others = sorted(set(checks) - known)
    meaning = "see the documentation of the rule"
    return lines + [GuardLine(name, checks[name], None, True, None, meaning) for name in others]
