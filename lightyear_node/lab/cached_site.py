"""A `LocalSite` that takes the result of a training from a cache if there is one.

Taking a result leaves the same files, the same models in memory and the same state of torch's
random generator as training.  What is stored is the honest result; a subclass changes what is sent
in `_as_sent`, which is called in both cases.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from lightyear_node.lab.training_cache import CachedTraining, TrainingCache
from lightyear_node.lab.training_key import Inputs, training_key
from lightyear_node.types import Digest
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import RoundFiles, TrainedUpdate
from lightyear_node.worker.site import LocalSite
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import Progress

CPU = "cpu"
"""The only device on which equal training gives equal bytes."""


class CachedSite(LocalSite):
    """Without a `cache` it trains always.  `cache_inputs` are the part of its keys that is equal
    in all rounds."""

    def __init__(
        self,
        task: Task,
        *,
        cache: TrainingCache | None = None,
        cache_inputs: Inputs | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(task, **settings)
        self._cache = cache if self.device.type == CPU else None
        self._cache_inputs = cache_inputs or {}
        self._key: Digest | None = None
        """Of the training that is in progress; None if it is not to be stored."""

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
        files = RoundFiles(
            round=round, base=base, carry=carry, own=own, outgoing=outgoing, carry_out=carry_out
        )
        self._key = None
        if self._cache is not None:
            self._key = self._key_of(files, measure)
            found = self._cache.fetch(self._key, own, carry_out)
            if found is not None:
                return self._as_sent(files, self._take(files, found, measure))
        return super().train(
            base=base,
            carry=carry,
            round=round,
            own=own,
            outgoing=outgoing,
            carry_out=carry_out,
            progress=progress,
            measure=measure,
        )

    def end_round(self, files: RoundFiles, **options: Any) -> TrainedUpdate:
        trained = super().end_round(files, **options)
        if self._cache is not None and self._key is not None:
            generator = torch.get_rng_state().numpy().tobytes().hex()
            result = CachedTraining(trained.samples, dict(trained.metrics), generator)
            self._cache.store(self._key, files.own, files.carry_out, result)
        return self._as_sent(files, trained)

    def _as_sent(self, files: RoundFiles, trained: TrainedUpdate) -> TrainedUpdate:
        """Change the update that the peers get; `files` are those of an honest site."""
        return trained

    def _key_of(self, files: RoundFiles, measure: bool) -> Digest:
        return training_key(
            self._cache_inputs,
            round=files.round,
            base=_digest(files.base),
            carry=None if files.carry is None else _digest(files.carry),
            proximal=self._rule.proximal_strength,
            personal=self._rule.personal_strength,
            shadow=self._shadow is not None,
            device=str(self.device),
            measure=measure,
        )

    def _take(self, files: RoundFiles, found: CachedTraining, measured: bool) -> TrainedUpdate:
        """Hold the models of `own` and `carry_out`, as if this site had trained them."""
        self._has_trained = True
        self._round.close()
        state = training_state.load(files.carry_out)
        self._restore(self._shared, files.own, state["shared"])
        self._shared.runner.train()
        if self._personal is not None:
            self._personal.restore(state["personal"])
            self._personal.runner.train()
        if self._shadow is not None:
            self._shadow.restore(state["shadow"])
            self._shadow.model.train()
        if measured:
            (self._personal or self._shared).runner.eval()
        clamped = 0
        if self._files.wire != self._files.layout:
            with self._files.read_full(files.own) as weights:
                clamped = self._files.write_update(files.outgoing, weights)
        generator = bytearray.fromhex(found.generator)
        torch.set_rng_state(torch.frombuffer(generator, dtype=torch.uint8))
        return TrainedUpdate(found.samples, found.metrics, clamped)


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest(hashlib.file_digest(file, "sha256").hexdigest())
