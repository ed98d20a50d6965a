"""Merging with a limit: the new model is measured, and whoever makes it too bad is left out.

Who that is `learning.harm` says.  Here the merges are made that it asks for, one file at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lightyear_node.errors import TaskFailed
from lightyear_node.learning import Probe, Weights
from lightyear_node.learning.harm import limit_of, weigh
from lightyear_node.learning.rules.base import Rule, Share
from lightyear_node.records import Harm, PeerName, Round
from lightyear_node.worker.packing import Packing

NO_LABELS = "the validation data has no labels, so nobody can tell what merging does to the model"
NO_LABELS_HINT = "give the task's `val_data` labels, or set `harm_max: false` under `rule`"


def merge_harmlessly(
    out: Path,
    packing: Packing,
    rule: Rule,
    probe: Probe,
    ours: Weights,
    shares: Sequence[Share],
    round: Round,
    harm_allowed: float,
) -> Harm:
    """Write the merge of those who are not left out; if that is nobody, our own model as it is."""

    def loss(weights: Mapping[str, Tensor]) -> float:
        found = probe.loss_of(weights, own_statistics=rule.own_statistics)
        if found is None:
            raise TaskFailed(NO_LABELS, hint=NO_LABELS_HINT)
        return found

    written: frozenset[PeerName] | None = None

    def merge(dropped: Collection[PeerName]) -> None:
        nonlocal written
        kept = [one for one in shares if one.peer not in dropped]
        packing.keep(out, rule.merge(ours, kept, round))
        written = frozenset(dropped)

    def loss_without(dropped: Collection[PeerName]) -> float:
        merge(dropped)
        with packing.kept(out) as merged:
            return loss(merged)

    own_loss = loss(ours)
    limit = limit_of(round, own_loss, probe.chance_loss, harm_allowed)
    peers = [one.peer for one in shares]
    harm = weigh(peers, loss_without, own_loss=own_loss, limit=limit)
    if written != frozenset(harm.dropped):
        merge(harm.dropped)
    return harm
