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
from torch import nn

from lightyear_node.config import Malfunction, RuleTerms
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.learning import Layout, Probe, Weights, exchanged, load_into, make_rule, write
from lightyear_node.learning.forward import batch_rows
from lightyear_node.learning.malfunctions import Malfunction as MalfunctionKind
from lightyear_node.learning.malfunctions import corrupt
from lightyear_node.learning.rules import RULES
from lightyear_node.learning.rules.base import Candidate as RuleCandidate
from lightyear_node.learning.rules.base import Rule, Share
from lightyear_node.records import Opened, PeerName, Round, Verdict
from lightyear_node.worker import carry as carried
from lightyear_node.worker.jobs import Candidate, Merged, Trained
from lightyear_node.worker.task import Task
from lightyear_node.worker.train import (
    Progress,
    count_samples,
    evaluate,
    pick_device,
    split_batch,
    train_one_round,
)


class Site:
    def __init__(
        self,
        task: Task,
        *,
        name: str,
        seed: int,
        rule: RuleTerms,
        device: str = "auto",
        exclude: Sequence[str] = (),
        malfunction: Malfunction | None = None,
    ) -> None:
        self._task = task
        self._name = name
        self._seed = seed
        self._rule = _rule(rule)
        self._device = pick_device(device)
        self._malfunction = _checked(malfunction)
        self._fresh = task.model
        torch.manual_seed(seed)
        model = task.model if isinstance(task.model, nn.Module) else task.model()
        self._model = model.to(self._device)
        self._optimizer = task.optimizer(self._model.parameters())
        tensors = exchanged(self._model, exclude)
        self._layout = Layout.of(tensors)
        self._at_home = self._model.state_dict().keys() - tensors.keys()
        self._probe = self._make_probe()
        self._probe.anchor(tensors)
        self._has_trained = False

    @property
    def malfunctions(self) -> bool:
        return self._malfunction is not None

    def opened(self) -> Opened:
        reference = self._probe.reference
        return Opened(
            device=str(self._device),
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            train_samples=self._samples(),
            val_samples=reference.samples,
            head=self._probe.head.name,
            floor=reference.floor,
        )

    def write_initial(self, out: Path) -> None:
        """The model before round 0; the same bytes at every site of the federation."""
        if self._has_trained:
            raise ValueError("the initial model is gone once training has begun")
        write(out, self._layout, self._exchanged())

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
    ) -> Trained:
        """One round of local training from `base`; `outgoing` is written only by a malfunction."""
        self._has_trained = True
        with Weights(base, self._layout) as weights:
            load_into(self._model, weights)
        if carry is not None:
            carried.load(carry, self._model, self._optimizer)
        # Seeded by the round alone, so that training again after a crash gives the same bytes.
        torch.manual_seed(_seed(self._seed, self._name, round))
        train_one_round(self._task, self._model, self._optimizer, self._device, progress)
        tensors = self._exchanged()
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise TaskFailed(
                f"round {round}: training ended in weights that are not finite numbers",
                hint="lower the learning rate or check the data",
            )
        write(own, self._layout, tensors)
        carried.save(carry_out, self._model, self._optimizer, self._at_home)
        if self._malfunction is not None:
            write(outgoing, self._layout, self._corrupted(round))
        return Trained(samples=self._samples(), metrics=self._metrics())

    def judge(
        self, *, own: Path, before: Path, peers: Sequence[Candidate], round: int
    ) -> list[Verdict]:
        """A verdict for each peer; one peer's weights are in memory at a time."""
        with Weights(own, self._layout) as ours, Weights(before, self._layout) as start:
            candidates = [
                RuleCandidate(
                    peer.peer, Weights(peer.path, self._layout), peer.samples, peer.digest
                )
                for peer in peers
            ]
            return self._rule.judge(
                RuleCandidate(PeerName(self._name), ours, self._samples()),
                candidates,
                self._probe,
                Round(round),
                start=start,
            )

    def merge(
        self,
        *,
        own: Path,
        accepted: Sequence[tuple[Candidate, float]],
        round: int,
        out: Path,
    ) -> Merged:
        """The round's new model: deterministic, so that a crash in between changes nothing."""
        with Weights(own, self._layout) as ours:
            shares = [
                Share(peer.peer, Weights(peer.path, self._layout), weight)
                for peer, weight in accepted
            ]
            write(out, self._layout, self._rule.merge(ours, shares, Round(round)))
        with Weights(out, self._layout) as weights:
            load_into(self._model, weights)
        return Merged(metrics=self._metrics())

    def _make_probe(self) -> Probe:
        # Fixed once: every peer of every round is judged on the same samples.
        batches = [split_batch(self._task, batch) for batch in self._task.val_data]
        if not batches or batch_rows(batches[0]) == 0:
            raise TaskFailed("the validation data is empty", hint="check the task's `val_data`")
        return Probe(
            self._model,
            batches,
            loss=self._task.loss,
            head=self._task.head,
            device=self._device,
        )

    def _exchanged(self) -> dict[str, torch.Tensor]:
        own = self._model.state_dict()
        return {name: own[name].detach() for name in self._layout.entries}

    def _corrupted(self, round: int) -> Mapping[str, torch.Tensor]:
        assert self._malfunction is not None
        scale = self._malfunction.scale
        options = {}
        if scale is not None:
            options = {"strength": scale, "alpha": scale}
        return corrupt(
            self._malfunction.kind,
            self._exchanged(),
            seed=_seed(self._seed, self._name, round),
            round=round,
            fresh=self._fresh,
            head=self._probe.head.name,
            **options,
        )

    def _metrics(self) -> dict[str, float]:
        data = self._task.test_data if self._task.test_data is not None else self._task.val_data
        return evaluate(self._task, self._model, data, self._device)

    def _samples(self) -> int:
        if self._task.samples is not None:
            return self._task.samples
        return count_samples(self._task.train_data) or 0


def _seed(seed: int, name: str, round: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{round}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _rule(terms: RuleTerms) -> Rule:
    kind: Any = RULES.get(terms.name)
    known = {field.name for field in fields(kind)} if kind else set()
    return make_rule(terms.name, terms.model_dump(include=known))


def _checked(malfunction: Malfunction | None) -> Malfunction | None:
    if malfunction is not None and malfunction.kind not in set(MalfunctionKind):
        raise ConfigError(
            f"there is no malfunction `{malfunction.kind}`",
            hint="known: " + ", ".join(MalfunctionKind),
        )
    return malfunction
