"""Sites whose updates are rounded, partial, or contain tied tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab.malfunctions import Malfunction
from lightyear_node.learning import Layout, SchemaMismatch, Weights, exchanged, write
from lightyear_node.learning.guard import DistanceLimits
from lightyear_node.learning.rules import Judgement
from lightyear_node.types import Reason
from lightyear_node.worker import training_state
from lightyear_node.worker.job_types import CandidateFile, TrainedUpdate
from lightyear_node.worker.site import LocalSite
from tests.support.tiny_site import TinySite, distance, net, samples, task

BFLOAT16 = {"dtype": "bfloat16"}
FLOAT16 = {"dtype": "float16"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: more only add overhead on so small a network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judged(site: TinySite, **peers: Path) -> Judgement:
    return site.local_site.judge(
        own=site.path("own"),
        before=site.model,
        peers=[CandidateFile(n, str(path), 96, "0" * 64) for n, path in peers.items()],  # type: ignore[arg-type]
        round=site.round,
        carry=site.folder / "carry",
    )


def received(site: TinySite, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors that a peer reads from the file this site sent."""
    return dict(Weights(site.path("sent"), site.layout, site.layout.shortened(dtype)))


@pytest.mark.parametrize(
    ("exchange", "dtype"), [(BFLOAT16, torch.bfloat16), (FLOAT16, torch.float16)]
)
def test_peers_get_the_rounded_model_and_the_site_keeps_full_precision(
    tmp_path: Path, exchange: dict[str, str], dtype: torch.dtype
) -> None:
    plain = TinySite(tmp_path / "plain")
    short = TinySite(tmp_path / "short", exchange=exchange)
    for site in (plain, short):
        site.train()
    assert not plain.path("sent").exists()
    assert short.model.read_bytes() == plain.model.read_bytes()
    assert short.path("own").read_bytes() == plain.path("own").read_bytes()
    theirs = received(short, dtype)
    for name, tensor in short.weights("own").items():
        assert torch.equal(theirs[name], tensor.to(dtype).float())
    wire = short.local_site.wire
    header = len(short.layout.header)
    assert short.path("sent").stat().st_size == wire.file_bytes
    assert wire.file_bytes - len(wire.header) == (short.layout.file_bytes - header) // 2


def test_the_mean_uses_rounded_peers_and_our_model_in_full_precision(tmp_path: Path) -> None:
    site, other = (
        TinySite(tmp_path / name, name=name, rule={"name": "fedavg"}, exchange=BFLOAT16)
        for name in ("a", "b")
    )
    for each in (site, other):
        each.train()
    ours, theirs = site.weights("own"), received(other)
    site.finish_round({"b": other.path("sent")})
    for name, merged in Weights(site.model, site.layout).items():
        assert torch.equal(merged, ours[name] + 0.5 * (theirs[name] - ours[name]))


@pytest.mark.parametrize("rule", [{}, {"guard": False}, {"name": "afa"}])
def test_rounding_does_not_change_verdicts(tmp_path: Path, rule: dict[str, Any]) -> None:
    """The same sites with and without rounding: equal verdicts, nearly equal scores."""
    verdicts = {}
    for exchange in ({}, BFLOAT16, FLOAT16):
        folder = tmp_path / str(exchange.get("dtype"))
        folder.mkdir()
        site = TinySite(folder / "one", rule=rule, exchange=exchange)
        peers = [TinySite(folder / n, name=n, exchange=exchange) for n in ("b", "c")]
        bad = TinySite(folder / "d", name="d", malfunction="sfa", exchange=exchange)
        for each in (site, *peers, bad):
            each.train()
            each.finish_round()
            each.train()
        files = {each.folder.name: each.path("sent" if exchange else "own") for each in peers}
        verdicts[site.settings["exchange"].dtype] = judged(
            site, **files, d=bad.path("sent")
        ).verdicts
    plain = verdicts["float32"]
    assert [verdict.accepted for verdict in plain] == [True, True, False]
    for short in (verdicts["bfloat16"], verdicts["float16"]):
        for before, after in zip(plain, short, strict=True):
            assert (before.reason, before.weight) == (after.reason, after.weight)
            if before.score is not None:
                assert after.score == pytest.approx(before.score, abs=0.01)


@pytest.mark.parametrize("kind", Malfunction)
def test_malfunctions_are_applied_before_rounding(tmp_path: Path, kind: str) -> None:
    plain = TinySite(tmp_path / "plain", malfunction=kind)
    short = TinySite(tmp_path / "short", malfunction=kind, exchange=BFLOAT16)
    for site in (plain, short):
        site.train()
        site.finish_round()
        site.train()
    expected, theirs = plain.weights("sent"), received(short)
    for name, tensor in expected.items():
        assert torch.equal(theirs[name].nan_to_num(7), tensor.bfloat16().float().nan_to_num(7))


@pytest.mark.parametrize("rule", [{"name": "ditto", "options": {"lam": 0.5}}, {"name": "fedprox"}])
def test_training_does_not_depend_on_rounding(tmp_path: Path, rule: dict[str, Any]) -> None:
    folders = []
    for name, exchange in (("plain", {}), ("short", BFLOAT16)):
        site = TinySite(tmp_path / name, rule=rule, exchange=exchange)
        for _ in range(2):
            site.train()
            site.finish_round()
            site.restart()
        folders.append(site.folder)
    plain, short = folders
    for name in ("own-0", "own-1", "model", "carry"):
        assert (plain / name).read_bytes() == (short / name).read_bytes()


def test_a_double_precision_model_stays_in_double_precision(tmp_path: Path) -> None:
    x, y = samples()
    site, other = (
        TinySite(
            tmp_path / name,
            name=name,
            model=lambda: net().double(),
            exchange=BFLOAT16,
            train_data=[(x.double(), y)],
            val_data=[(x.double(), y)],
        )
        for name in ("a", "b")
    )
    for each in (site, other):
        each.train()
    assert all(verdict.accepted for verdict in judged(site, b=other.path("sent")).verdicts)
    site.finish_round({"b": other.path("sent")})
    merged = dict(Weights(site.model, site.layout))
    assert {tensor.dtype for tensor in merged.values()} == {torch.float64}
    data = site.local_site.wire.file_bytes - len(site.local_site.wire.header)
    assert data == (site.layout.file_bytes - len(site.layout.header)) // 4


def trained(site: TinySite) -> TrainedUpdate:
    return site.local_site.train(
        base=site.model,
        carry=None,
        round=0,
        own=site.path("own"),
        outgoing=site.path("sent"),
        carry_out=site.folder / "carry",
    )


def test_weights_too_large_for_the_type_are_clamped_and_counted(tmp_path: Path) -> None:
    def inflate(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters())[0, :2] = torch.tensor([1e6, -1e6])

    counts = {}
    for exchange in (BFLOAT16, FLOAT16):
        site = TinySite(tmp_path / exchange["dtype"], exchange=exchange, train_round=inflate)
        counts[exchange["dtype"]] = trained(site).clamped
    assert counts == {"bfloat16": 0, "float16": 2}
    assert received(site, torch.float16)["0.weight"][0, :2].tolist() == [65504.0, -65504.0]


def test_only_included_tensors_are_exchanged(tmp_path: Path) -> None:
    exchange = {"include": ["2.*"], "exclude": ["*.bias"], "dtype": "bfloat16"}
    site, other = (
        TinySite(tmp_path / name, name=name, exchange=exchange, rule={"guard": False})
        for name in ("a", "b")
    )
    for each in (site, other):
        each.train()
    assert list(site.local_site.wire.entries) == ["2.weight"]
    not_exchanged = training_state.load(site.folder / "carry")["shared"]["tensors"]
    site.finish_round({"b": other.path("sent")})
    kept = site.built[0].state_dict()
    assert not_exchanged.keys() == {"0.weight", "0.bias", "2.bias"}
    assert all(torch.equal(kept[name], tensor) for name, tensor in not_exchanged.items())
    assert not torch.equal(kept["2.weight"], site.weights("own", 0)["2.weight"])


def make_site(**exchange: Any) -> LocalSite:
    config = ExchangeConfig(**exchange)
    return LocalSite(task(), name="a", seed=3, rule=RuleConfig(), device="cpu", exchange=config)


def test_an_unmatched_exclude_is_a_warning_and_an_unmatched_include_an_error() -> None:
    assert make_site(exclude=("2.*",)).opened().warnings == ()
    [warning] = make_site(exclude=("2.*", "haed.*")).opened().warnings
    assert "haed.*" in warning
    with pytest.raises(ConfigError, match="haed"):
        make_site(include=("haed.*",))


class TiedLanguageModel(nn.Module):
    """Predicts the next word after four; its head is tied to its embedding."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(words)))  # (b, 12)
        return logits


def language_site(folder: Path, name: str, **changed: Any) -> TinySite:
    """A site that learns that each number is followed by the next."""
    first = torch.arange(48) % 12
    words, following = (first[:, None] + torch.arange(4)) % 12, (first + 4) % 12
    return TinySite(
        folder / name,
        name=name,
        **{
            "model": TiedLanguageModel,
            "train_data": [(words, following)] * 4,
            "val_data": [(words, following)],
            "optimizer": lambda parameters: torch.optim.Adam(parameters, 0.02),
            **changed,
        },
    )


@pytest.mark.parametrize("exchange", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_a_tied_head_is_trained_judged_and_merged(tmp_path: Path, exchange: dict[str, str]) -> None:
    kind = "sent" if exchange else "own"
    site, other = (language_site(tmp_path, name, exchange=exchange) for name in ("a", "b"))
    bad = language_site(tmp_path, "c", exchange=exchange, malfunction="head-flip")
    for _ in range(4):
        for each in (site, other, bad):
            each.train()
        good, flipped = judged(site, b=other.path(kind), c=bad.path("sent")).verdicts
        assert good.accepted
        assert good.score is not None
        assert not flipped.accepted
        files = {"a": site.path(kind), "b": other.path(kind)}
        site.finish_round({"b": files["b"]})
        other.finish_round({"a": files["a"]})
        bad.finish_round()
        model = site.built[0]
        assert isinstance(model, TiedLanguageModel)
        assert model.head.weight is model.embedding.weight
    assert "head.weight" not in site.layout.entries
    assert site.metrics["accuracy"] > 0.9


def test_a_restarted_site_with_a_tied_head_continues_identically(tmp_path: Path) -> None:
    """The training state must not restore the head that merging has replaced."""
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    results = []
    for name in ("running", "restarted"):
        folder = tmp_path / name
        folder.mkdir()
        site, other = (
            language_site(folder, "a", rule=ditto),
            language_site(folder, "b", rule={"name": "fedavg"}),
        )
        for _ in range(3):
            site.train()
            other.train()
            site.finish_round({"b": other.path("own")})
            other.finish_round()
            if name == "restarted":
                site.restart()
        results.append((site.model.read_bytes(), (folder / "a" / "carry").read_bytes()))
        start, merged = site.weights("own", 0), dict(Weights(site.model, site.layout))
        assert distance(start, merged) > 0
    assert results[0] == results[1]
    carried = training_state.load(tmp_path / "running" / "a" / "carry")
    assert carried["shared"]["tensors"] == {}
    assert "head.weight" not in carried["personal"]["tensors"]


def test_a_peer_cannot_untie_two_names(tmp_path: Path) -> None:
    """A file with both names has another header and is refused before its data is used."""
    site = language_site(tmp_path, "a", rule={"name": "fedavg"})
    site.train()
    both = {name: tensor.clone() for name, tensor in TiedLanguageModel().state_dict().items()}
    write(tmp_path / "both", Layout.of(both), both)
    assert "head.weight" in both
    [verdict] = judged(site, b=tmp_path / "both").verdicts
    assert (verdict.accepted, verdict.reason) == (False, Reason.MALFORMED)
    with pytest.raises(SchemaMismatch):
        site.finish_round({"b": tmp_path / "both"})
    site.finish_round({"b": site.path("own")})
    model = site.built[0].state_dict()
    assert torch.equal(model["head.weight"], model["embedding.weight"])


@pytest.mark.parametrize(
    ("kind", "bias", "changed"),
    [
        ("head-flip", True, {"embedding.weight", "head.bias"}),
        ("head-scale", False, {"embedding.weight"}),
        ("bias-shift", True, {"head.bias"}),
        ("random", True, set(exchanged(TiedLanguageModel()))),
    ],
)
def test_head_malfunctions_work_on_a_tied_head(
    tmp_path: Path, kind: str, bias: bool, changed: set[str]
) -> None:
    site = language_site(tmp_path, "a", malfunction=kind, model=lambda: TiedLanguageModel(bias))
    site.train()
    own, sent = site.weights("own"), site.weights("sent")
    assert {name for name in own if not torch.equal(own[name], sent[name])} == changed


def test_the_bias_of_a_tied_head_is_scaled_by_the_heads_weight(tmp_path: Path) -> None:
    tensors = exchanged(TiedLanguageModel())
    layout = Layout.of(tensors, {"head.weight": "embedding.weight"})
    write(tmp_path / "w", layout, tensors)
    tied = DistanceLimits.of(Weights(tmp_path / "w", layout))
    norm = float(tensors["embedding.weight"].norm())
    assert tied.scales["head.bias"] == pytest.approx(norm)
    assert DistanceLimits.of(tensors).scales["head.bias"] < norm / 4
