"""Local training of one round, and the metrics of a model.  Plain torch: no federation in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightyear_node.errors import TaskFailed
from lightyear_node.learning.forward import KeywordInputs, call, rows_of, to_device
from lightyear_node.learning.outputs import sole_prediction
from lightyear_node.learning.wrappers import without_wrappers
from lightyear_node.worker.metrics import MetricMeter
from lightyear_node.worker.task import Task

Progress = Callable[[int, int], None]
"""Called with the number of steps done and their total."""

HUGGING_FACE_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""Keys of a batch that is passed to the model by name."""
LABELS = "labels"
PREPARE_HINT = "give Task(prepare_batch=...) that returns (input, target)"


class TrainableModel:
    """A network and its optimizer, which are trained, saved and restored together.

    `runner` is the network as the task made it, perhaps compiled; `model` is the same one without
    wrappers, whose tensors have plain names.
    """

    def __init__(self, task: Task, model: nn.Module, device: torch.device) -> None:
        self.task = task
        self.device = device
        self.runner = model
        self.model = without_wrappers(model).to(device)
        self.optimizer = task.optimizer(self.model.parameters())

    def train(
        self,
        seed: int,
        progress: Progress,
        *,
        proximal_strength: float = 0.0,
        towards: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Train one round; the same seed and state give the same weights."""
        with self.training(seed, proximal_strength=proximal_strength, towards=towards):
            self.run(progress)

    def run(self, progress: Progress) -> None:
        """Run the task's training loop; call it inside `training`."""
        train_one_round(self.task, self.runner, self.optimizer, self.device, progress)

    @contextmanager
    def training(
        self,
        seed: int,
        *,
        proximal_strength: float = 0.0,
        towards: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        """Prepare one round of training, whatever code then takes the steps.

        Sets the seed.  Adds (μ/2) ‖w − w₀‖² to the loss, where μ is `proximal_strength` and w₀ the
        weights at the start, or `towards`.
        """
        torch.manual_seed(seed)
        anchors = []
        if proximal_strength:
            given = towards if towards is not None else dict(self.model.named_parameters())
            anchors = [
                (parameter, given[name].detach().clone().to(parameter.device))
                for name, parameter in self.model.named_parameters()
                if name in given
            ]
        with _proximal_term(self.optimizer, anchors, proximal_strength):
            yield

    def state(self, names: Set[str] | None = None) -> dict[str, Any]:
        """The optimizer's state, and the tensors with these names, or all."""
        state = self.model.state_dict()
        chosen = {name: value for name, value in state.items() if names is None or name in names}
        return {"tensors": chosen, "optimizer": self.optimizer.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        own = self.model.state_dict()
        with torch.no_grad():
            for name, value in state["tensors"].items():
                own[name].copy_(value)


@contextmanager
def _proximal_term(
    optimizer: Optimizer, anchors: Iterable[tuple[nn.Parameter, Tensor]], strength: float
) -> Iterator[None]:
    """Add the term's gradient before each step, so that a user's training loop has it too."""

    by_id = {id(parameter): anchor for parameter, anchor in anchors}

    def add(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Of several optimizers, each adds the term to its own parameters.
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    anchor = by_id.get(id(parameter))
                    if anchor is not None and parameter.grad is not None:
                        parameter.grad.add_(parameter - anchor, alpha=strength)

    if not strength:
        yield
        return
    hook = optimizer.register_step_pre_hook(add)
    try:
        yield
    finally:
        hook.remove()


def pick_device(wanted: str) -> torch.device:
    if wanted != "auto":
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def split_batch(task: Task, batch: Any) -> tuple[Any, Any]:
    """Input and target of a batch, as the task's `prepare_batch` says, or by its form.

    `(x, y)`, `{"image": x, "label": y}`, or a batch for a Hugging Face model, which gets all its
    tensors by name, labels included.
    """
    if task.prepare_batch is not None:
        prepared = task.prepare_batch(batch)
        if not isinstance(prepared, tuple | list) or len(prepared) != 2:
            raise TaskFailed(
                f"prepare_batch returned {type(prepared).__name__}, not (input, target)",
                hint="correct Task(prepare_batch=...)",
            )
        return prepared[0], prepared[1]
    if isinstance(batch, Mapping):
        if any(key in batch for key in HUGGING_FACE_INPUTS):
            named = {k: v for k, v in batch.items() if isinstance(v, Tensor) or k == LABELS}
            return KeywordInputs(named), batch.get(LABELS)
        for key in ("image", "label"):
            if key not in batch:
                raise TaskFailed(
                    f'a batch has no key "{key}"',
                    hint=PREPARE_HINT,
                    private="it has " + ", ".join(map(str, batch)),
                )
        return batch["image"], batch["label"]
    if isinstance(batch, tuple | list):
        if len(batch) == 2:
            return batch[0], batch[1]
        raise TaskFailed(
            f"a batch has {len(batch)} entries, not (input, target)", hint=PREPARE_HINT
        )
    raise TaskFailed(f"a batch is a {type(batch).__name__}, not (input, target)", hint=PREPARE_HINT)


def forward(
    task: Task, model: nn.Module, batch: Any, device: torch.device, *, infer: bool = False
) -> tuple[Any, Any, int]:
    """The model's output for a batch, the target, and the number of samples."""
    x, y = to_device(split_batch(task, batch), device)
    output = task.inferer(x, model) if infer and task.inferer is not None else call(model, x)
    return output, y, rows_of(x)


def loss_of(task: Task, output: Any, target: Any) -> Tensor:
    """The task's loss; raises unless it is one number."""
    loss = task.loss(output, target)
    if not isinstance(loss, Tensor):
        raise TaskFailed(
            f"the loss returned {type(loss).__name__}, not a tensor",
            hint="return the tensor itself, without `.item()` or `float`",
        )
    if loss.numel() != 1:
        raise TaskFailed(
            f"the loss returned {loss.numel()} numbers (shape {tuple(loss.shape)}), not one",
            hint='average them: `.mean()`, or reduction="mean"',
        )
    return loss


def train_one_round(
    task: Task, model: nn.Module, optimizer: Optimizer, device: torch.device, progress: Progress
) -> None:
    """Run the task's epochs over its training data, or its own `train_round`."""
    model.train()
    if task.train_round is not None:
        task.train_round(model, optimizer, device)
        return
    total = task.epochs * len(task.train_data) if isinstance(task.train_data, Sized) else 0
    done = 0
    for _ in range(task.epochs):
        for batch in task.train_data:
            optimizer.zero_grad(set_to_none=True)
            output, target, _ = forward(task, model, batch, device)
            loss_of(task, output, target).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            progress(done, max(total, done))
    if done == 0:
        raise TaskFailed("the training data is empty", hint="check the task's `train_data`")


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, data: Iterable[Any], device: torch.device
) -> dict[str, float]:
    """The loss, averaged over samples, and every metric of the task."""
    model.eval()
    if task.evaluate is not None:
        return {name: float(value) for name, value in task.evaluate(model, device).items()}
    meters = [MetricMeter(name, metric, device) for name, metric in task.metrics.items()]
    loss = 0.0
    samples = 0
    for batch in data:
        output, target, rows = forward(task, model, batch, device, infer=True)
        samples += rows
        loss += float(loss_of(task, output, target)) * rows
        if meters:
            given = metric_inputs(task, output, target)
            for meter in meters:
                meter.add(*given, rows)
    found = {"loss": loss / max(samples, 1)}
    for meter in meters:
        found |= meter.result()
    return found


def metric_inputs(task: Task, output: Any, target: Any) -> tuple[Any, Any]:
    """What metrics get: the prediction, or of several the whole output, and the target."""
    if task.metric_inputs is not None:
        prediction, target = task.metric_inputs(output, target)
        return prediction, target
    prediction = sole_prediction(output, task.output)
    return (output if prediction is None else prediction), target


def count_samples(data: Iterable[Any]) -> int | None:
    """Length of a loader's data set; None if it has none."""
    dataset = getattr(data, "dataset", data)
    return len(dataset) if isinstance(dataset, Sized) else None
