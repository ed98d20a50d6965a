"""BatchNorm statistics are estimated from our own inputs and never taken from a peer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightyear_node.learning import Candidate, Validation, exchanged, make_rule
from lightyear_node.learning.batchnorm import estimate_statistics
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Round, Verdict

ROWS = [7, 32, 1, 24]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = 3 + 2 * torch.randn(sum(ROWS), 2, 6, 6, generator=generator)
    y = torch.randint(3, (len(x),), generator=generator)
    return list(zip(x.split(ROWS), y.split(ROWS), strict=True))


def test_statistics_cover_all_usable_samples() -> None:
    model = network()
    assert estimate_statistics(model, batches())
    seen = torch.cat([x for x, _ in batches() if len(x) > 1])
    maps = model[0](seen).detach()  # (n, 4, 4, 4)
    assert torch.allclose(model[1].running_mean, maps.mean((0, 2, 3)), atol=1e-5)
    # The mean of the batches' variances: variance between batches is not included.
    assert torch.allclose(model[1].running_var, maps.var((0, 2, 3)), rtol=0.05)


def test_estimation_changes_only_the_statistics() -> None:
    model = network()
    model[2].train(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    estimate_statistics(model, batches())
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.1
    for name, tensor in model.state_dict().items():
        changed = not torch.equal(tensor, before[name])
        assert changed == name.startswith(("1.running", "1.num_batches"))


def test_estimation_returns_false_if_there_is_nothing_to_estimate() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    assert not estimate_statistics(plain, batches())
    model = network()
    assert not estimate_statistics(model, [(torch.ones(1, 2, 6, 6), torch.zeros(1).long())])
    assert torch.equal(model[1].running_var, torch.ones(4))


def judged(guard: bool, mean: float, variance: float) -> Verdict:
    """Verdict on a peer with our own weights and other statistics."""
    model = network()
    estimate_statistics(model, batches())
    ours = exchanged(model)
    theirs = dict(ours)
    theirs["1.running_mean"] = ours["1.running_mean"] + mean
    theirs["1.running_var"] = ours["1.running_var"] * variance
    rule = make_rule("lightyear", {"guard": guard})
    own, peer = Candidate(PeerName("a"), ours), Candidate(PeerName("b"), theirs)
    [verdict] = rule.judge(
        own, [peer], Validation(model, batches()), RoundContext(Round(0))
    ).verdicts
    return verdict


def test_the_guard_ignores_the_statistics_of_a_peer() -> None:
    guarded = judged(True, mean=50.0, variance=1e-3)
    assert guarded.accepted
    assert guarded.score == judged(True, mean=0.0, variance=1.0).score
    assert guarded.checks["regret"] == 0
    # Without the guard they are part of the model, as in the paper.
    assert judged(False, mean=50.0, variance=1e-3).score != guarded.score
