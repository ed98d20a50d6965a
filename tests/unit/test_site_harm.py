"""A site that measures its merged model before it keeps it: on real files, with crafted peers."""

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

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.errors import ConfigError
from lightyear_node.learning import Weights, write
from lightyear_node.records import Digest, PeerName
from lightyear_node.worker.jobs import Candidate, Merged
from lightyear_node.worker.site import Site

from .diary import Diary, net, samples

GOOD, BAD, WORSE = (PeerName(name) for name in ("good", "bad", "worse"))


class Trained(Diary):
    """A site that has trained for its second round; the first is more forgiving."""

    def __init__(self, folder: Path, **changed: Any) -> None:
        super().__init__(folder, **changed)
        self.train()
        self.close()
        self.train()

    def peer(self, name: PeerName, change: Mapping[str, float] | float) -> Candidate:
        """Our own model, its last layer's weights (or tensors by name) multiplied."""
        factors = change if isinstance(change, Mapping) else {"2.weight": change}
        path = self.folder / f"from-{name}"
        own = self.weights("own")
        write(path, self.layout, {n: own[n] * factors.get(n, 1.0) for n in own})
        return Candidate(name, str(path), 1, Digest("0" * 64))

    def merged(self, *peers: Candidate, site: Site | None = None) -> tuple[Merged, bytes]:
        out = self.folder / "merged"
        result = (site or self.site).merge(
            own=self.path("own"),
            accepted=[(peer, 1 / (len(peers) + 1)) for peer in peers],
            round=self.round,
            out=out,
            carry=self.folder / "carry",
        )
        return result, out.read_bytes()


def loss_on_validation(diary: Diary, file: bytes) -> float:
    model = normalising() if "1.weight" in diary.layout.entries else net()
    model.load_state_dict(_read(diary, file), strict=False)
    x, y = samples()
    with torch.no_grad():
        return float(functional.cross_entropy(model.eval()(x), y))


def test_the_harmful_one_is_left_out_and_its_part_is_ours(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one")
    good, bad = one.peer(GOOD, 1.1), one.peer(BAD, -4.0)
    result, file = one.merged(good, bad)
    assert result.harm is not None
    assert (result.harm.dropped, result.harm.kept_local) == ((BAD,), False)
    # What is left is the good one's third, as its verdict has it.
    third = one.weights("own")
    third["2.weight"] = third["2.weight"] * (1 + 0.1 * 0.95 / 3)
    got = _read(one, file)
    for name in third:
        torch.testing.assert_close(got[name], third[name])
    assert loss_on_validation(one, file) <= result.harm.limit
    [without] = [tried for tried in result.harm.tried if tried.without == (BAD,)]
    assert loss_on_validation(one, file) == pytest.approx(without.loss, abs=1e-6)


def test_the_worst_goes_first_and_in_the_end_our_model_is_kept_bit_for_bit(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one")
    bad, worse = one.peer(BAD, -20.0), one.peer(WORSE, -40.0)
    result, file = one.merged(bad, worse)
    assert result.harm is not None
    assert (result.harm.dropped, result.harm.kept_local) == ((WORSE, BAD), True)
    assert file == one.path("own").read_bytes()
    assert result.metrics["accuracy"] > 0.9  # measured is what is kept


def test_doing_it_again_in_another_worker_gives_the_same(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one")
    peers = [one.peer(GOOD, 1.1), one.peer(BAD, -4.0), one.peer(WORSE, -9.0)]
    first = one.merged(*peers)
    one.restart()
    assert one.merged(*peers) == first
    one.restart()
    assert one.merged(*peers[::-1]) == first
    assert first[0].harm is not None
    assert first[0].harm.dropped == (WORSE, BAD)


@pytest.mark.parametrize("rule", [{"harm_max": False}, {"guard": False}, {"name": "fedavg"}])
def test_where_it_is_off_whatever_was_accepted_is_merged(
    tmp_path: Path, rule: dict[str, Any]
) -> None:
    one = Trained(tmp_path / "one", rule=rule)
    result, file = one.merged(one.peer(BAD, -4.0))
    assert result.harm is None
    pull = 1.0 if "name" in rule else 0.95
    expected = one.weights("own")
    expected["2.weight"] = expected["2.weight"] * (1 + pull * 0.5 * (-4.0 - 1))
    for name, tensor in _read(one, file).items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_harmless_merge_has_the_bytes_that_it_has_without_the_check(tmp_path: Path) -> None:
    files = {}
    for name, rule in {"on": {}, "off": {"harm_max": False}}.items():
        one = Trained(tmp_path / name, rule=rule)
        result, files[name] = one.merged(one.peer(GOOD, 1.1), one.peer(BAD, 0.9))
        assert (result.harm is not None) == (name == "on")
    assert files["on"] == files["off"]


def test_without_anybody_there_is_nothing_to_measure(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one")
    result, file = one.merged()
    assert result.harm is None
    assert file == one.path("own").read_bytes()


def test_a_merge_that_overflows_is_harm(tmp_path: Path) -> None:
    """Finite weights, each of them, whose mean with ours gives no number any more."""
    one = Trained(tmp_path / "one", rule={"guard": False, "harm_max": 1.0})
    result, file = one.merged(one.peer(BAD, {"0.weight": 1e30, "2.weight": 1e30}))
    assert result.harm is not None
    assert result.harm.kept_local
    assert result.harm.tried[0].loss > 1e30
    assert file == one.path("own").read_bytes()


def normalising() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def test_statistics_are_our_own_in_what_is_measured_and_in_what_is_kept(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one", model=normalising)
    tampered = {"1.running_mean": 1e6, "1.running_var": 1e6}
    result, file = one.merged(one.peer(GOOD, tampered))
    assert result.harm is not None
    assert result.harm.dropped == ()
    assert loss_on_validation(one, file) == pytest.approx(result.harm.tried[0].loss, abs=1e-5)
    # Kept local means as it was trained, its running statistics too.
    result, file = one.merged(one.peer(BAD, {"3.weight": -50.0}))
    assert result.harm is not None
    assert result.harm.kept_local
    assert file == one.path("own").read_bytes()


def test_what_stays_at_home_is_part_of_what_is_measured(tmp_path: Path) -> None:
    one = Trained(tmp_path / "one", exchange={"exclude": ["2.*"]})
    peers = [one.peer(GOOD, {"0.weight": 1.1}), one.peer(BAD, {"0.weight": -9.0})]
    first = one.merged(*peers)
    assert first[0].harm is not None
    assert first[0].harm.dropped == (BAD,)
    one.restart()  # the head is then only in the carry file
    assert one.merged(*peers) == first


def test_who_asks_for_it_without_labels_is_told_at_the_start(tmp_path: Path) -> None:
    x, _ = samples()
    with pytest.raises(ConfigError, match="no labels") as caught:
        Diary(tmp_path / "one", val_data=[(x, None)], rule={"guard": False, "harm_max": 0.1})
    assert "harm_max: false" in str(caught.value.hint)
    Diary(tmp_path / "two", val_data=[(x, None)], rule={"guard": False})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("sites") / "one")


@settings(max_examples=15, deadline=None)
@given(
    factors=st.lists(st.floats(-60, 60), min_size=1, max_size=4),
    share=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_no_model_beyond_the_limit_is_ever_kept_but_our_own(
    trained: Trained, factors: list[float], share: float
) -> None:
    peers = [
        trained.peer(PeerName(f"peer-{index}"), factor) for index, factor in enumerate(factors)
    ]
    terms = {**trained.terms, "rule": RuleTerms(guard=False, harm_max=share)}
    result, file = trained.merged(*peers, site=Site(trained.task, **terms))
    harm = result.harm
    assert harm is not None
    if harm.kept_local:
        assert file == trained.path("own").read_bytes()
        assert len(harm.dropped) == len(peers)
    else:
        assert loss_on_validation(trained, file) <= harm.limit + 1e-5


def _read(diary: Diary, file: bytes) -> dict[str, Tensor]:
    path = diary.folder / "read"
    path.write_bytes(file)
    return {name: tensor.clone() for name, tensor in Weights(path, diary.layout).items()}
