"""The site that is attacked: its model, and its guard as the adversary computes it.

The rule's own code judges and merges, so an attack follows the defence when that changes.  The
victim's model at the start of a round is known in the first round only.  Without it the limits of
distances are never larger than the victim's own, so what is inside here is inside there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab.attacks.colluding import batches_of
from lightyear_node.lab.attacks.loss_gradient import network
from lightyear_node.lab.attacks.weights_math import Tensors, difference, moved
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.learning import Validation
from lightyear_node.learning.guard import ORDER, DistanceLimits
from lightyear_node.learning.merge_check import DECISIONS_MARGIN, loss_limit
from lightyear_node.learning.rules import Lightyear
from lightyear_node.learning.rules.base import Candidate, MergeShare, RoundContext
from lightyear_node.learning.worth import comparison
from lightyear_node.types import PeerName, Round, Verdict
from lightyear_node.worker.task import Task

MARGIN = 0.95
"""Share of each limit that attacks use."""
SENDER = PeerName("colluders")


@dataclass(frozen=True, slots=True)
class Victim:
    """An honest site, its update of this round and the limits of distances to it."""

    name: PeerName
    update: Tensors
    start: Tensors | None
    """Its model before this round's training, if it is known."""
    limits: DistanceLimits

    def projected(self, message: Tensors) -> dict[str, Tensor]:
        """The nearest message within the limits, tensor by tensor; statistics are the victim's."""
        found = {name: tensor.clone() for name, tensor in self.update.items()}
        for name, scale in self.limits.scales.items():
            step = message[name] - found[name]
            size = float(torch.linalg.vector_norm(step, dtype=torch.float64))
            allowed = MARGIN * self.limits.limits[name] * scale
            if size > 0:
                found[name] += step * min(1.0, allowed / size)
        return found

    def along(self, direction: Tensors, share: float = 1.0) -> dict[str, Tensor]:
        """Its model moved until one tensor is at this share of the largest distance allowed."""
        return moved(self.update, direction, share * self.scale_allowed(direction))

    def scale_allowed(self, direction: Tensors) -> float:
        """The largest factor of a direction; 0 if it does not move the model."""
        used = self.limits.farthest(self.update, moved(self.update, direction, 1.0)).share
        return MARGIN / used if used else 0.0


def choose_victim(context: AttackContext, wanted: str | None = None) -> Victim | None:
    """The honest site of this name, or the first by name; None if no honest site takes part."""
    if not context.honest:
        return None
    name = min(context.honest) if wanted is None else PeerName(wanted)
    if name not in context.honest:
        raise ConfigError(
            f"option victim is {wanted!r}, which is no honest site of this round",
            hint=f"honest sites: {', '.join(sorted(context.honest))}",
        )
    update = context.honest[name]
    start = context.start if context.round == 0 else None
    return Victim(name, update, start, DistanceLimits.of(update, start))


class GuardEstimate:
    """The guard and the merge check of a victim, computed on the validation data of `tasks`.

    The rule has its default settings.  `copies` sites send the same message.
    """

    def __init__(self, victim: Victim, tasks: Sequence[Task], round: int, copies: int) -> None:
        task = tasks[0]
        self.batches = batches_of(tasks, "val_data")
        self._victim = victim
        self._rule = Lightyear()
        self._context = RoundContext(Round(round), start=victim.start)
        self._weight = copies / (copies + 1)
        self._validation = Validation(
            network(task), self.batches, loss=task.loss, head=task.head, output=task.output
        )
        self._judge([victim.update])  # measures the victim's loss and the loss of guessing
        own_loss, self._own_decisions = self._validation.loss_and_decisions(
            victim.update, own_statistics=True
        )
        allowed = RuleConfig().harm_allowed
        assert own_loss is not None  # the guard needs labels
        assert allowed is not None
        self._loss_max = loss_limit(round, own_loss, self._validation.chance, MARGIN * allowed)

    def merged(self, message: Tensors) -> dict[str, Tensor]:
        """The victim's model after it has merged the copies of the message."""
        share = MergeShare(SENDER, message, self._weight)
        return dict(self._rule.merge(self._victim.update, [share], self._context.round))

    def accepts(self, message: Tensors) -> bool:
        """Whether the message passes all checks, and its merge the merge check, with a margin."""
        [verdict] = self._judge([message])
        if not (verdict.accepted and _with_margin(verdict)):
            return False
        merged = self.merged(message)
        loss, decisions = self._validation.loss_and_decisions(merged, own_statistics=True)
        if loss is None or loss > self._loss_max:
            return False
        if self._context.round == 0 or decisions is None or self._own_decisions is None:
            return True
        found = comparison(decisions.tolist(), self._own_decisions.tolist())
        return found.gain >= -MARGIN * DECISIONS_MARGIN * found.error

    def farthest_accepted(
        self, base: Tensors, wanted: Tensors, shares: Iterable[float]
    ) -> dict[str, Tensor] | None:
        """base + s · (wanted − base) with the first share s that is accepted; None without one."""
        step = difference(wanted, base)
        tried = (moved(base, step, share) for share in shares)
        return next((message for message in tried if self.accepts(message)), None)

    def _judge(self, messages: Sequence[Tensors]) -> Sequence[Verdict]:
        own = Candidate(self._victim.name, self._victim.update)
        peers = [Candidate(SENDER, message) for message in messages]
        return self._rule.judge(own, peers, self._validation, self._context).verdicts


def _with_margin(verdict: Verdict) -> bool:
    """Whether every recorded check has a margin to its limit."""
    checks = verdict.checks
    made = [check for check in ORDER if check.value in checks]
    return all(
        checks[check.value] <= MARGIN * checks[check.limit]
        if check.at_most
        else checks[check.value] >= checks[check.limit] / MARGIN
        for check in made
    )
