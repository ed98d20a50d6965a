"""User tasks: built, validated, trained and measured; mistakes give clear errors."""

from __future__ import annotations

import errno
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightyear_node import Task
from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.lab.faulty_site import FaultySite
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.learning import Layout, Weights, exchanged
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import CandidateFile
from lightyear_node.worker.site import LocalSite
from lightyear_node.worker.task import load_task
from lightyear_node.worker.training import TrainableModel, evaluate, split_batch, train_one_round

CPU = torch.device("cpu")
CONTEXT = {"site_name": "site-a", "site_index": 0, "site_count": 2, "seed": 3}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def task(**changed: Any) -> Task:
    defaults: dict[str, Any] = {
        "model": net,
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, 1e-2),
        "train_data": batches(),
        "val_data": batches(),
    }
    return Task(**{**defaults, **changed})


def site(**changed: Any) -> LocalSite:
    rule = changed.pop("rule", RuleConfig())
    malfunction = changed.pop("malfunction", None)
    return FaultySite(
        task(**changed), name="site-a", seed=3, rule=rule, device="cpu", malfunction=malfunction
    )


@pytest.fixture
def hospital() -> Iterator[types.ModuleType]:
    module = types.ModuleType("hospital")
    sys.modules["hospital"] = module
    yield module
    del sys.modules["hospital"]


def test_a_builder_gets_the_arguments_it_declares(hospital: Any) -> None:
    seen: dict[str, Any] = {}

    def build(site_index: int, seed: int, data_root: str) -> Task:
        seen.update(site_index=site_index, seed=seed, data_root=data_root)
        return task()

    hospital.build = build
    load_task("hospital:build", {"data_root": "/data", "seed": 9}, CONTEXT)
    assert seen == {"site_index": 0, "seed": 9, "data_root": "/data"}


@pytest.mark.parametrize(
    ("entry", "arguments", "error", "expected"),
    [
        ("nowhere:build", {}, ConfigError, "no module named `nowhere`"),
        ("hospital:bild", {}, ConfigError, "has no `bild`"),
        ("hospital:build", {"root": "/"}, ConfigError, "takes no argument `root`"),
        ("hospital:seven", {}, TaskFailed, "returned int, not a Task"),
        ("hospital:needy", {}, ConfigError, "needs the package `not_there`"),
    ],
)
def test_a_task_that_cannot_be_built_is_explained(
    hospital: Any, entry: str, arguments: Mapping[str, Any], error: type[Exception], expected: str
) -> None:
    def needy() -> Task:
        import not_there  # type: ignore[import-not-found]

        return task(model=not_there)

    hospital.build = lambda data_root="": task()
    hospital.seven = lambda: 7
    hospital.needy = needy
    with pytest.raises(error, match=expected):
        load_task(entry, arguments, CONTEXT)


def test_both_batch_formats_and_a_users_own_are_split() -> None:
    x, y = batches(1)[0]
    assert split_batch(task(), (x, y)) == (x, y)
    assert split_batch(task(), [x, y]) == (x, y)
    assert split_batch(task(), {"image": x, "label": y, "path": "…"}) == (x, y)
    own = task(prepare_batch=lambda batch: (batch["scan"], batch["truth"]))
    assert split_batch(own, {"scan": x, "truth": y}) == (x, y)
    with pytest.raises(TaskFailed, match='no key "image": it has scan, truth'):
        split_batch(task(), {"scan": x, "truth": y})
    with pytest.raises(TaskFailed, match="a batch is a Tensor"):
        split_batch(task(), x)


def test_metrics_may_be_objects_or_functions() -> None:
    class Count:
        def reset(self) -> None:
            self.seen = 0

        def update(self, logits: Tensor, target: Tensor) -> None:
            self.seen += len(target)

        def compute(self) -> Tensor:
            return torch.tensor(float(self.seen))

    uneven = [
        (torch.zeros(6, 4), torch.zeros(6, dtype=torch.long)),
        (torch.ones(2, 4), torch.ones(2).long()),
    ]
    measured = evaluate(
        task(metrics={"seen": Count(), "first": lambda logits, y: float(y[0])}), net(), uneven, CPU
    )
    assert measured["seen"] == 8
    # Weighted by samples, not batches.
    assert measured["first"] == pytest.approx((6 * 0 + 2 * 1) / 8)


def test_empty_data_is_an_error() -> None:
    model = net()
    with pytest.raises(TaskFailed, match="training data is empty"):
        train_one_round(
            task(train_data=[]), model, task().optimizer(model.parameters()), CPU, lambda *_: None
        )
    with pytest.raises(TaskFailed, match="validation data is empty"):
        site(val_data=[])


def test_the_training_state_restores_the_optimizer_and_local_tensors(tmp_path: Path) -> None:
    one = TrainableModel(task(), net(), CPU)
    one.train(0, lambda *_: None)
    training_state.save(tmp_path / "carry", {"shared": one.state({"1.num_batches_tracked"})})
    other = TrainableModel(task(), net(), CPU)
    other.restore(training_state.load(tmp_path / "carry")["shared"])
    assert int(other.model[1].num_batches_tracked) == 3  # type: ignore[index]
    theirs, ours = other.optimizer.state_dict(), one.optimizer.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    for index, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(theirs["state"][index][key], value)


def test_a_failure_to_write_the_training_state_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        training_state.save(
            tmp_path / "no-such-folder" / "carry", TrainableModel(task(), net(), CPU).state()
        )
    assert caught.value.errno == errno.ENOENT


def test_every_site_starts_from_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    site().write_initial(tmp_path / "one")
    torch.manual_seed(2)
    site(train_data=batches(5)).write_initial(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def train(one: LocalSite, tmp_path: Path, name: str = "own") -> Path:
    base = tmp_path / f"{name}.base"
    one.write_initial(base)
    one.train(
        base=base,
        carry=None,
        round=0,
        own=tmp_path / name,
        outgoing=tmp_path / f"{name}.out",
        carry_out=tmp_path / f"{name}.carry",
    )
    return tmp_path / name


def test_a_malfunction_changes_only_the_sent_update(tmp_path: Path) -> None:
    honest, broken = site(), site(malfunction=MalfunctionConfig(kind="nan"))
    own, same = train(honest, tmp_path, "honest"), train(broken, tmp_path, "broken")
    assert own.read_bytes() == same.read_bytes()
    assert not (tmp_path / "honest.out").exists()
    sent = (tmp_path / "broken.out").read_bytes()
    assert sent != own.read_bytes()
    assert len(sent) == len(own.read_bytes())


def test_a_merge_without_peers_keeps_our_model_bit_for_bit(tmp_path: Path) -> None:
    one = site()
    own = train(one, tmp_path)
    one.merge(own=own, accepted=[], round=0, out=tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == own.read_bytes()


def test_each_broken_peer_is_rejected_with_a_reason(tmp_path: Path) -> None:
    one = site()
    own = train(one, tmp_path)
    verdicts = {}
    for kind in ("nan", "sfa"):
        broken = site(malfunction=MalfunctionConfig(kind=kind))
        train(broken, tmp_path, kind)
        peer = CandidateFile("site-b", str(tmp_path / f"{kind}.out"), 24, "0" * 64)  # type: ignore[arg-type]
        judged = one.judge(own=own, before=tmp_path / "own.base", peers=[peer], round=0)
        [verdicts[kind]] = judged.verdicts
    assert [v.accepted for v in verdicts.values()] == [False, False]
    assert verdicts["nan"].reason == "nonfinite"
    # A flipped running variance is negative, which is invalid.
    assert verdicts["sfa"].reason == "domain"


def test_training_that_ends_in_nan_writes_no_update(tmp_path: Path) -> None:
    def diverge(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    with pytest.raises(TaskFailed, match="not finite"):
        train(site(train_round=diverge), tmp_path)
    assert not (tmp_path / "own").exists()


def test_the_digits_are_those_of_scikit_learn() -> None:
    """The task reads the file without the library; both must give the same data."""
    from sklearn.datasets import load_digits

    from lightyear_node.lab.tasks import digits

    pixels, labels = load_digits(return_X_y=True)
    expected = sorted((*image, label) for image, label in zip(pixels, labels, strict=True))
    assert sorted(samples_of(digits.build())) == expected


def samples_of(task: Task) -> list[tuple[float, ...]]:
    """All samples of a task: 64 pixels of 0 … 16, and the label."""
    found = []
    for loader in (task.train_data, task.val_data, task.test_data):
        assert isinstance(loader, DataLoader)
        for image, label in loader.dataset:
            found.append((*(image.flatten() * 16).tolist(), int(label)))
    return found


def test_every_digit_is_assigned_to_exactly_one_site() -> None:
    from lightyear_node.lab.tasks import digits

    # Every fifth site has unchanged images.
    parts = [samples_of(digits.build(site, site_count=4, seed=7)) for site in (0, 5, 10, 15)]
    every = samples_of(digits.build())
    assert sorted(sample for part in parts for sample in part) == sorted(every)
    assert min(len(part) for part in parts) > len(every) / 10


@pytest.mark.parametrize("guard", [True, False])
def test_only_a_guarded_merge_re_estimates_statistics_from_our_data(
    tmp_path: Path, guard: bool
) -> None:
    one, other = site(rule=RuleConfig(guard=guard)), site(train_data=batches(6))
    own, theirs = train(one, tmp_path, "own"), train(other, tmp_path, "theirs")
    peer = CandidateFile("site-b", str(theirs), 24, "0" * 64)  # type: ignore[arg-type]
    one.merge(own=own, accepted=[(peer, 0.5)], round=0, out=tmp_path / "merged")
    layout = Layout.of(exchanged(net()))
    ours, sent, merged = (dict(Weights(p, layout)) for p in (own, theirs, tmp_path / "merged"))
    inputs = torch.cat([x for x, _ in batches()])
    hidden = inputs @ merged["0.weight"].T + merged["0.bias"]
    mean = hidden.mean(0) if guard else (ours["1.running_mean"] + sent["1.running_mean"]) / 2
    assert torch.allclose(merged["1.running_mean"], mean, atol=1e-5)
    assert not torch.allclose(merged["1.running_mean"], ours["1.running_mean"], atol=1e-3)
