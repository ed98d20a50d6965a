"""A site whose outgoing updates are corrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.cached_site import CachedSite
from lightyear_node.lab.corrupted_updates import STALE_ROUNDS, corrupt, with_flipped_labels
from lightyear_node.lab.malfunction_plugins import Attack, AttackContext, load_plugin
from lightyear_node.lab.malfunctions import ATTACK_SUCCESS, Malfunction, MalfunctionConfig
from lightyear_node.learning import load_into
from lightyear_node.learning.exchanged_tensors import copy_with_ties
from lightyear_node.learning.rules import FunctionRule, Rule
from lightyear_node.learning.rules.options import check_options, options_of_function
from lightyear_node.types import PeerName
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import CandidateFile, RoundFiles, TrainedUpdate
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import TrainableModel

_PAST_UPDATES = "past"
"""Key in the training state of a `stale` site: its last updates, oldest first."""


class FaultySite(CachedSite):
    """Replaces each update after training; judging and merging are those of `LocalSite`.

    Without a malfunction the site is honest, but `write_corrupted` still works.  `attack` is the
    function of a malfunction that was given from Python; others are found by their kind.  If it
    `sees_others`, `train` leaves attacks to a later call of `write_corrupted`.  `rule_function` is
    a rule that was given from Python.  `success` measures how far an attack of other sites
    succeeds with a model of this one; it becomes the metric `attack_success`.
    """

    def __init__(
        self,
        task: Task,
        *,
        malfunction: MalfunctionConfig | None = None,
        attack: Attack | None = None,
        sees_others: bool = False,
        rule_function: Callable[..., Any] | None = None,
        success: Callable[[nn.Module, Task], float] | None = None,
        **settings: Any,
    ) -> None:
        self._malfunction = malfunction.checked() if malfunction is not None else None
        self._attack = attack
        self._rule_function = rule_function
        self._success = success
        if malfunction is not None and not malfunction.built_in:
            load_plugin(malfunction, attack)  # an error is reported before any training
            if sees_others:
                self._malfunction = None
        super().__init__(task, **settings)

    @property
    def task(self) -> Task:
        return self._task

    def _as_sent(self, files: RoundFiles, trained: TrainedUpdate) -> TrainedUpdate:
        if self._malfunction is None:
            return trained
        if self._malfunction.kind == Malfunction.STALE:
            clamped = self._write_stale(self._malfunction, files)
        else:
            clamped = self.write_corrupted(
                self._malfunction,
                base=files.base,
                carry=files.carry,
                own=files.own,
                round=files.round,
                out=files.outgoing,
            )
        return replace(trained, clamped=clamped)

    def write_corrupted(
        self,
        malfunction: MalfunctionConfig,
        *,
        base: Path,
        carry: Path | None,
        own: Path,
        round: int,
        out: Path,
        colluders: Sequence[CandidateFile] = (),
        honest: Sequence[CandidateFile] = (),
        tasks: Mapping[PeerName, Task] = MappingProxyType({}),
    ) -> int:
        """Write `own` as corrupted by this malfunction (any kind except `stale`).

        `base` and `carry` are the files at the start of the round.  `colluders` and `honest` are
        other sites' updates and `tasks` their tasks, which only attacks see.  Returns
        `TrainedUpdate.clamped`.
        """
        update: Mapping[str, Tensor]
        match malfunction.kind:
            case _ if not malfunction.built_in:
                read = self._files.read_update
                context = AttackContext(
                    site=PeerName(self._name),
                    round=round,
                    rounds=self._rounds,
                    seed=self.round_seed(round),
                    start=self._files.read_full(base),
                    colluders={one.peer: read(one.path) for one in colluders},
                    honest={one.peer: read(one.path) for one in honest},
                    task=self._task,
                    train=lambda task: self._trained_on(task, base, carry, round),
                    partners={one.peer: tasks[one.peer] for one in colluders if one.peer in tasks},
                    victims={one.peer: tasks[one.peer] for one in honest if one.peer in tasks},
                )
                plugin = load_plugin(malfunction, self._attack)
                update = plugin.corrupted(self._files.read_full(own), context, self._files.layout)
            case Malfunction.FREE_RIDER:
                update = self._files.read_full(base)
            case Malfunction.LABEL_FLIP:
                update = self._trained_on(with_flipped_labels(self._task), base, carry, round)
            case kind:
                update = corrupt(
                    kind,
                    self._files.read_full(own),
                    seed=self.round_seed(round),
                    round=round,
                    scale=malfunction.scale,
                    fresh=self._task.model,
                    head=self._validation.final_layers[0].name,
                )
        return self._files.write_update(out, update)

    def _make_rule(self, config: RuleConfig) -> Rule:
        if self._rule_function is None:
            return super()._make_rule(config)
        check_options(
            config.name, options_of_function(config.name, self._rule_function), config.options
        )
        return FunctionRule(config.name, self._rule_function, config.options)

    def _draw_private_seed(self) -> int:
        """Not secret here: experiments can be repeated."""
        return self.round_seed(-1) >> 1

    def measure(self, model: Path) -> dict[str, float]:
        """Metrics of a stored model, for a round in which this site does nothing."""
        with self._files.read_full(model) as weights:
            load_into(self._shared.model, weights)
        return self._metrics()

    def _metrics_of(self, model: nn.Module) -> dict[str, float]:
        found = super()._metrics_of(model)
        if self._success is None:
            return found
        return {**found, ATTACK_SUCCESS: self._success(model, self._task)}

    def _write_stale(self, malfunction: MalfunctionConfig, files: RoundFiles) -> int:
        """Send the oldest of the recent updates, which are kept in the training state."""
        before = training_state.load(files.carry) if files.carry is not None else {}
        past = [*before.get(_PAST_UPDATES, []), dict(self._files.read_full(files.own))]
        rounds = max(1, int(malfunction.scale or STALE_ROUNDS))
        state = training_state.load(files.carry_out)
        training_state.save(files.carry_out, {**state, _PAST_UPDATES: past[-rounds:]})
        return self._files.write_update(files.outgoing, past[0])

    def _trained_on(
        self, task: Task, base: Path, carry: Path | None, round: int
    ) -> dict[str, Tensor]:
        """The update of this round if the site had trained on another task."""
        trainable = TrainableModel(task, copy_with_ties(self._shared.model), self.device)
        state = training_state.load(carry)["shared"] if carry is not None else None
        self._restore(trainable, base, state)
        trainable.train(self.round_seed(round), lambda done, total: None)
        return self._files.exchanged(trainable.model)
