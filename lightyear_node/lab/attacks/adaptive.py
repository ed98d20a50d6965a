"""Attacks that are optimized against the guard of one victim; all colluders send the same.

Each step is projected onto the distances that the guard allows, and then shortened until the guard
and the merge check, as far as the adversary can compute them, accept the message.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightyear_node.errors import InvalidTask
from lightyear_node.lab.attacks.colluding import batches_of, colluders_tasks
from lightyear_node.lab.attacks.loss_gradient import LossGradient, stepped
from lightyear_node.lab.attacks.option_values import not_negative, positive, whole
from lightyear_node.lab.attacks.victim import GuardEstimate, Victim, choose_victim
from lightyear_node.lab.attacks.weights_math import Tensors
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.worker.task import Task

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of a step that are tried, the largest first."""


def adaptive_grey(
    update: Tensors,
    context: AttackContext,
    steps: int = 20,
    rate: float = 0.1,
    victim: str | None = None,
) -> dict[str, Tensor]:
    """Raise the loss of the merged model on the colluders' validation data."""
    chosen = choose_victim(context, victim)
    if chosen is None:
        return dict(update)
    return _raised_loss(chosen, colluders_tasks(context), context, steps, rate)


adaptive_grey.common = True  # type: ignore[attr-defined]


def adaptive_white(
    update: Tensors,
    context: AttackContext,
    steps: int = 20,
    rate: float = 0.1,
    victim: str | None = None,
) -> dict[str, Tensor]:
    """Raise the loss of the merged model on the victim's own validation data."""
    chosen = choose_victim(context, victim)
    if chosen is None:
        return dict(update)
    return _raised_loss(chosen, [_task_of(chosen, context)], context, steps, rate)


adaptive_white.common = True  # type: ignore[attr-defined]


def sleeper(
    update: Tensors,
    context: AttackContext,
    awake: int = 1,
    steps: int = 20,
    rate: float = 0.1,
    victim: str | None = None,
) -> dict[str, Tensor]:
    """Send honest updates until the last rounds, and those of `adaptive_grey` then.

    Against defences that average over rounds, such as the choice of the served model.
    """
    last = whole("awake", awake, at_least=1)
    if context.rounds is None or context.round < context.rounds - last:
        return dict(update)
    return adaptive_grey(update, context, steps, rate, victim)


def overfit_v(
    update: Tensors,
    context: AttackContext,
    steps: int = 30,
    rate: float = 0.1,
    spoil: float = 0.0,
    victim: str | None = None,
) -> dict[str, Tensor]:
    """Train the victim's model on its own validation data only.

    Its loss there falls, so every check that uses these data approves; on other data it rises.
    `spoil` is the strength of a second aim: a higher loss on the colluders' training data.
    """
    chosen = choose_victim(context, victim)
    if chosen is None:
        return dict(update)
    task = _task_of(chosen, context)
    by, strength = positive("rate", rate), not_negative("spoil", spoil)
    guard = GuardEstimate(chosen, [task], context.round, len(context.colluders) + 1)
    fit = LossGradient(task, guard.batches, task.loss)
    others = None
    if strength:
        seen = batches_of(colluders_tasks(context), "train_data")
        others = LossGradient(task, seen, task.loss)
    message = dict(chosen.update)
    for _ in range(whole("steps", steps, at_least=1)):
        wanted = stepped(message, fit.at(message), chosen.limits, -by)
        if others is not None:
            wanted = stepped(wanted, others.at(message), chosen.limits, by * strength)
        found = guard.farthest_accepted(message, chosen.projected(wanted), SHARES)
        if found is None:
            break
        message = found
    return message


overfit_v.common = True  # type: ignore[attr-defined]


def _raised_loss(
    victim: Victim, tasks: Sequence[Task], context: AttackContext, steps: int, rate: float
) -> dict[str, Tensor]:
    """Gradient ascent on the loss of the victim's merged model on the validation data of `tasks`.

    The merged model is linear in the message, so their gradients have the same direction.  At a
    limit, a step down the loss makes room for another ascent.
    """
    by = positive("rate", rate)
    guard = GuardEstimate(victim, tasks, context.round, len(context.colluders) + 1)
    slope = LossGradient(tasks[0], guard.batches, tasks[0].loss)
    message = highest = dict(victim.update)
    for _ in range(whole("steps", steps, at_least=1)):
        gradient = slope.at(guard.merged(message))
        up, down = (stepped(message, gradient, victim.limits, one) for one in (by, -by))
        if (found := guard.farthest_accepted(message, victim.projected(up), SHARES)) is not None:
            message = highest = found
        elif (found := guard.farthest_accepted(message, victim.projected(down), SHARES)) is None:
            break
        else:
            message = found
    return highest


def _task_of(victim: Victim, context: AttackContext) -> Task:
    if victim.name not in context.victims:
        raise InvalidTask(
            "the victim's validation data is not known", hint="only simulations have it"
        )
    return context.victims[victim.name]
