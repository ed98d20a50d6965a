"""Every reason in words: what it says about an update, and what somebody can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightyear_node.records import Reason


@dataclass(frozen=True, slots=True)
class Words:
    about: str
    advice: str


_ASK_THEM = "ask that site to look at its training data and its log"
_LINE = "`lightyear-node peers ping` goes the way to that site step by step"
_SAME = "both sites need the same version, task and peers.yaml: `lightyear-node check`"

WORDS: Mapping[Reason, Words] = {
    Reason.OK: Words("it fits: its model was merged into ours", "nothing"),
    Reason.CAUGHT_UP: Words(
        "we had fallen far behind all others, and its model does best on our validation data: it"
        " has replaced ours",
        "nothing: from here on we are near the others again",
    ),
    Reason.AGREEMENT_BELOW_TAU: Words(
        "it sees our validation data differently from our own model: the agreement is below the"
        " threshold",
        "once is nothing; if it lasts, compare labels and preparation of the data with that site,"
        " or lower `rule.tau` in node.yaml",
    ),
    Reason.TOO_FAR: Words(
        "in at least one layer its weights are farther from ours than a round of training explains",
        "if it lasts, that site trains with other settings, is broken or hostile: " + _ASK_THEM,
    ),
    Reason.LOSS_REGRET: Words(
        "on our validation data it does far worse than our own model",
        "if it lasts, its data are very different from ours or wrongly labelled: " + _ASK_THEM,
    ),
    Reason.OUTLIER: Words(
        "the rule found it to stand apart from the other sites' updates", _ASK_THEM + " if it lasts"
    ),
    Reason.OTHER_CLUSTER: Words(
        "the rule has put it into another group of sites than ours",
        "nothing: its group goes on among itself",
    ),
    Reason.NOT_SELECTED: Words(
        "the rule takes only some updates each round, and this was not among them", "nothing"
    ),
    Reason.REFUSED_BY_RULE: Words(
        "the rule gave it no weight", "the rule's own documentation says when it does so"
    ),
    Reason.NONFINITE: Words(
        "it contains numbers that are not finite, or leads to such",
        "that site's training diverges or its machine is faulty: " + _ASK_THEM,
    ),
    Reason.DOMAIN: Words(
        "it contains a negative variance, which no training produces",
        "that site's node is broken or hostile: " + _ASK_THEM,
    ),
    Reason.SCHEMA_MISMATCH: Words("its tensors are not those of our model", _SAME),
    Reason.STALE_ROUND: Words(
        "it had nothing newer than what we already used, or is rounds behind us",
        "nothing: it is served and catches up; if it never does, it is too slow for `grace`",
    ),
    Reason.CHECKSUM: Words(
        "the bytes that came are not those that it had announced",
        "something on the way spoils data, or that site's disk does: " + _LINE,
    ),
    Reason.SIGNATURE: Words(
        "what it announced is not signed with its key",
        "if it has new keys, ask for its new join line and `lightyear-node peers add` it",
    ),
    Reason.IDENTITY: Words(
        "it spoke in another site's name, or is no longer in peers.yaml",
        "compare peers.yaml with that site by telephone",
    ),
    Reason.FEDERATION: Words("it belongs to another federation", _SAME),
    Reason.VERSION: Words("it speaks another version of the protocol", "upgrade the older site"),
    Reason.ECHO: Words(
        "it announced an update of our own as its", "that site's node is broken or hostile"
    ),
    Reason.TOO_LARGE: Words("it sent more than our model has room for", _SAME),
    Reason.TRUNCATED: Words("its transfer ended before everything had come", _LINE),
    Reason.TIMEOUT: Words(
        "nothing of it had come when the round was closed",
        f"if it lasts, its line or machine is too slow for `grace`: {_LINE}",
    ),
    Reason.DISK_FULL: Words(
        "there was no room on our disk for it",
        "make room: `lightyear-node health` says how much is needed",
    ),
    Reason.UNREACHABLE: Words("it could not be reached in this round", _LINE),
    Reason.UNSCORED: Words(
        "it was here, but could not be judged", "our own log of that round says why"
    ),
    Reason.UNCONFIRMED: Words(
        "too few other sites have said that they got the same update from it",
        "nothing at first; if it lasts, some sites do not reach each other, or it tells them"
        " different things",
    ),
    Reason.PROBATION: Words(
        "it has come back without its memory, and is only watched for some rounds", "nothing"
    ),
    Reason.QUARANTINED: Words(
        "it has signed two different updates for one round: there is proof in our record",
        "find out with that site what happened; then `lightyear-node peers unquarantine` it",
    ),
    Reason.BLOCKED: Words(
        "it is blocked here: by our operator, by the rule, or because it left peers.yaml",
        "`lightyear-node peers unblock` if it was our operator",
    ),
    Reason.MALFORMED: Words("it said something that makes no sense", _SAME),
}


def words(reason: str) -> Words:
    """Also for a reason that only a later version knows."""
    try:
        return WORDS[Reason(reason)]
    except (KeyError, ValueError):
        return Words(f"this version has no words for `{reason}`", "upgrade lightyear-node")


@dataclass(frozen=True, slots=True)
class GuardLine:
    """One measurement of a verdict beside its limit."""

    name: str
    value: float
    limit: float | None
    at_most: bool
    holds: bool | None
    """None where there is nothing to compare with."""
    meaning: str


_MEASURED = {
    "distance": (
        "distance_max",
        True,
        "how far the layer that differs most is from ours, relative to the size of our own layer",
    ),
    "agreement": ("tau", False, "how alike both models see our validation data, from 0 to 1"),
    "regret": (
        "regret_max",
        True,
        "by how much its loss on our validation data is above that of our own model",
    ),
}
"""In the order in which the guard looks; see `learning.guard`."""


def guard_lines(checks: Mapping[str, Any]) -> list[GuardLine]:
    found = []
    limits = set()
    for name, (limit_name, at_most, meaning) in _MEASURED.items():
        if name not in checks:
            continue
        value, limit = checks[name], checks.get(limit_name)
        limits |= {name, limit_name}
        holds = None if limit is None else (value <= limit if at_most else value >= limit)
        found.append(GuardLine(name, value, limit, at_most, holds, meaning))
    # What other rules measure has its name, and no limit that we know of.
    others = sorted(set(checks) - limits)
    return found + [GuardLine(n, checks[n], None, True, None, "as the rule says") for n in others]
