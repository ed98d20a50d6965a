"""A task from a MONAI bundle, `task: {bundle: path}` in node.yaml.

Of the bundle's training configuration it uses the network, loss, optimizer, data loaders, inferer,
postprocessing and metrics.  The node trains, measures and stores the model itself: the bundle's
trainer, evaluator and handlers are not run.

A sliding-window inferer means that volumes are larger than what the network is trained on, and may
differ in size.  Peers are then judged on one window of each validation volume, around the labelled
voxels; metrics are measured on whole volumes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node import Task
from lightyear_node.errors import ConfigError, LightyearError, TaskFailed

CONFIG_NAMES = ("train.json", "train.yaml", "train.yml")
REQUIRED = {
    "network_def": "the network",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "train::dataloader": "the training data",
    "validate::dataloader": "the validation data, which peers are judged on",
}
"""Keys without which there is no task, and what they are for."""
UNUSED = ("train::handlers", "validate::handlers")
METRICS = ("validate::key_metric", "validate::additional_metrics")
WINDOWS_PER_BATCH = 4


def build(
    bundle: str,
    overrides: Mapping[str, Any],
    site_name: str = "",
    site_index: int = 0,
    site_count: int = 1,
    seed: int = 0,
) -> Task:
    """Build the task; `overrides` and what a node knows replace keys of the configuration."""
    known = {"site_name": site_name, "site_index": site_index, "site_count": site_count}
    config = BundleConfig(Path(bundle), overrides, {**known, "seed": seed})
    unused = [key for key in UNUSED if key in config]
    if unused:
        print(f"{bundle}: not run, the node does this itself: {', '.join(unused)}", file=sys.stderr)
    loader, inferer = config.get("validate::dataloader"), config.find("validate::inferer")
    prepare = config.find("train::trainer::prepare_batch")
    postprocess = config.find("validate::postprocessing")
    window = getattr(inferer, "roi_size", None)
    return Task(
        model=lambda: config.get("network_def"),
        loss=config.get("loss"),
        optimizer=config.optimizer,
        train_data=config.get("train::dataloader"),
        val_data=loader if window is None else _Windows(loader, window),
        test_data=loader,
        metrics=config.metrics(),
        metric_inputs=_postprocessed(postprocess) if postprocess is not None else None,
        inferer=inferer,
        epochs=int(config.find("train::trainer::max_epochs") or 1),
        prepare_batch=(lambda batch: prepare(batch, None, False)) if prepare is not None else None,
    )


class BundleConfig:
    """The training configuration of a bundle; errors name the key."""

    def __init__(
        self, root: Path, overrides: Mapping[str, Any], context: Mapping[str, Any]
    ) -> None:
        self._root = root
        self._file = next(
            (root / "configs" / n for n in CONFIG_NAMES if (root / "configs" / n).is_file()), None
        )
        if self._file is None:
            raise ConfigError(
                f"the bundle {root} has no configs/{CONFIG_NAMES[0]}",
                hint="set `task.bundle` in node.yaml to the folder that holds `configs`",
            )
        try:
            bundles = importlib.import_module("monai.bundle")
        except ModuleNotFoundError as problem:
            raise ConfigError(
                f"a bundle needs the package `{problem.name}`, which is not installed",
                hint="install it in this environment (pip install 'lightyear-node[medical]')",
            ) from problem
        sys.path.insert(1, str(root))  # for the bundle's own `scripts`
        self._workflow = self._built(
            "configuration",
            lambda: bundles.ConfigWorkflow(
                str(self._file),
                meta_file=str(root / "configs" / "metadata.json"),
                logging_file=False,
                workflow_type="train",
            ),
        )
        self._parser = self._workflow.parser
        self._override({"bundle_root": str(root), **context}, overrides)
        missing = next((key for key in REQUIRED if key not in self), None)
        if missing is not None:
            raise ConfigError(
                f"the bundle {root} has no `{missing}` in {self._file.name}: {REQUIRED[missing]}",
                hint=f"add `{missing}` to {self._file}, or give it in `task.args`",
            )
        self._built("initialize", self._workflow.initialize)

    def _override(self, defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
        for key in overrides:
            # Nested keys may be new, such as another argument of a loss.
            if key.replace("#", "::").split("::")[0] not in self._parser:
                raise ConfigError(
                    f"the bundle {self._root} has no key `{key}`, which `task.args` overrides",
                    hint=f"it has: {', '.join(self._parser.get())}",
                )
        present = {key: value for key, value in defaults.items() if key in self._parser}
        self._parser.update({**present, **overrides})

    def __contains__(self, key: str) -> bool:
        return key in self._parser

    def get(self, key: str) -> Any:
        """The object that a key of the configuration describes; the same at every call."""
        return self._built(key, lambda: self._parser.get_parsed_content(key))

    def find(self, key: str) -> Any:
        """As `get`; None if the configuration does not have the key."""
        return self.get(key) if key in self else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """The bundle's optimizer, or one with its settings for the parameters of another copy."""
        wanted = list(parameters)
        own = list(self.get("network_def").parameters())
        if [id(one) for one in own] == [id(one) for one in wanted]:
            return self.get("optimizer")
        component = self._built(
            "optimizer",
            lambda: self._parser.get_parsed_content("optimizer", instantiate=False),
        )
        return self._built("optimizer", lambda: component.instantiate(params=wanted))

    def metrics(self) -> dict[str, Any]:
        """The metrics by name; of a handler, which needs ignite, the metric inside it."""
        found: dict[str, Any] = {}
        for key in METRICS:
            metrics = self.find(key)
            if isinstance(metrics, Mapping):
                found |= metrics
            elif metrics is not None:
                found[key.partition("::")[2]] = metrics
        return {name: getattr(metric, "metric_fn", metric) for name, metric in found.items()}

    def _built(self, key: str, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except (LightyearError, OSError):
            raise
        except Exception as problem:  # the bundle's configuration may run anything
            missing = _missing_package(problem)
            if missing is not None:
                raise ConfigError(
                    f"`{key}` of the bundle {self._root} needs the package `{missing}`,"
                    " which is not installed",
                    hint=f"install it in this environment, or replace `{key}` in `task.args`",
                ) from problem
            raise TaskFailed(
                f"`{key}` of the bundle {self._root} cannot be built",
                private=_causes(problem),
            ) from problem


def _chain(problem: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = problem
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _missing_package(problem: BaseException) -> str | None:
    """The package that is not installed, if that is the cause; MONAI raises an error of its own."""
    for one in _chain(problem):
        if isinstance(one, ModuleNotFoundError) and one.name:
            return one.name.partition(".")[0]
        if type(one).__name__ == "OptionalImportError" and "ignite" in str(one):
            return "pytorch-ignite"
    return None


def _causes(problem: BaseException) -> str:
    texts = [f"{type(one).__name__}: {one}" for one in _chain(problem)]
    return "; caused by ".join(texts)


def _postprocessed(
    transform: Callable[[dict[str, Any]], Mapping[str, Any]],
) -> Callable[[Any, Any], tuple[list[Any], list[Any]]]:
    """Apply the bundle's postprocessing to each sample, as its evaluator does."""

    def prepare(output: Any, target: Any) -> tuple[list[Any], list[Any]]:
        samples = [
            transform({"pred": prediction, "label": label})
            for prediction, label in zip(output, target, strict=True)
        ]
        return [one["pred"] for one in samples], [one["label"] for one in samples]

    return prepare


class _Windows:
    """One window of each volume, all of the inferer's size, in batches (image, label)."""

    def __init__(self, loader: Iterable[Any], size: int | Sequence[int]) -> None:
        self._loader = loader
        self._size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        held: list[tuple[Tensor, Tensor]] = []
        for batch in self._loader:
            for image, label in zip(batch["image"], batch["label"], strict=True):
                held.append(_window(image, label, self._size))
                if len(held) == WINDOWS_PER_BATCH:
                    yield _stacked(held)
                    held = []
        if held:
            yield _stacked(held)


def _stacked(held: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    images, labels = zip(*held, strict=True)
    return {"image": torch.stack(images), "label": torch.stack(labels)}


def _window(image: Tensor, label: Tensor, size: int | Sequence[int]) -> tuple[Tensor, Tensor]:
    """The window around the labelled voxels' centre; smaller volumes are padded with zeros."""
    image, label = image.as_subclass(Tensor), label.as_subclass(Tensor)  # (channels, …) each
    spatial = image.shape[1:]
    sizes = [size] * len(spatial) if isinstance(size, int) else list(size)
    marked = (label > 0).any(0).nonzero().double()
    middle = marked.mean(0).tolist() if len(marked) else [length / 2 for length in spatial]
    pads: list[int] = []
    for axis, (length, wanted) in enumerate(zip(spatial, sizes, strict=True), start=1):
        wanted = wanted if wanted > 0 else length
        start = int(min(max(middle[axis - 1] - wanted / 2, 0), max(length - wanted, 0)))
        kept = min(wanted, length)
        image, label = image.narrow(axis, start, kept), label.narrow(axis, start, kept)
        pads = [0, wanted - kept, *pads]  # `pad` takes the last axis first
    return functional.pad(image, pads), functional.pad(label, pads)
