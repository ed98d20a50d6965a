"""A site measures its merged model before keeping it: real files, crafted peers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab.faulty_site import FaultySite
from lightyear_node.learning import Weights, write
from lightyear_node.types import Digest, PeerName
from lightyear_node.worker.job_types import CandidateFile, MergeResult
from lightyear_node.worker.site import LocalSite
from tests.support.tiny_site import TinySite, net, samples

GOOD, BAD, WORSE = (PeerName(name) for name in ("good", "bad", "worse"))


class TrainedSite(TinySite):
    """A site trained for its second round; the first round has a looser limit."""

    def __init__(self, folder: Path, **changed: Any) -> None:
        super().__init__(folder, **changed)
        self.train()
        self.finish_round()
        self.train()

    def peer(self, name: PeerName, change: Mapping[str, float] | float) -> CandidateFile:
        """Our own model with the last layer's weights, or the named tensors, multiplied."""
        factors = change if isinstance(change, Mapping) else {"2.weight": change}
        path = self.folder / f"from-{name}"
        own = self.weights("own")
        write(path, self.layout, {n: own[n] * factors.get(n, 1.0) for n in own})
        return CandidateFile(name, str(path), 1, Digest("0" * 64))

    def merged(
        self, *peers: CandidateFile, site: LocalSite | None = None
    ) -> tuple[MergeResult, bytes]:
        out = self.folder / "merged"
        result = (site or self.local_site).merge(
            own=self.path("own"),
            accepted=[(peer, 1 / (len(peers) + 1)) for peer in peers],
            round=self.round,
            out=out,
            carry=self.folder / "carry",
        )
        return result, out.read_bytes()


def loss_on_validation(site: TinySite, file: bytes) -> float:
    model = batchnorm_net() if "1.weight" in site.layout.entries else net()
    model.load_state_dict(_read(site, file), strict=False)
    x, y = samples()
    with torch.no_grad():
        return float(functional.cross_entropy(model.eval()(x), y))


def test_a_harmful_peer_is_dropped_and_its_share_becomes_ours(tmp_path: Path) -> None:
    site = TrainedSite(tmp_path / "one")
    good, bad = site.peer(GOOD, 1.1), site.peer(BAD, -4.0)
    result, file = site.merged(good, bad)
    assert result.harm is not None
    assert (result.harm.dropped, result.harm.kept_local) == ((BAD,), False)
    # The good peer keeps the third that its verdict gives it.
    third = site.weights("own")
    third["2.weight"] = third["2.weight"] * (1 + 0.1 * 0.95 / 3)
    got = _read(site, file)
    for name in third:
        torch.testing.assert_close(got[name], third[name])
    assert loss_on_validation(site, file) <= result.harm.limit
    [without] = [tried for tried in result.harm.tried if tried.without == (BAD,)]
    assert loss_on_validation(site, file) == pytest.approx(without.loss, abs=1e-6)


def test_the_worst_peer_is_dropped_first_and_finally_our_model_is_kept_bit_for_bit(
    tmp_path: Path,
) -> None:
    site = TrainedSite(tmp_path / "one")
    bad, worse = site.peer(BAD, -20.0), site.peer(WORSE, -40.0)
    result, file = site.merged(bad, worse)
    assert result.harm is not None
    assert (result.harm.dropped, result.harm.kept_local) == ((WORSE, BAD), True)
    assert file == site.path("own").read_bytes()
    assert result.metrics["accuracy"] > 0.9  # measured on the kept model


def test_a_merge_that_decides_worse_within_the_limit_on_the_loss_is_not_kept(
    tmp_path: Path,
) -> None:
    """The merged model is nearly constant: the loss of guessing, and wrong decisions."""
    site = TrainedSite(tmp_path / "one", rule={"harm_max": 1.0})
    bad = site.peer(BAD, -1.2)
    result, file = site.merged(bad)
    assert result.harm is not None
    [tried] = result.harm.tried
    assert tried.loss <= result.harm.limit
    assert tried.gain is not None
    assert tried.error is not None
    assert tried.gain < -tried.error
    assert result.harm.kept_local
    assert file == site.path("own").read_bytes()
    # In the first round decisions are not compared.
    site.round = 0
    first, _ = site.merged(bad)
    assert first.harm is not None
    assert [(one.gain, one.error) for one in first.harm.tried] == [(None, None)]


def test_a_restarted_worker_repeats_the_merge_exactly(tmp_path: Path) -> None:
    site = TrainedSite(tmp_path / "one")
    peers = [site.peer(GOOD, 1.1), site.peer(BAD, -4.0), site.peer(WORSE, -9.0)]
    first = site.merged(*peers)
    site.restart()
    assert site.merged(*peers) == first
    site.restart()
    assert site.merged(*peers[::-1]) == first
    assert first[0].harm is not None
    assert first[0].harm.dropped == (WORSE, BAD)


@pytest.mark.parametrize("rule", [{"harm_max": False}, {"guard": False}, {"name": "fedavg"}])
def test_without_the_check_every_accepted_peer_is_merged(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    site = TrainedSite(tmp_path / "one", rule=rule)
    result, file = site.merged(site.peer(BAD, -4.0))
    assert result.harm is None
    strength = 1.0 if "name" in rule else 0.95
    expected = site.weights("own")
    expected["2.weight"] = expected["2.weight"] * (1 + strength * 0.5 * (-4.0 - 1))
    for name, tensor in _read(site, file).items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_harmless_merge_is_identical_with_and_without_the_check(tmp_path: Path) -> None:
    files = {}
    for name, rule in {"on": {}, "off": {"harm_max": False}}.items():
        site = TrainedSite(tmp_path / name, rule=rule)
        result, files[name] = site.merged(site.peer(GOOD, 1.1), site.peer(BAD, 0.9))
        assert (result.harm is not None) == (name == "on")
    assert files["on"] == files["off"]


def test_a_merge_without_peers_is_not_measured(tmp_path: Path) -> None:
    site = TrainedSite(tmp_path / "one")
    result, file = site.merged()
    assert result.harm is None
    assert file == site.path("own").read_bytes()


def test_a_merge_that_overflows_is_harm(tmp_path: Path) -> None:
    """All weights are finite, but the merged model's loss overflows."""
    site = TrainedSite(tmp_path / "one", rule={"guard": False, "harm_max": 1.0})
    result, file = site.merged(site.peer(BAD, {"0.weight": 1e30, "2.weight": 1e30}))
    assert result.harm is not None
    assert result.harm.kept_local
    assert result.harm.tried[0].loss > 1e30
    assert file == site.path("own").read_bytes()


def batchnorm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def test_measured_and_kept_models_use_our_own_statistics(tmp_path: Path) -> None:
    site = TrainedSite(tmp_path / "one", model=batchnorm_net)
    tampered = {"1.running_mean": 1e6, "1.running_var": 1e6}
    result, file = site.merged(site.peer(GOOD, tampered))
    assert result.harm is not None
    assert result.harm.dropped == ()
    assert loss_on_validation(site, file) == pytest.approx(result.harm.tried[0].loss, abs=1e-5)
    # A model kept local is unchanged, including its running statistics.
    result, file = site.merged(site.peer(BAD, {"3.weight": -50.0}))
    assert result.harm is not None
    assert result.harm.kept_local
    assert file == site.path("own").read_bytes()


def test_tensors_that_are_not_exchanged_are_part_of_the_measured_model(tmp_path: Path) -> None:
    site = TrainedSite(tmp_path / "one", exchange={"exclude": ["2.*"]})
    peers = [site.peer(GOOD, {"0.weight": 1.1}), site.peer(BAD, {"0.weight": -9.0})]
    first = site.merged(*peers)
    assert first[0].harm is not None
    assert first[0].harm.dropped == (BAD,)
    site.restart()  # the head is then only in the training state
    assert site.merged(*peers) == first


def test_the_check_without_labels_is_an_error_at_start(tmp_path: Path) -> None:
    x, _ = samples()
    with pytest.raises(ConfigError, match="no labels") as caught:
        TinySite(tmp_path / "one", val_data=[(x, None)], rule={"guard": False, "harm_max": 0.1})
    assert "harm_max: false" in str(caught.value.hint)
    TinySite(tmp_path / "two", val_data=[(x, None)], rule={"guard": False})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedSite:
    return TrainedSite(tmp_path_factory.mktemp("sites") / "one")


@settings(max_examples=15, deadline=None)
@given(
    factors=st.lists(st.floats(-60, 60), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_a_model_above_the_limit_is_never_kept_except_our_own(
    trained: TrainedSite, factors: list[float], share: float
) -> None:
    peers = [
        trained.peer(PeerName(f"peer-{index}"), factor) for index, factor in enumerate(factors)
    ]
    site_settings = {**trained.settings, "rule": RuleConfig(guard=False, harm_max=share)}
    result, file = trained.merged(*peers, site=FaultySite(trained.task, **site_settings))
    harm = result.harm
    assert harm is not None
    if harm.kept_local:
        assert file == trained.path("own").read_bytes()
        assert len(harm.dropped) == len(peers)
    else:
        assert loss_on_validation(trained, file) <= harm.limit + 1e-5


def _read(site: TinySite, file: bytes) -> dict[str, Tensor]:
    path = site.folder / "read"
    path.write_bytes(file)
    return {name: tensor.clone() for name, tensor in Weights(path, site.layout).items()}
