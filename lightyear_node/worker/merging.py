"""Merges with a limit on the harm: `learning.merge_check` chooses the peers that are left out.

This module writes and measures the merges that the check asks for, one file at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lightyear_node.errors import TaskFailed
from lightyear_node.learning import Validation, Weights
from lightyear_node.learning.merge_check import Measured, choose_dropped, loss_limit
from lightyear_node.learning.rules.base import MergeShare, Rule
from lightyear_node.learning.worth import comparison
from lightyear_node.types import Harm, PeerName, Round
from lightyear_node.worker.update_files import UpdateFiles

NO_LABELS = "the validation data has no labels, so the effect of merging cannot be measured"
NO_LABELS_HINT = "give the task's `val_data` labels, or set `harm_max: false` under `rule`"


def merge_with_limit(
    out: Path,
    files: UpdateFiles,
    rule: Rule,
    validation: Validation,
    ours: Weights,
    shares: Sequence[MergeShare],
    round: Round,
    harm_allowed: float,
) -> Harm:
    """Write the merge of the peers that are kept; if none is, our own model unchanged."""

    def measured(weights: Mapping[str, Tensor]) -> tuple[float, Tensor | None]:
        loss, scores = validation.loss_and_decisions(weights, own_statistics=rule.own_statistics)
        if loss is None:
            raise TaskFailed(NO_LABELS, hint=NO_LABELS_HINT)
        return loss, scores

    written: frozenset[PeerName] | None = None

    def merge(dropped: Collection[PeerName]) -> None:
        nonlocal written
        kept = [one for one in shares if one.peer not in dropped]
        files.write_full(out, rule.merge(ours, kept, round))
        written = frozenset(dropped)

    def measure_without(dropped: Collection[PeerName]) -> Measured:
        merge(dropped)
        with files.read_full(out) as merged:
            loss, scores = measured(merged)
        if round == 0 or scores is None or own_scores is None:
            return Measured(loss)
        found = comparison(scores.tolist(), own_scores.tolist())
        return Measured(loss, found.gain, found.error)

    own_loss, own_scores = measured(ours)
    limit = loss_limit(round, own_loss, validation.chance, harm_allowed)
    peers = [one.peer for one in shares]
    harm = choose_dropped(peers, measure_without, own_loss=own_loss, limit=limit)
    if written != frozenset(harm.dropped):
        merge(harm.dropped)
    return harm
