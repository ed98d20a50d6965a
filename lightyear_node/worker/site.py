"""One site's model and data: trains, judges and merges.

Every method is a function of files: it reads weights from paths, writes weights to paths, and keeps
no state that a new worker could not read from files.  The worker and the laboratory's simulations
run the same class, so that results of simulations hold for nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.config.federation import LIGHTYEAR, ExchangeConfig, RuleConfig
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.learning import Layout, Validation, Weights, load_into, make_rule
from lightyear_node.learning.agreement import AS_DEFINED
from lightyear_node.learning.batchnorm import estimate_statistics
from lightyear_node.learning.exchanged_tensors import copy_with_ties
from lightyear_node.learning.forward import batch_rows
from lightyear_node.learning.rules import Lightyear
from lightyear_node.learning.rules.base import Candidate, Judgement, MergeShare, RoundContext, Rule
from lightyear_node.types import Check, Harm, Opened, PeerName, Round, Worth
from lightyear_node.worker import training_state
from lightyear_node.worker.import_checkpoint import (
    HEADER_SPARE_BYTES,
    CheckpointRefused,
    import_checkpoint,
)
from lightyear_node.worker.isolated_judging import judge_isolated
from lightyear_node.worker.job_types import (
    LOCAL_NAMES_MAX,
    CandidateFile,
    ExchangeSummary,
    MergeResult,
    RoundFiles,
    TrainedUpdate,
)
from lightyear_node.worker.merging import NO_LABELS, NO_LABELS_HINT, merge_with_limit
from lightyear_node.worker.rehearsal import rehearse
from lightyear_node.worker.shadow import Shadow
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import (
    Progress,
    TrainableModel,
    count_samples,
    evaluate,
    pick_device,
    split_batch,
)
from lightyear_node.worker.update_files import UpdateFiles


class LocalSite:
    def __init__(
        self,
        task: Task,
        *,
        name: str,
        seed: int,
        rule: RuleConfig,
        rounds: int | None = None,
        device: str = "auto",
        exchange: ExchangeConfig | None = None,
        tolerant: bool = False,
    ) -> None:
        """A `tolerant` site continues with weights that are not finite, as experiments need it."""
        self._task = task
        self._name = name
        self._seed = seed
        self._rule = self._make_rule(rule)
        self._harm_allowed = rule.harm_allowed
        self._rounds = rounds
        self._tolerant = tolerant
        self.device = pick_device(device)
        torch.manual_seed(seed)
        model = task.model if isinstance(task.model, nn.Module) else task.model()
        self._shared = TrainableModel(task, model, self.device)
        self._personal: TrainableModel | None = None
        if self._rule.personal_strength:
            self._personal = TrainableModel(task, copy_with_ties(model), self.device)
        self._files = UpdateFiles(self._shared.model, exchange or ExchangeConfig())
        self._validation = self._make_validation()
        start = self._files.exchanged(self._shared.model)
        reading = self._rule.reading if isinstance(self._rule, Lightyear) else AS_DEFINED
        self._validation.set_reference(start, reading=reading)
        self._zero_at_start = [name for name in start if not bool(start[name].any())]
        asked_for = self._harm_allowed is not None and rule.harm_max is not None
        if asked_for and self._validation.own_loss is None:
            raise ConfigError(NO_LABELS, hint=NO_LABELS_HINT)
        self._shadow: Shadow | None = None
        if rule.shadow:
            second = TrainableModel(task, copy_with_ties(model), self.device)
            self._shadow = Shadow(second, self._validation, self._draw_private_seed)
        self._has_trained = False
        self._round = contextlib.ExitStack()
        """What holds between `begin_round` and `end_round`: the rule's proximal term."""

    @property
    def model(self) -> nn.Module:
        return self._shared.model

    @property
    def has_personal_model(self) -> bool:
        return self._personal is not None

    @property
    def has_shadow(self) -> bool:
        return self._shadow is not None

    @property
    def wire(self) -> Layout:
        """Layout of the updates that this site sends and receives."""
        return self._files.wire

    def opened(self) -> Opened:
        reference = self._validation.reference
        return Opened(
            device=str(self.device),
            parameters=sum(parameter.numel() for parameter in self._shared.model.parameters()),
            train_samples=self._samples(),
            val_samples=reference.samples,
            head=", ".join(layer.name for layer in self._validation.final_layers),
            floor=reference.floor,
            warnings=(*self._files.warnings, *(self._shadow.warnings if self._shadow else ())),
        )

    def write_initial(self, out: Path) -> None:
        """Write the model before round 0: the same bytes at every site of the federation."""
        if self._has_trained:
            raise ValueError("the initial model is gone once training has begun")
        self._files.write_full(out, self._files.exchanged(self._shared.model))

    def train(
        self,
        *,
        base: Path,
        carry: Path | None,
        round: int,
        own: Path,
        outgoing: Path,
        carry_out: Path,
        progress: Progress = lambda done, total: None,
        measure: bool = True,
    ) -> TrainedUpdate:
        """Train one round with the task's own loop; `RoundFiles` describes the files."""
        files = RoundFiles(
            round=round, base=base, carry=carry, own=own, outgoing=outgoing, carry_out=carry_out
        )
        before = self.begin_round(files)
        self._shared.run(progress)
        if self._personal is not None:
            self._train_personal(files, before.get("personal"), progress)
        if self._shadow is not None:
            seed = self.round_seed(round)
            self._shadow.train(seed, before.get("shadow"), base, self._files, progress)
        return self.end_round(files, measure=measure)

    def begin_round(self, files: RoundFiles) -> Mapping[str, Any]:
        """Load the model and the training state, and set the seed; returns that state."""
        self._has_trained = True
        self._round.close()
        before = training_state.load(files.carry) if files.carry is not None else {}
        self._restore(self._shared, files.base, before.get("shared"))
        # The seed depends on the round alone: training again after a crash gives the same bytes.
        seed, strength = self.round_seed(files.round), self._rule.proximal_strength
        self._round.enter_context(self._shared.training(seed, proximal_strength=strength))
        return before

    def end_round(
        self,
        files: RoundFiles,
        *,
        metrics: Mapping[str, float] | None = None,
        measure: bool = True,
    ) -> TrainedUpdate:
        """Write the trained model and the training state.

        `metrics` are those of the training code itself; without them, the task's are measured.
        """
        self._round.close()
        written = self._files
        tensors = written.exchanged(self._shared.model)
        self._check_finite(tensors, files.round)
        written.write_full(files.own, tensors)
        after: dict[str, Any] = {"shared": self._shared.state(written.local_names)}
        if self._personal is not None:
            after["personal"] = self._personal.state(written.names)
        if self._shadow is not None:
            after["shadow"] = self._shadow.state()
        clamped = 0
        if written.wire != written.layout:
            clamped = written.write_update(files.outgoing, tensors)
        training_state.save(files.carry_out, after)
        if metrics is None:
            metrics = self._metrics() if measure else {}
        return TrainedUpdate(samples=self._samples(), metrics=metrics, clamped=clamped)

    def rehearse(self, *, full: bool, train: bool = True) -> tuple[list[Check], ExchangeSummary]:
        """Try one step, one batch and every metric; and say which tensors are exchanged.

        The weights in memory are useless afterwards: for a worker that does nothing else.
        """
        self._has_trained = True
        files = self._files
        exchange = ExchangeSummary(
            tensors=len(files.wire.entries),
            bytes=files.wire.file_bytes,
            local_tensors=len(files.local_names),
            local=tuple(sorted(files.local_names)[:LOCAL_NAMES_MAX]),
        )
        torch.manual_seed(self.round_seed(0))
        checks = rehearse(self._task, self._shared, self._test_data, full=full, train=train)
        return checks, exchange

    def import_checkpoint(
        self, path: Path, out: Path, *, as_peer: bool
    ) -> CheckpointRefused | None:
        """Convert a checkpoint into a file in full or, `as_peer`, into an update.

        Returns why that is not possible, or None.
        """
        state, files = self._shared.model.state_dict(), self._files
        return import_checkpoint(
            path,
            out,
            ours=files.layout,
            wanted=files.wire if as_peer else files.layout,
            also=state.keys(),
            bytes_max=sum(tensor.nbytes for tensor in state.values())
            + 4 * len(files.layout.header)
            + HEADER_SPARE_BYTES,
        )

    def judge(
        self,
        *,
        own: Path,
        before: Path,
        peers: Sequence[CandidateFile],
        round: int,
        state: Mapping[str, Any] | None = None,
        carry: Path | None = None,
        rule: RuleConfig | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Judgement:
        """A verdict for each peer; one peer's weights are in memory at a time.

        A file that cannot be read, or with which judging raises, gets its peer a verdict that says
        so; the others are judged as if it had not arrived.

        `state` is what the rule returned in the round before.  `carry` is the training state, for
        a process that has not trained.  `rule` replaces the site's own rule, for comparisons.
        """
        judging = self._rule if rule is None else _rule(rule)
        self._restore_state(carry)
        self._load_local_tensors()
        validation = self._shadow.judging(round) if self._shadow else self._validation
        read = self._files.read_full
        with read(own) as ours, read(before) as start:
            own_candidate = Candidate(PeerName(self._name), ours, self._samples())
            context = RoundContext(
                Round(round), self._rounds, start, state or {}, progress, self._zero_at_start
            )
            return judge_isolated(
                peers,
                self._files.read_update,
                lambda candidates: judging.judge(own_candidate, candidates, validation, context),
            )

    def merge(
        self,
        *,
        own: Path,
        accepted: Sequence[tuple[CandidateFile, float]],
        round: int,
        out: Path,
        carry: Path | None = None,
        worth: Worth | None = None,
        measure: bool = True,
    ) -> MergeResult:
        """Write the round's new model: deterministic, so that repeating it gives the same bytes.

        Peers' models enter as received, our own in full, not rounded as in our update.  `carry` is
        the training state, for a process that has not trained.  `worth` is that of the round
        before, for a site with a shadow.
        """
        self._restore_state(carry)
        files = self._files
        with files.read_full(own) as ours:
            shares = [
                MergeShare(peer.peer, files.read_update(peer.path), weight)
                for peer, weight in accepted
            ]
            harm = self._merge(ours, shares, Round(round), out)
            if harm is not None:
                shares = [share for share in shares if share.peer not in harm.dropped]
        with files.read_full(out) as weights:
            load_into(self._shared.model, weights)
        own_statistics = shares and self._rule.own_statistics
        if own_statistics and estimate_statistics(self._shared.model, self._validation.batches):
            files.write_full(out, files.exchanged(self._shared.model))
        metrics = self._metrics() if measure else {}
        if self._shadow is not None:
            worth = self._shadow.weigh((self._personal or self._shared).runner, round, worth)
        if self._shadow is not None and worth is not None and measure:
            worth = replace(worth, alone=_finite(self._metrics_of(self._shadow.model)))
        return MergeResult(metrics, harm, worth)

    def _make_rule(self, config: RuleConfig) -> Rule:
        return _rule(config)

    def _merge(
        self, ours: Weights, shares: Sequence[MergeShare], round: Round, out: Path
    ) -> Harm | None:
        """Merge as the rule does; None if the merge check is disabled."""
        if self._harm_allowed is None or not shares:
            self._files.write_full(out, self._rule.merge(ours, shares, round))
            return None
        self._load_local_tensors()
        validation = self._shadow.confirming(round) if self._shadow else self._validation
        return merge_with_limit(
            out, self._files, self._rule, validation, ours, shares, round, self._harm_allowed
        )

    def _load_local_tensors(self) -> None:
        """Measure models with our own values of the tensors that are not exchanged."""
        self._validation.set_local_tensors(self.local_tensors())

    def local_tensors(self) -> dict[str, Tensor]:
        """The tensors that are not exchanged."""
        state = self._shared.model.state_dict()
        return {name: state[name] for name in self._files.local_names}

    def _restore_state(self, carry: Path | None) -> None:
        """Load the training state, unless this process has trained and so holds it."""
        if carry is None or self._has_trained:
            return
        state = training_state.load(carry)
        self._shared.restore(state["shared"])
        if self._personal is not None:
            self._personal.restore(state["personal"])
        if self._shadow is not None:
            self._shadow.restore(state.get("shadow"))

    def _restore(
        self, trainable: TrainableModel, base: Path, state: Mapping[str, Any] | None
    ) -> None:
        with self._files.read_full(base) as weights:
            load_into(trainable.model, weights)
        if state is not None:
            trainable.restore(state)

    def _train_personal(
        self, files: RoundFiles, state: Mapping[str, Any] | None, progress: Progress
    ) -> None:
        assert self._personal is not None
        if state is not None:
            self._personal.restore(state)
        with self._files.read_full(files.base) as shared:
            self._personal.train(
                self.round_seed(files.round),
                progress,
                proximal_strength=self._rule.personal_strength,
                towards=shared,
            )

    def _check_finite(self, tensors: Mapping[str, Tensor], round: int) -> None:
        if self._tolerant or all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            return
        raise TaskFailed(
            f"round {round}: training ended in weights that are not finite numbers",
            hint="lower the learning rate or check the data",
        )

    def _make_validation(self) -> Validation:
        # Read once: every peer of every round is judged on the same samples.
        batches = [split_batch(self._task, batch) for batch in self._task.val_data]
        if not batches or batch_rows(batches[0]) == 0:
            raise TaskFailed("the validation data is empty", hint="check the task's `val_data`")
        return Validation(
            self._shared.model,
            batches,
            loss=self._task.loss,
            head=self._task.head,
            output=self._task.output,
            device=self.device,
        )

    def round_seed(self, round: int) -> int:
        return _seed(self._seed, self._name, round)

    def _draw_private_seed(self) -> int:
        return secrets.randbits(62)

    def _metrics(self) -> dict[str, float]:
        """Metrics of the model that this site would use: the personal one if the rule has one."""
        return self._metrics_of((self._personal or self._shared).runner)

    def _metrics_of(self, model: nn.Module) -> dict[str, float]:
        return evaluate(self._task, model, self._test_data, self.device)

    @property
    def _test_data(self) -> Iterable[Any]:
        return self._task.test_data if self._task.test_data is not None else self._task.val_data

    def _samples(self) -> int:
        if self._task.samples is not None:
            return self._task.samples
        return count_samples(self._task.train_data) or 0


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without numbers that JSON does not have: training alone may diverge."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _seed(seed: int, name: str, round: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{round}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _rule(config: RuleConfig) -> Rule:
    if config.name != LIGHTYEAR:
        return make_rule(config.name, config.options)
    known = {field.name for field in fields(Lightyear)}
    return make_rule(config.name, config.model_dump(include=known))
