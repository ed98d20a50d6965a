"""Sites under rules that change training, and with malfunctions that need the training data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import InvalidTask, TaskFailed
from lightyear_node.lab.corrupted_updates import with_flipped_labels
from lightyear_node.learning import Weights
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import CandidateFile
from lightyear_node.worker.site import LocalSite
from tests.support.installed_package import install_package
from tests.support.tiny_site import CLASSES, TinySite, distance, net, samples, task


def test_a_free_rider_sends_the_model_it_started_from(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", malfunction="free-rider")
    start = site.model.read_bytes()
    site.train()
    assert site.path("sent").read_bytes() == start != site.path("own").read_bytes()


def test_a_stale_site_sends_its_update_of_an_earlier_round(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", malfunction="stale", scale=2)
    own = []
    for round in range(5):
        site.train()
        own.append(site.path("own").read_bytes())
        assert site.path("sent").read_bytes() == own[max(0, round - 2)]
        site.finish_round()
        site.restart()
    assert len(set(own)) == 5


def test_flipped_labels_corrupt_the_sent_update_and_not_the_local_model(tmp_path: Path) -> None:
    honest, poisoner = TinySite(tmp_path / "a"), TinySite(tmp_path / "b", malfunction="label-flip")
    for _ in range(3):
        for site in (honest, poisoner):
            site.train()
            site.finish_round()
    assert honest.weights("own", 2).keys() == poisoner.weights("own", 2).keys()
    assert distance(honest.weights("own", 2), poisoner.weights("own", 2)) == 0
    assert honest.metrics["accuracy"] > 0.9
    model = net()
    model.load_state_dict(poisoner.weights("sent", 0))
    x, y = samples()
    after_one = float((model(x).argmax(1) == y).float().mean())
    assert after_one < 0.4
    assert float((model(x).argmax(1) == (y + 1) % CLASSES).float().mean()) > 0.6


@pytest.mark.parametrize(
    ("logits", "labels", "flipped"),
    [
        (torch.zeros(3, 2), torch.tensor([0, 1, -100]), torch.tensor([1, 0, -100])),
        (torch.zeros(3, 62), torch.tensor([0, 31, 61]), torch.tensor([31, 0, 30])),
        (torch.zeros(2, 1), torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [0.0]])),
        (torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 1]]]), torch.tensor([[[1, 0]]])),
        # Masks with a channel dimension, as bytes, as booleans, and with one logit per pixel.
        (torch.zeros(1, 3, 1, 2), torch.tensor([[[[0, 2]]]]), torch.tensor([[[[1, 0]]]])),
        (torch.zeros(1, 200), torch.tensor([199]).byte(), torch.tensor([99]).byte()),
        (
            torch.zeros(1, 1, 1, 2),
            torch.tensor([[[[True, False]]]]),
            torch.tensor([[[[False, True]]]]),
        ),
        (torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[[[1.0, 0.0]]]])),
        # Several labels for each sample.
        (torch.zeros(1, 4), torch.tensor([[0, 1, 1, 0]]), torch.tensor([[1, 0, 0, 1]])),
    ],
)
def test_every_label_is_flipped_to_another_class(
    logits: Tensor, labels: Tensor, flipped: Tensor
) -> None:
    seen: list[Tensor] = []

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return logits.sum()

    with_flipped_labels(task(loss=loss)).loss(logits, labels)
    assert torch.equal(seen[0], flipped)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.zeros(3, 1), torch.tensor([[0.2], [0.7], [1.0]])),  # fractions
        (torch.zeros(3, 1), torch.tensor([[61.5], [0.0], [1.0]])),
        (torch.zeros(3, 1), torch.tensor([61, 40, 35])),  # ages
        (torch.zeros(3), torch.tensor([-1, 0, 1])),
        (torch.zeros(2, 1), torch.tensor([[math.nan], [1.0]])),
        (torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 255]]]).byte()),  # a mask as it is stored
        (torch.zeros(2, 4), torch.tensor([[0.1, 0.2], [0.3, 0.4]])),  # boxes
        (torch.zeros(2, 4), [{"boxes": torch.zeros(1, 4)}]),
    ],
)
def test_targets_that_are_not_labels_cannot_be_flipped(logits: Tensor, labels: Any) -> None:
    flipping = with_flipped_labels(task(loss=lambda logits, y: logits.sum()))
    with pytest.raises(InvalidTask, match="label-flip: the labels are not class indices"):
        flipping.loss(logits, labels)


def test_label_flip_on_a_regression_task_is_an_error(tmp_path: Path) -> None:
    x, y = samples()
    data = [(x, y.float()[:, None] / CLASSES)]
    site = TinySite(
        tmp_path / "one",
        malfunction="label-flip",
        rule={"name": "fedavg"},
        model=lambda: nn.Sequential(nn.Linear(x.shape[1], 4), nn.ReLU(), nn.Linear(4, 1)),
        loss=functional.mse_loss,
        train_data=data,
        val_data=data,
        metrics={},
    )
    with pytest.raises(InvalidTask, match="label-flip"):
        site.train()


def test_label_flip_with_a_users_training_loop_is_an_error(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", malfunction="label-flip", train_round=lambda *given: None)
    with pytest.raises(TaskFailed, match="cannot be flipped"):
        site.train()


def test_fedprox_stays_closer_to_its_start(tmp_path: Path) -> None:
    moved = {}
    for mu in (0.0, 0.1, 3.0):
        rule = {"name": "fedprox", "options": {"mu": mu}} if mu else {"name": "fedavg"}
        site = TinySite(tmp_path / str(mu), rule=rule)
        start = dict(Weights(site.model, site.layout))
        site.train()
        moved[mu] = distance(start, site.weights("own"))
    assert moved[0.0] > moved[0.1] > 2 * moved[3.0] > 0


def test_fedprox_is_the_gradient_of_its_penalty(tmp_path: Path) -> None:
    """Two steps of plain SGD, compared with autograd on the penalised loss."""
    x, y = samples(16)
    site = TinySite(
        tmp_path / "one",
        rule={"name": "fedprox", "options": {"mu": 0.5}},
        train_data=[(x, y), (x, y)],
        epochs=1,
    )
    model = net()
    start = dict(Weights(site.model, site.layout))
    model.load_state_dict(start)
    for _ in range(2):
        penalty = sum((p - start[n]).square().sum() for n, p in model.named_parameters())
        loss = functional.cross_entropy(model(x), y) + 0.5 / 2 * penalty
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.2 * gradient
    site.train()
    for name, parameter in model.named_parameters():
        assert torch.allclose(site.weights("own")[name], parameter, atol=1e-6)


def personal(site: TinySite) -> dict[str, Tensor]:
    return dict(training_state.load(site.folder / "carry")["personal"]["tensors"])


def test_ditto_evaluates_the_personal_model(tmp_path: Path) -> None:
    """The metrics are those of the personal model: a bad shared model does not show."""
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    site = TinySite(tmp_path / "one", rule=ditto)
    bad = TinySite(tmp_path / "bad", malfunction="head-scale", scale=-20.0)
    bad.train()
    site.train()
    trained = site.metrics
    site.finish_round({"site-b": bad.path("sent")})
    model = net()
    model.load_state_dict(dict(Weights(site.model, site.layout)))
    x, y = samples()
    shared_accuracy = float((model(x).argmax(1) == y).float().mean())
    assert site.metrics == trained
    assert site.metrics["accuracy"] > 0.8 > 0.5 > shared_accuracy


def test_dittos_personal_model_survives_a_restart(tmp_path: Path) -> None:
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    running, restarted = (
        TinySite(tmp_path / "running", rule=ditto),
        TinySite(tmp_path / "restarted", rule=ditto),
    )
    for site in (running, restarted):
        for _ in range(3):
            site.train()
            site.finish_round()
            if site is restarted:
                site.restart()
    assert distance(personal(running), personal(restarted)) == 0
    assert distance(personal(running), running.weights("own", 2)) > 0


@pytest.mark.parametrize("rule", [{"name": "ditto"}, {"name": "fedavg"}])
def test_a_restarted_worker_measures_the_same_metrics(tmp_path: Path, rule: dict[str, str]) -> None:
    """Ditto measures the personal model; other rules need the tensors not exchanged."""

    def normed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))

    seen = []
    for name in ("running", "restarted"):
        site = TinySite(tmp_path / name, rule=rule, model=normed, exchange={"exclude": ["1.*"]})
        site.train()
        if name == "restarted":
            site.restart()
        site.finish_round()
        seen.append(site.metrics)
    assert seen[0] == seen[1]


def test_a_larger_ditto_lambda_keeps_the_personal_model_closer(tmp_path: Path) -> None:
    distances = {}
    for lam in (0.01, 3.0):
        site = TinySite(tmp_path / str(lam), rule={"name": "ditto", "options": {"lam": lam}})
        start = dict(Weights(site.model, site.layout))
        site.train()
        distances[lam] = distance(personal(site), start)
    assert distances[0.01] > 2 * distances[3.0]


def test_afas_reputation_survives_a_restart(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule={"name": "afa"})
    bad = TinySite(tmp_path / "bad", malfunction="sfa")
    peers = [TinySite(tmp_path / name) for name in ("b", "c", "d")]
    state: Mapping[str, Any] = {}
    reasons = []
    for _ in range(8):
        site.train()
        for other in (bad, *peers):
            other.train()
        named = {"bad": bad.path("sent"), **{p.folder.name: p.path("own") for p in peers}}
        candidates = [CandidateFile(n, str(path), 96, "0" * 64) for n, path in named.items()]  # type: ignore[arg-type]
        judged = site.local_site.judge(
            own=site.path("own"),
            before=site.model,
            peers=candidates,
            round=site.round,
            state=state,
        )
        state = judged.state
        reasons.append(str(judged.verdicts[0].reason))
        assert all(verdict.accepted for verdict in judged.verdicts[1:])
        for each in (site, bad, *peers):
            each.finish_round()
        site.restart()
    # Dropped repeatedly, then blocked permanently because of its stored reputation.
    assert reasons[0] == "outlier"
    assert reasons[-1] == "blocked"


def test_a_tolerant_site_continues_with_nonfinite_weights(tmp_path: Path) -> None:
    def diverge(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    site = TinySite(tmp_path / "one", train_round=diverge)
    site.settings["tolerant"] = True
    site.restart()
    honest = TinySite(tmp_path / "honest")
    honest.train()
    site.train()
    peer = CandidateFile("site-b", str(honest.path("own")), 1, "0" * 64)  # type: ignore[arg-type]
    [verdict] = site.local_site.judge(
        own=site.path("own"), before=site.model, peers=[peer], round=0
    ).verdicts
    assert not verdict.accepted
    site.finish_round()
    assert site.metrics["loss"] != site.metrics["loss"]


MEASURING = """
from lightyear_node import Reason, Verdict

def measuring(own, peers, validation, context):
    losses = {p.peer: validation.loss_of(p.weights, own_statistics=False) for p in peers}
    return [Verdict(p, True, Reason.OK, weight=0.1, checks={"loss": losses[p]}) for p in losses]
"""


def test_peers_are_judged_with_our_tensors_that_are_not_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is never sent: peers' bodies are judged with our own trained head."""
    points = {"measuring": "measuring_rule:measuring"}
    install_package(tmp_path / "installed", "measuring_rule", MEASURING, points)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    site, other = (
        TinySite(tmp_path / name, exchange={"exclude": ["2.*"]}, rule={"guard": False})
        for name in ("a", "b")
    )
    for each in (site, other):
        each.train()
        each.finish_round()
        each.train()
    peer = CandidateFile("site-b", str(other.path("own")), 1, "0" * 64)  # type: ignore[arg-type]

    def peer_loss(local_site: LocalSite, carry: Path | None) -> float:
        verdicts = local_site.judge(
            own=site.path("own"),
            before=site.model,
            peers=[peer],
            round=1,
            carry=carry,
            rule=RuleConfig(name="measuring"),
        ).verdicts
        return float(verdicts[0].checks["loss"])

    with_our_head = peer_loss(site.local_site, None)
    assert with_our_head < 0.5  # both sites have the same data, so their bodies are alike
    site.restart()
    assert peer_loss(site.local_site, site.folder / "carry") == with_our_head
    site.restart()
    assert peer_loss(site.local_site, None) > 2 * with_our_head  # with an untrained head


def test_a_site_opens_with_the_reading_of_its_rule() -> None:
    """Few validation samples are refused at the start, not in the first round."""
    unbiased = RuleConfig(unbiased=True)

    def opened(rule: RuleConfig, count: int) -> LocalSite:
        x = torch.randn(count, 4)
        few = task(val_data=[(x, torch.zeros(count, dtype=torch.long))])
        return LocalSite(few, name="a", seed=3, rule=rule, device="cpu")

    assert opened(unbiased, 4).opened().floor == 0
    assert opened(RuleConfig(), 4).opened().floor == 16 / (16 + 4)
    with pytest.raises(InvalidTask, match="needs 4 validation samples or more, not 3"):
        opened(unbiased, 3)
