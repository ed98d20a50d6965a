"""A second model that trains on the site's data and never merges: what the site would have alone.

It gets the same seed in every round as the federated model, so that without a merge both are equal.
With it, the validation data is divided in every round (`learning.confirmation`): one half judges
the peers, the other confirms the merged model and compares it with this one.  The seed of the
division is drawn in the first round and kept in the training state: no other site knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lightyear_node.errors import ConfigError
from lightyear_node.learning import Validation, load_into
from lightyear_node.learning.confirmation import SAMPLES_MIN, divided, divisible
from lightyear_node.learning.forward import batch_rows
from lightyear_node.learning.worth import comparison, weigh
from lightyear_node.types import Worth
from lightyear_node.worker.training import Progress, TrainableModel
from lightyear_node.worker.update_files import UpdateFiles

NO_LABELS = "the validation data has no labels, so the model trained alone cannot be compared"
NO_LABELS_HINT = "give the task's `val_data` labels, or set `shadow: false` in node.yaml"


class Shadow:
    def __init__(
        self, trainable: TrainableModel, validation: Validation, draw_seed: Callable[[], int]
    ) -> None:
        if validation.own_loss is None:
            raise ConfigError(NO_LABELS, hint=NO_LABELS_HINT)
        self._trainable = trainable
        self._validation = validation
        self._draw_seed = draw_seed
        self._seed: int | None = None
        """None until it has trained, or its state was restored."""
        self._samples = sum(map(batch_rows, validation.batches))
        self._divisible = divisible(validation.batches)

    @property
    def model(self) -> nn.Module:
        return self._trainable.runner

    @property
    def warnings(self) -> tuple[str, ...]:
        if self._divisible and self._samples >= SAMPLES_MIN:
            return ()
        return (
            "the validation data cannot be divided: the same samples judge peers and confirm the"
            " merged model",
        )

    def judging(self, round: int) -> Validation:
        """The validation samples that judge peers in this round."""
        return self._part(round, 0)

    def confirming(self, round: int) -> Validation:
        """The validation samples that are not used to accept a model in this round."""
        return self._part(round, 1)

    def train(
        self,
        seed: int,
        state: Mapping[str, Any] | None,
        base: Path,
        files: UpdateFiles,
        progress: Progress,
    ) -> None:
        """Train one round; without a state, it starts from the federated model."""
        if state is not None:
            self.restore(state)
        else:
            self._seed = self._draw_seed()
            with files.read_full(base) as weights:
                load_into(self._trainable.model, weights)
        self._trainable.train(seed, progress)

    def state(self) -> dict[str, Any]:
        return {**self._trainable.state(), "seed": self._seed}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state; None if this round was trained without a shadow."""
        if state is not None:
            self._trainable.restore(state)
            self._seed = state["seed"]

    def weigh(self, federated: nn.Module, round: int, before: Worth | None) -> Worth | None:
        """Compare the merged model with this one, and choose the one to serve."""
        if self._seed is None:
            return before
        confirming = self.confirming(round)
        ours, alone = confirming.scores_of(federated), confirming.scores_of(self.model)
        newest = comparison(ours.decisions.tolist(), alone.decisions.tolist())
        if ours.losses is None or alone.losses is None:
            return weigh(newest, None, before)
        losses = comparison(ours.losses.tolist(), alone.losses.tolist())
        return weigh(newest, losses, before)

    def _part(self, round: int, index: int) -> Validation:
        if not self._divisible or self._seed is None:
            return self._validation
        return self._validation.subset(divided(self._samples, self._seed, round)[index])
