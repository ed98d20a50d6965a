"""A site under rules that change how it trains, and with malfunctions that need its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.errors import TaskFailed
from lightyear_node.learning import Weights
from lightyear_node.worker.jobs import Candidate
from lightyear_node.worker.site import Site
from lightyear_node.worker.trainee import poisoned

from .diary import CLASSES, Diary, distance, net, samples, task


def test_a_free_rider_sends_what_it_was_given(tmp_path: Path) -> None:
    one = Diary(tmp_path / "one", malfunction="free-rider")
    start = one.model.read_bytes()
    one.train()
    assert one.path("sent").read_bytes() == start != one.path("own").read_bytes()


def test_a_stale_site_sends_what_it_had_some_rounds_ago(tmp_path: Path) -> None:
    one = Diary(tmp_path / "one", malfunction="stale", scale=2)
    own = []
    for round in range(5):
        one.train()
        own.append(one.path("own").read_bytes())
        assert one.path("sent").read_bytes() == own[max(0, round - 2)]
        one.close()
        one.restart()
    assert len(set(own)) == 5


def test_flipped_labels_teach_the_wrong_and_leave_the_site_itself_alone(tmp_path: Path) -> None:
    honest, poisoner = Diary(tmp_path / "a"), Diary(tmp_path / "b", malfunction="label-flip")
    for _ in range(3):
        for one in (honest, poisoner):
            one.train()
            one.close()
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
    ],
)
def test_every_label_becomes_another(logits: Tensor, labels: Tensor, flipped: Tensor) -> None:
    seen: list[Tensor] = []

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        seen.append(y)
        return logits.sum()

    poisoned(task(loss=loss)).loss(logits, labels)
    assert torch.equal(seen[0], flipped)


def test_a_training_loop_of_the_users_cannot_be_poisoned(tmp_path: Path) -> None:
    one = Diary(tmp_path / "one", malfunction="label-flip", train_round=lambda *given: None)
    with pytest.raises(TaskFailed, match="cannot be flipped"):
        one.train()


def test_fedprox_stays_nearer_to_where_it_began(tmp_path: Path) -> None:
    reach = {}
    for mu in (0.0, 0.1, 3.0):
        rule = {"name": "fedprox", "options": {"mu": mu}} if mu else {"name": "fedavg"}
        one = Diary(tmp_path / str(mu), rule=rule)
        start = dict(Weights(one.model, one.layout))
        one.train()
        reach[mu] = distance(start, one.weights("own"))
    assert reach[0.0] > reach[0.1] > 2 * reach[3.0] > 0


def test_fedprox_is_the_gradient_of_its_penalty(tmp_path: Path) -> None:
    """One step of plain SGD from the start, then one more: by hand, with autograd."""
    x, y = samples(16)
    one = Diary(
        tmp_path / "one",
        rule={"name": "fedprox", "options": {"mu": 0.5}},
        train_data=[(x, y), (x, y)],
        epochs=1,
    )
    model = net()
    start = dict(Weights(one.model, one.layout))
    model.load_state_dict(start)
    for _ in range(2):
        penalty = sum((p - start[n]).square().sum() for n, p in model.named_parameters())
        loss = functional.cross_entropy(model(x), y) + 0.5 / 2 * penalty
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.2 * gradient
    one.train()
    for name, parameter in model.named_parameters():
        assert torch.allclose(one.weights("own")[name], parameter, atol=1e-6)


def personal(diary: Diary) -> dict[str, Tensor]:
    from lightyear_node.worker import carry

    return dict(carry.load(diary.folder / "carry")["personal"]["tensors"])


def test_ditto_evaluates_the_personal_model(tmp_path: Path) -> None:
    """What peers do to the shared model must not show: the personal one is only pulled to it."""
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    one = Diary(tmp_path / "one", rule=ditto)
    garbage = Diary(tmp_path / "garbage", malfunction="head-scale", scale=-20.0)
    garbage.train()
    one.train()
    trained = one.metrics
    one.close({"site-b": garbage.path("sent")})
    model = net()
    model.load_state_dict(dict(Weights(one.model, one.layout)))
    x, y = samples()
    shared_accuracy = float((model(x).argmax(1) == y).float().mean())
    assert one.metrics == trained
    assert one.metrics["accuracy"] > 0.8 > 0.5 > shared_accuracy


def test_dittos_personal_model_survives_a_restart(tmp_path: Path) -> None:
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    calm, restarted = Diary(tmp_path / "calm", rule=ditto), Diary(tmp_path / "torn", rule=ditto)
    for one in (calm, restarted):
        for _ in range(3):
            one.train()
            one.close()
            if one is restarted:
                one.restart()
    assert distance(personal(calm), personal(restarted)) == 0
    assert distance(personal(calm), calm.weights("own", 2)) > 0


@pytest.mark.parametrize("rule", [{"name": "ditto"}, {"name": "fedavg"}])
def test_a_worker_that_was_not_there_to_train_measures_the_same(
    tmp_path: Path, rule: dict[str, str]
) -> None:
    """Under ditto the personal model is measured; elsewhere, tensors that stay at home matter."""

    def normed() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))

    seen = []
    for name in ("calm", "torn"):
        one = Diary(tmp_path / name, rule=rule, model=normed, exchange={"exclude": ["1.*"]})
        one.train()
        if name == "torn":
            one.restart()
        one.close()
        seen.append(one.metrics)
    assert seen[0] == seen[1]


def test_the_stronger_dittos_pull_the_nearer_the_personal_model(tmp_path: Path) -> None:
    away = {}
    for lam in (0.01, 3.0):
        one = Diary(tmp_path / str(lam), rule={"name": "ditto", "options": {"lam": lam}})
        start = dict(Weights(one.model, one.layout))
        one.train()
        away[lam] = distance(personal(one), start)
    assert away[0.01] > 2 * away[3.0]


def test_afas_reputation_goes_on_where_it_was(tmp_path: Path) -> None:
    one = Diary(tmp_path / "one", rule={"name": "afa"})
    bad = Diary(tmp_path / "bad", malfunction="sfa")
    peers = [Diary(tmp_path / name) for name in ("b", "c", "d")]
    state: Mapping[str, Any] = {}
    reasons = []
    for _ in range(8):
        one.train()
        for other in (bad, *peers):
            other.train()
        named = {"bad": bad.path("sent"), **{p.folder.name: p.path("own") for p in peers}}
        candidates = [Candidate(n, str(path), 96, "0" * 64) for n, path in named.items()]  # type: ignore[arg-type]
        judged = one.site.judge(
            own=one.path("own"),
            before=one.model,
            peers=candidates,
            round=one.round,
            state=state,
        )
        state = judged.state
        reasons.append(str(judged.verdicts[0].reason))
        assert all(verdict.accepted for verdict in judged.verdicts[1:])
        for each in (one, bad, *peers):
            each.close()
        one.restart()
    # Dropped again and again, and then, by what is remembered, blocked for good.
    assert reasons[0] == "outlier"
    assert reasons[-1] == "blocked"


def test_a_tolerant_site_goes_on_with_weights_that_are_no_numbers(tmp_path: Path) -> None:
    def diverge(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    one = Diary(tmp_path / "one", train_round=diverge)
    one.terms["tolerant"] = True
    one.restart()
    honest = Diary(tmp_path / "honest")
    honest.train()
    one.train()
    peer = Candidate("site-b", str(honest.path("own")), 1, "0" * 64)  # type: ignore[arg-type]
    [verdict] = one.site.judge(
        own=one.path("own"), before=one.model, peers=[peer], round=0
    ).verdicts
    assert not verdict.accepted
    one.close()
    assert one.metrics["loss"] != one.metrics["loss"]


def test_peers_are_tried_with_what_stays_at_home(tmp_path: Path) -> None:
    """A head that is never sent: peers' bodies are judged under our own trained head."""
    one, other = (
        Diary(tmp_path / name, exchange={"exclude": ["2.*"]}, rule={"guard": False})
        for name in ("a", "b")
    )
    for each in (one, other):
        each.train()
        each.close()
        each.train()
    peer = Candidate("site-b", str(other.path("own")), 1, "0" * 64)  # type: ignore[arg-type]

    def regret(site: Site, carry: Path | None) -> float:
        verdicts = site.judge(
            own=one.path("own"),
            before=one.model,
            peers=[peer],
            round=1,
            carry=carry,
            rule=RuleTerms(),
        ).verdicts
        assert site._probe.own_loss is not None
        return site._probe.own_loss + verdicts[0].checks["regret"]

    with_our_head = regret(one.site, None)
    assert with_our_head < 0.5  # both sites have the same data, so their bodies are alike
    one.restart()
    assert regret(one.site, one.folder / "carry") == with_our_head
    one.restart()
    assert regret(one.site, None) > 2 * with_our_head  # under a head that was never trained
