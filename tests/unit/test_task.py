"""What a user brings: built, checked, trained and measured; every mistake is explained."""

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

from lightyear_node import Task
from lightyear_node.config.agreement import RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.errors import ConfigError, TaskFailed
from lightyear_node.learning import Layout, Weights, exchanged
from lightyear_node.worker import carry
from lightyear_node.worker.jobs import Candidate
from lightyear_node.worker.site import Site
from lightyear_node.worker.task import build_task
from lightyear_node.worker.train import evaluate, split_batch, train_one_round
from lightyear_node.worker.trainee import Trainee

CPU = torch.device("cpu")
CONTEXT = {"site_name": "site-a", "site_index": 0, "site_count": 2, "seed": 3}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=dice), torch.randint(3, (8,), generator=dice))
        for _ in range(count)
    ]


def task(**changed: Any) -> Task:
    given: dict[str, Any] = {
        "model": net,
        "loss": functional.cross_entropy,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, 1e-2),
        "train_data": batches(),
        "val_data": batches(),
    }
    return Task(**{**given, **changed})


def site(**changed: Any) -> Site:
    rule = changed.pop("rule", RuleTerms())
    malfunction = changed.pop("malfunction", None)
    return Site(
        task(**changed), name="site-a", seed=3, rule=rule, device="cpu", malfunction=malfunction
    )


@pytest.fixture
def hospital() -> Iterator[types.ModuleType]:
    module = types.ModuleType("hospital")
    sys.modules["hospital"] = module
    yield module
    del sys.modules["hospital"]


def test_a_builder_gets_what_it_asks_for(hospital: Any) -> None:
    seen: dict[str, Any] = {}

    def build(site_index: int, seed: int, data_root: str) -> Task:
        seen.update(site_index=site_index, seed=seed, data_root=data_root)
        return task()

    hospital.build = build
    build_task("hospital:build", {"data_root": "/data", "seed": 9}, CONTEXT)
    assert seen == {"site_index": 0, "seed": 9, "data_root": "/data"}


@pytest.mark.parametrize(
    ("entry", "arguments", "error", "words"),
    [
        ("nowhere:build", {}, ConfigError, "no module named `nowhere`"),
        ("hospital:bild", {}, ConfigError, "has no `bild`"),
        ("hospital:build", {"root": "/"}, ConfigError, "takes no argument `root`"),
        ("hospital:seven", {}, TaskFailed, "returned int, not a Task"),
        ("hospital:needy", {}, ConfigError, "needs the package `not_there`"),
    ],
)
def test_a_task_that_cannot_be_built_is_explained(
    hospital: Any, entry: str, arguments: Mapping[str, Any], error: type[Exception], words: str
) -> None:
    def needy() -> Task:
        import not_there  # type: ignore[import-not-found]

        return task(model=not_there)

    hospital.build = lambda data_root="": task()
    hospital.seven = lambda: 7
    hospital.needy = needy
    with pytest.raises(error, match=words):
        build_task(entry, arguments, CONTEXT)


def test_both_shapes_of_batches_and_a_users_own() -> None:
    x, y = batches(1)[0]
    assert split_batch(task(), (x, y)) == (x, y)
    assert split_batch(task(), [x, y]) == (x, y)
    assert split_batch(task(), {"image": x, "label": y, "path": "…"}) == (x, y)
    own = task(prepare_batch=lambda batch: (batch["scan"], batch["truth"]))
    assert split_batch(own, {"scan": x, "truth": y}) == (x, y)
    with pytest.raises(TaskFailed, match="no key 'image': it has scan, truth"):
        split_batch(task(), {"scan": x, "truth": y})
    with pytest.raises(TaskFailed, match="a batch is a Tensor"):
        split_batch(task(), x)


def test_metrics_that_stream_and_metrics_that_are_functions() -> None:
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
    assert measured["first"] == pytest.approx((6 * 0 + 2 * 1) / 8)  # by samples, not by batches


def test_empty_data_is_named() -> None:
    model = net()
    with pytest.raises(TaskFailed, match="training data is empty"):
        train_one_round(
            task(train_data=[]), model, task().optimizer(model.parameters()), CPU, lambda *_: None
        )
    with pytest.raises(TaskFailed, match="validation data is empty"):
        site(val_data=[])


def test_the_optimizer_and_what_stays_at_home_survive_in_a_file(tmp_path: Path) -> None:
    one = Trainee(task(), net(), CPU)
    one.train(0, lambda *_: None)
    carry.save(tmp_path / "carry", {"shared": one.carried({"1.num_batches_tracked"})})
    other = Trainee(task(), net(), CPU)
    other.restore(carry.load(tmp_path / "carry")["shared"])
    assert int(other.model[1].num_batches_tracked) == 3  # type: ignore[index]
    theirs, ours = other.optimizer.state_dict(), one.optimizer.state_dict()
    assert theirs["param_groups"] == ours["param_groups"]
    for index, state in ours["state"].items():
        for key, value in state.items():
            assert torch.equal(theirs["state"][index][key], value)


def test_a_disk_that_cannot_take_the_carry_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        carry.save(tmp_path / "no-such-folder" / "carry", Trainee(task(), net(), CPU).carried())
    assert caught.value.errno == errno.ENOENT


def test_every_site_starts_from_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    site().write_initial(tmp_path / "one")
    torch.manual_seed(2)
    site(train_data=batches(5)).write_initial(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def train(one: Site, tmp_path: Path, name: str = "own") -> Path:
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


def test_a_malfunction_changes_what_is_sent_and_nothing_else(tmp_path: Path) -> None:
    honest, broken = site(), site(malfunction=Malfunction(kind="nan"))
    assert (honest.malfunctions, broken.malfunctions) == (False, True)
    own, same = train(honest, tmp_path, "honest"), train(broken, tmp_path, "broken")
    assert own.read_bytes() == same.read_bytes()
    assert not (tmp_path / "honest.out").exists()
    sent = (tmp_path / "broken.out").read_bytes()
    assert sent != own.read_bytes()
    assert len(sent) == len(own.read_bytes())


def test_nobody_accepted_leaves_the_own_model_bit_for_bit(tmp_path: Path) -> None:
    one = site()
    own = train(one, tmp_path)
    one.merge(own=own, accepted=[], round=0, out=tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == own.read_bytes()


def test_broken_peers_are_judged_with_a_reason_each(tmp_path: Path) -> None:
    one = site()
    own = train(one, tmp_path)
    verdicts = {}
    for kind in ("nan", "sfa"):
        broken = site(malfunction=Malfunction(kind=kind))
        train(broken, tmp_path, kind)
        peer = Candidate("site-b", str(tmp_path / f"{kind}.out"), 24, "0" * 64)  # type: ignore[arg-type]
        judged = one.judge(own=own, before=tmp_path / "own.base", peers=[peer], round=0)
        [verdicts[kind]] = judged.verdicts
    assert [v.accepted for v in verdicts.values()] == [False, False]
    assert verdicts["nan"].reason == "nonfinite"
    # A flipped running variance is negative: no network computes with it.
    assert verdicts["sfa"].reason == "domain"


def test_training_that_ends_in_nan_is_not_announced(tmp_path: Path) -> None:
    def diverge(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    with pytest.raises(TaskFailed, match="not finite"):
        train(site(train_round=diverge), tmp_path)
    assert not (tmp_path / "own").exists()


def test_the_digits_are_those_of_scikit_learn() -> None:
    """The task reads the file without the library; both must see the same."""
    from sklearn.datasets import load_digits

    from lightyear_node.tasks import digits

    pixels, labels = load_digits(return_X_y=True)
    images, found = digits._digits()
    assert (images.reshape(len(images), -1) * 16 == pixels).all()
    assert (found == labels).all()


def test_every_digit_goes_to_exactly_one_site() -> None:
    from lightyear_node.tasks import digits

    _, labels = digits._digits()
    hands = digits._deal(labels, 5, seed=7)
    dealt = sorted(card for hand in hands for card in hand.tolist())
    assert dealt == list(range(len(labels)))
    assert min(len(hand) for hand in hands) > len(labels) / 10


@pytest.mark.parametrize("guard", [True, False])
def test_a_merged_model_has_statistics_of_our_own_data(tmp_path: Path, guard: bool) -> None:
    one, other = site(rule=RuleTerms(guard=guard)), site(train_data=batches(6))
    own, theirs = train(one, tmp_path, "own"), train(other, tmp_path, "theirs")
    peer = Candidate("site-b", str(theirs), 24, "0" * 64)  # type: ignore[arg-type]
    one.merge(own=own, accepted=[(peer, 0.5)], round=0, out=tmp_path / "merged")
    layout = Layout.of(exchanged(net()))
    ours, sent, merged = (dict(Weights(p, layout)) for p in (own, theirs, tmp_path / "merged"))
    inputs = torch.cat([x for x, _ in batches()])
    hidden = inputs @ merged["0.weight"].T + merged["0.bias"]
    mean = hidden.mean(0) if guard else (ours["1.running_mean"] + sent["1.running_mean"]) / 2
    assert torch.allclose(merged["1.running_mean"], mean, atol=1e-5)
    assert not torch.allclose(merged["1.running_mean"], ours["1.running_mean"], atol=1e-3)
