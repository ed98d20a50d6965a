"""One hospital's model and data, for as long as the worker lives.

Every method is a function of files: it reads weights from paths, writes weights to paths, and
remembers nothing that a new worker could not read again.  The daemon's worker and the laboratory's
simulations both run on this class, so that what is simulated is what is deployed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightyear_node.config.agreement import LIGHTYEAR, ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.learning import Layout, Probe, Weights, load_into, make_rule
from lightyear_node.learning.forward import batch_rows
from lightyear_node.learning.malfunctions import STALE_ROUNDS, corrupt
from lightyear_node.learning.malfunctions import Malfunction as MalfunctionKind
from lightyear_node.learning.rules import Lightyear
from lightyear_node.learning.rules.base import Candidate as RuleCandidate
from lightyear_node.learning.rules.base import Judgement, Rule, Share, Turn
from lightyear_node.learning.selection import twin
from lightyear_node.learning.statistics import estimate
from lightyear_node.records import Harm, Opened, PeerName, Round
from lightyear_node.worker import carry as carry_file
from lightyear_node.worker.intake import HEADER_SPARE_BYTES, Refused, take_in
from lightyear_node.worker.jobs import Candidate, Merged, Trained
from lightyear_node.worker.merging import NO_LABELS, NO_LABELS_HINT, merge_harmlessly
from lightyear_node.worker.packing import Packing
from lightyear_node.worker.task import Task
from lightyear_node.worker.train import (
    Progress,
    count_samples,
    evaluate,
    pick_device,
    split_batch,
)
from lightyear_node.worker.trainee import Trainee, poisoned


class Site:
    def __init__(
        self,
        task: Task,
        *,
        name: str,
        seed: int,
        rule: RuleTerms,
        rounds: int | None = None,
        device: str = "auto",
        exchange: ExchangeTerms | None = None,
        malfunction: Malfunction | None = None,
        tolerant: bool = False,
    ) -> None:
        """A `tolerant` site goes on with weights that are not numbers: experiments show them."""
        self._task = task
        self._name = name
        self._seed = seed
        self._rule = _rule(rule)
        self._harm_allowed = rule.harm_allowed
        self._rounds = rounds
        self._tolerant = tolerant
        self._device = pick_device(device)
        self._malfunction = _checked(malfunction)
        self._fresh = task.model
        torch.manual_seed(seed)
        model = task.model if isinstance(task.model, nn.Module) else task.model()
        self._shared = Trainee(task, model, self._device)
        self._personal: Trainee | None = None
        if self._rule.personal_strength:
            self._personal = Trainee(task, twin(model), self._device)
        self._packing = Packing(self._shared.model, exchange or ExchangeTerms())
        self._probe = self._make_probe()
        self._probe.anchor(self._packing.exchanged(model))
        asked_for = self._harm_allowed is not None and rule.harm_max is not None
        if asked_for and self._probe.own_loss is None:
            raise ConfigError(NO_LABELS, hint=NO_LABELS_HINT)
        self._has_trained = False

    @property
    def malfunctions(self) -> bool:
        return self._malfunction is not None

    @property
    def wire(self) -> Layout:
        """How the files are laid out that this site sends and receives."""
        return self._packing.wire

    def opened(self) -> Opened:
        reference = self._probe.reference
        return Opened(
            device=str(self._device),
            parameters=sum(parameter.numel() for parameter in self._shared.model.parameters()),
            train_samples=self._samples(),
            val_samples=reference.samples,
            head=self._probe.head.name,
            floor=reference.floor,
            warnings=tuple(self._packing.warnings),
        )

    def write_initial(self, out: Path) -> None:
        """The model before round 0; the same bytes at every site of the federation."""
        if self._has_trained:
            raise ValueError("the initial model is gone once training has begun")
        self._packing.keep(out, self._packing.exchanged(self._shared.model))

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
    ) -> Trained:
        """One round of local training from `base`.

        `own` is the model in full.  `outgoing` is what the peers get; it is written only where
        that is another: rounded, or changed by a malfunction.
        """
        self._has_trained = True
        packing = self._packing
        before = carry_file.load(carry) if carry is not None else {}
        self._restore(self._shared, base, before.get("shared"))
        # Seeded by the round alone, so that training again after a crash gives the same bytes.
        seed = _seed(self._seed, self._name, round)
        self._shared.train(seed, progress, pull=self._rule.proximal_strength)
        tensors = packing.exchanged(self._shared.model)
        self._check_finite(tensors, round)
        clamped = 0
        packing.keep(own, tensors)
        carried: dict[str, Any] = {"shared": self._shared.carried(packing.at_home)}
        if self._personal is not None:
            self._train_personal(base, before.get("personal"), seed, progress)
            carried["personal"] = self._personal.carried(packing.names)
        if self._malfunction is not None and self._malfunction.kind == MalfunctionKind.STALE:
            past = [*before.get("past", []), tensors]
            clamped = packing.send(outgoing, past[0])
            carried["past"] = past[-_stale_rounds(self._malfunction) :]
        elif self._malfunction is not None:
            clamped = self.pretend(
                self._malfunction, base=base, carry=carry, own=own, round=round, out=outgoing
            )
        elif packing.wire != packing.layout:
            clamped = packing.send(outgoing, tensors)
        carry_file.save(carry_out, carried)
        metrics = self._metrics() if measure else {}
        return Trained(samples=self._samples(), metrics=metrics, clamped=clamped)

    def pretend(
        self,
        malfunction: Malfunction,
        *,
        base: Path,
        carry: Path | None,
        own: Path,
        round: int,
        out: Path,
    ) -> int:
        """Write what a site with this malfunction sends in place of `own`.

        `base` and `carry` are what the round began with.  Returns what `Trained` calls `clamped`.
        """
        match malfunction.kind:
            case MalfunctionKind.FREE_RIDER:
                sent: Mapping[str, Tensor] = self._packing.kept(base)
            case MalfunctionKind.LABEL_FLIP:
                sent = self._poisoned(base, carry, round)
            case kind:
                sent = corrupt(
                    kind,
                    self._packing.kept(own),
                    seed=_seed(self._seed, self._name, round),
                    round=round,
                    scale=malfunction.scale,
                    fresh=self._fresh,
                    head=self._probe.head.name,
                )
        return self._packing.send(out, sent)

    def take_in(self, path: Path, out: Path, *, as_peer: bool) -> Refused | None:
        """A checkpoint that a person brings, as a peer's update or as a model of our own."""
        state, packing = self._shared.model.state_dict(), self._packing
        return take_in(
            path,
            out,
            ours=packing.layout,
            wanted=packing.wire if as_peer else packing.layout,
            also=state.keys(),
            bytes_max=sum(tensor.nbytes for tensor in state.values())
            + 4 * len(packing.layout.header)
            + HEADER_SPARE_BYTES,
        )

    def judge(
        self,
        *,
        own: Path,
        before: Path,
        peers: Sequence[Candidate],
        round: int,
        state: Mapping[str, Any] | None = None,
        carry: Path | None = None,
        rule: RuleTerms | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Judgement:
        """A verdict for each peer; one peer's weights are in memory at a time.

        `state` is what the rule returned in the round before, `carry` what training has left, for
        a site that was not there to train.  Another `rule` than the site's own says what a site
        under it would have judged.
        """
        judging = self._rule if rule is None else _rule(rule)
        self._recall(carry)
        self._furnish()
        kept, received = self._packing.kept, self._packing.received
        with kept(own) as ours, kept(before) as start:
            candidates = [
                RuleCandidate(peer.peer, received(peer.path), peer.samples, peer.digest)
                for peer in peers
            ]
            return judging.judge(
                RuleCandidate(PeerName(self._name), ours, self._samples()),
                candidates,
                self._probe,
                Turn(Round(round), self._rounds, start, state or {}, progress),
            )

    def merge(
        self,
        *,
        own: Path,
        accepted: Sequence[tuple[Candidate, float]],
        round: int,
        out: Path,
        carry: Path | None = None,
        measure: bool = True,
    ) -> Merged:
        """The round's new model: deterministic, so that a crash in between changes nothing.

        Peers' models enter as they were received, our own as it is, whatever rounding its copies
        at the peers went through.
        `carry` is what training has left, for a site that was not there to train.
        """
        self._recall(carry)
        kept, received = self._packing.kept, self._packing.received
        with kept(own) as ours:
            shares = [Share(peer.peer, received(peer.path), weight) for peer, weight in accepted]
            harm = self._merge(ours, shares, Round(round), out)
            if harm is not None:
                shares = [share for share in shares if share.peer not in harm.dropped]
        with kept(out) as weights:
            load_into(self._shared.model, weights)
        anew = shares and self._rule.own_statistics
        if anew and estimate(self._shared.model, self._probe.batches):
            self._packing.keep(out, self._packing.exchanged(self._shared.model))
        return Merged(metrics=self._metrics() if measure else {}, harm=harm)

    def _merge(
        self, ours: Weights, shares: Sequence[Share], round: Round, out: Path
    ) -> Harm | None:
        """As the rule says; None where what comes of it is not measured."""
        if self._harm_allowed is None or not shares:
            self._packing.keep(out, self._rule.merge(ours, shares, round))
            return None
        self._furnish()
        return merge_harmlessly(
            out, self._packing, self._rule, self._probe, ours, shares, round, self._harm_allowed
        )

    def _furnish(self) -> None:
        """Models are tried with what of ours does not travel."""
        own_state = self._shared.model.state_dict()
        self._probe.furnish({name: own_state[name] for name in self._packing.at_home})

    def _recall(self, carry: Path | None) -> None:
        """What training has left at home; a site that has trained still has it."""
        if carry is None or self._has_trained:
            return
        carried = carry_file.load(carry)
        self._shared.restore(carried["shared"])
        if self._personal is not None:
            self._personal.restore(carried["personal"])

    def _restore(self, trainee: Trainee, base: Path, carried: Mapping[str, Any] | None) -> None:
        with self._packing.kept(base) as weights:
            load_into(trainee.model, weights)
        if carried is not None:
            trainee.restore(carried)

    def _train_personal(
        self, base: Path, carried: Mapping[str, Any] | None, seed: int, progress: Progress
    ) -> None:
        assert self._personal is not None
        if carried is not None:
            self._personal.restore(carried)
        with self._packing.kept(base) as shared:
            self._personal.train(seed, progress, pull=self._rule.personal_strength, towards=shared)

    def _poisoned(self, base: Path, carry: Path | None, round: int) -> dict[str, Tensor]:
        """What this round would have given on flipped labels."""
        misled = Trainee(poisoned(self._task), twin(self._shared.model), self._device)
        carried = carry_file.load(carry)["shared"] if carry is not None else None
        self._restore(misled, base, carried)
        misled.train(_seed(self._seed, self._name, round), lambda done, total: None)
        return self._packing.exchanged(misled.model)

    def _check_finite(self, tensors: Mapping[str, Tensor], round: int) -> None:
        if self._tolerant or all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            return
        raise TaskFailed(
            f"round {round}: training ended in weights that are not finite numbers",
            hint="lower the learning rate or check the data",
        )

    def _make_probe(self) -> Probe:
        # Fixed once: every peer of every round is judged on the same samples.
        batches = [split_batch(self._task, batch) for batch in self._task.val_data]
        if not batches or batch_rows(batches[0]) == 0:
            raise TaskFailed("the validation data is empty", hint="check the task's `val_data`")
        return Probe(
            self._shared.model,
            batches,
            loss=self._task.loss,
            head=self._task.head,
            device=self._device,
        )

    def _metrics(self) -> dict[str, float]:
        """Of the model that this site would use: its personal one, where the rule keeps one."""
        data = self._task.test_data if self._task.test_data is not None else self._task.val_data
        used = self._personal or self._shared
        return evaluate(self._task, used.model, data, self._device)

    def _samples(self) -> int:
        if self._task.samples is not None:
            return self._task.samples
        return count_samples(self._task.train_data) or 0


def _seed(seed: int, name: str, round: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{round}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _rule(terms: RuleTerms) -> Rule:
    if terms.name != LIGHTYEAR:
        return make_rule(terms.name, terms.options)
    known = {field.name for field in fields(Lightyear)}
    return make_rule(terms.name, terms.model_dump(include=known))


def _checked(malfunction: Malfunction | None) -> Malfunction | None:
    if malfunction is not None and malfunction.kind not in set(MalfunctionKind):
        raise ConfigError(
            f"there is no malfunction `{malfunction.kind}`",
            hint="known: " + ", ".join(MalfunctionKind),
        )
    return malfunction


def _stale_rounds(malfunction: Malfunction) -> int:
    return max(1, int(malfunction.scale or STALE_ROUNDS))
