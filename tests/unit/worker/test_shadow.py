"""A site with a shadow: a second model that trains and never merges."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab.faulty_site import FaultySite
from lightyear_node.learning import Weights, write
from lightyear_node.learning.confirmation import divided
from lightyear_node.types import Digest, PeerName, Served, Worth
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import CandidateFile
from lightyear_node.worker.site import LocalSite
from tests.support.tiny_site import TinySite, distance, net, samples, task

SHADOW = {"shadow": True, "harm_max": False}


def shadow_of(site: TinySite) -> dict[str, Tensor]:
    return dict(training_state.load(site.folder / "carry")["shadow"]["tensors"])


def merged_with(site: TinySite, peer: Path, worth: Worth | None, weight: float = 0.5) -> Worth:
    """Merge one peer, and return the comparison."""
    candidate = CandidateFile(PeerName("site-b"), str(peer), 1, Digest("0" * 64))
    found = site.local_site.merge(
        own=site.path("own"),
        accepted=[(candidate, weight)],
        round=site.round,
        out=site.folder / "merged",
        carry=site.folder / "carry",
        worth=worth,
    ).worth
    (site.folder / "merged").replace(site.model)
    site.round += 1
    assert found is not None
    return found


def wrong_model(site: TinySite) -> Path:
    """The site's model with the opposite decisions, as a file."""
    path = site.folder / f"wrong-{site.round}"
    write(path, site.layout, {name: -tensor for name, tensor in site.weights("own").items()})
    return path


def test_without_merges_both_models_are_equal(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule=SHADOW)
    for _ in range(3):
        site.train()
        assert distance(shadow_of(site), site.weights("own")) == 0
        site.finish_round()


def test_the_update_is_the_same_with_and_without_a_shadow(tmp_path: Path) -> None:
    plain, other = TinySite(tmp_path / "plain"), TinySite(tmp_path / "other", rule=SHADOW)
    for _ in range(2):
        for site in (plain, other):
            site.train()
        assert plain.path("own").read_bytes() == other.path("own").read_bytes()
        for site in (plain, other):
            site.finish_round()


def test_a_merge_leaves_the_shadow_alone(tmp_path: Path) -> None:
    alone, site = (TinySite(tmp_path / name, rule=SHADOW) for name in ("alone", "one"))
    for _ in range(3):
        for one in (alone, site):
            one.train()
        alone.finish_round()
        merged_with(site, wrong_model(site), None)
        site.restart()
    assert distance(shadow_of(site), shadow_of(alone)) == 0
    assert distance(shadow_of(site), site.weights("own", 2)) > 0


def test_the_served_model_is_the_better_one(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule=SHADOW)
    worth = None
    for _ in range(3):
        site.train()
        worth = merged_with(site, wrong_model(site), worth, weight=0.9)
    assert worth is not None
    assert worth.served is Served.ALONE
    assert (worth.unit, worth.gain < -0.1) == ("decisions", True)
    assert worth.alone["accuracy"] > 0.9
    assert [one.samples for one in worth.recent] == [48] * 3  # half of the validation samples


def test_a_shadow_that_diverges_does_not_stop_the_site(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule=SHADOW)
    site.train()
    state = training_state.load(site.folder / "carry")
    for tensor in state["shadow"]["tensors"].values():
        tensor.fill_(float("nan"))
    training_state.save(site.folder / "carry", state)
    site.restart()
    worth = merged_with(site, site.path("own"), None)
    assert worth.served is Served.FEDERATED
    assert "loss" not in worth.alone  # JSON has no NaN


def test_a_restarted_worker_compares_the_same_samples(tmp_path: Path) -> None:
    """Judging and merging may be repeated by another process."""
    running, restarted = (TinySite(tmp_path / name, rule=SHADOW) for name in ("a", "b"))
    found = []
    for site in (running, restarted):
        site.train()
        if site is restarted:
            site.restart()
        found.append(merged_with(site, wrong_model(site), None))
    assert found[0] == found[1]


def test_the_seed_of_a_real_site_is_secret_and_kept(tmp_path: Path) -> None:
    seeds = set()
    for name in ("a", "b"):
        site = TinySite(tmp_path / name, rule=SHADOW)
        given = {"name": "site-a", "seed": 3, "device": "cpu", "rule": RuleConfig(shadow=True)}
        site.local_site = LocalSite(site.task, **given)  # type: ignore[assignment,arg-type]
        site.train()
        seeds.add(training_state.load(site.folder / "carry")["shadow"]["seed"])
        site.round += 1
        site.train()
        seeds.add(training_state.load(site.folder / "carry")["shadow"]["seed"])
    assert len(seeds) == 2


def test_a_shadow_that_is_switched_on_later_starts_from_the_federated_model(
    tmp_path: Path,
) -> None:
    site = TinySite(tmp_path / "one")
    site.train()
    site.settings["rule"] = RuleConfig(shadow=True)
    site.restart()
    # The round was trained without a shadow: nothing is compared.
    merged = site.local_site.merge(
        own=site.path("own"),
        accepted=[],
        round=0,
        out=site.folder / "merged",
        carry=site.folder / "carry",
    )
    assert merged.worth is None
    (site.folder / "merged").replace(site.model)
    site.round += 1
    site.train()
    assert distance(shadow_of(site), site.weights("own")) == 0


def loss_of(weights: Mapping[str, Tensor], rows: list[int]) -> float:
    x, y = samples()
    model = net()
    model.load_state_dict(dict(weights))
    return float(functional.cross_entropy(model(x[rows]), y[rows]).detach())


def accuracy_of(weights: Mapping[str, Tensor], rows: list[int]) -> float:
    x, y = samples()
    model = net()
    model.load_state_dict(dict(weights))
    return float((model(x[rows]).argmax(1) == y[rows]).double().mean())


def test_one_half_judges_and_the_other_confirms(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule=SHADOW)
    site.train()
    seed = training_state.load(site.folder / "carry")["shadow"]["seed"]
    judging, confirming = divided(len(samples()[0]), seed, 0)
    path = wrong_model(site)  # far from ours, but measured
    judged = site.local_site.judge(
        own=site.path("own"),
        before=site.model,
        peers=[CandidateFile(PeerName("site-b"), str(path), 1, Digest("0" * 64))],
        round=0,
    )
    [verdict] = judged.verdicts
    ours, theirs = site.weights("own"), dict(Weights(path, site.layout))
    by_half = [loss_of(theirs, rows) - loss_of(ours, rows) for rows in (judging, confirming)]
    assert by_half[0] != pytest.approx(by_half[1], abs=1e-2)
    assert verdict.checks["regret"] == pytest.approx(by_half[0], abs=1e-5)
    worth = merged_with(site, path, None, weight=0.9)
    merged = dict(Weights(site.model, site.layout))
    [found] = worth.recent
    assert found.federated == pytest.approx(accuracy_of(merged, confirming))
    gain = accuracy_of(merged, confirming) - accuracy_of(ours, confirming)
    assert found.gain == pytest.approx(gain)


def test_the_merge_check_measures_the_samples_that_confirm(tmp_path: Path) -> None:
    site = TinySite(tmp_path / "one", rule={"shadow": True})
    site.train()
    seed = training_state.load(site.folder / "carry")["shadow"]["seed"]
    judging, confirming = divided(len(samples()[0]), seed, 0)
    peer = CandidateFile(PeerName("site-b"), str(site.path("own")), 1, Digest("0" * 64))
    harm = site.local_site.merge(
        own=site.path("own"),
        accepted=[(peer, 0.5)],
        round=0,
        out=site.folder / "merged",
        carry=site.folder / "carry",
    ).harm
    assert harm is not None
    ours = site.weights("own")
    assert harm.loss_before == pytest.approx(loss_of(ours, confirming), abs=1e-5)
    assert harm.loss_before != pytest.approx(loss_of(ours, judging), abs=1e-4)


def test_a_shadow_needs_labels() -> None:
    x, _ = samples()
    with pytest.raises(ConfigError, match="no labels") as caught:
        FaultySite(
            task(val_data=[(x, None)]),
            name="site-a",
            seed=3,
            device="cpu",
            rule=RuleConfig(guard=False, shadow=True),
        )
    assert "shadow: false" in (caught.value.hint or "")


def test_too_few_samples_are_reported(tmp_path: Path) -> None:
    x, y = samples(6)
    few = TinySite(tmp_path / "few", rule=SHADOW, val_data=[(x, y)])
    assert any("cannot be divided" in text for text in few.local_site.opened().warnings)
    few.train()
    worth = merged_with(few, wrong_model(few), None)
    assert worth.recent[0].samples == 6
    many = TinySite(tmp_path / "many", rule=SHADOW)
    assert many.local_site.opened().warnings == ()
