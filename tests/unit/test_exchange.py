"""A site whose weights travel rounded, in part, or under one name for two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.errors import ConfigError
from lightyear_node.learning import Layout, SchemaMismatch, Weights, exchanged, write
from lightyear_node.learning.guard import Ruler
from lightyear_node.learning.malfunctions import Malfunction
from lightyear_node.learning.rules import Judgement
from lightyear_node.worker import carry as carry_file
from lightyear_node.worker.jobs import Candidate, Trained
from lightyear_node.worker.site import Site

from .diary import Diary, distance, net, samples, task

BRAIN = {"dtype": "bfloat16"}
HALF = {"dtype": "float16"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More would only wait for each other on so small a network."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def judged(one: Diary, **peers: Path) -> Judgement:
    return one.site.judge(
        own=one.path("own"),
        before=one.model,
        peers=[Candidate(n, str(path), 96, "0" * 64) for n, path in peers.items()],  # type: ignore[arg-type]
        round=one.round,
        carry=one.folder / "carry",
    )


def received(one: Diary, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What a peer makes of the file that this site has sent."""
    return dict(Weights(one.path("sent"), one.layout, one.layout.shortened(dtype)))


@pytest.mark.parametrize(("terms", "dtype"), [(BRAIN, torch.bfloat16), (HALF, torch.float16)])
def test_peers_get_the_rounded_model_and_the_site_keeps_its_own(
    tmp_path: Path, terms: dict[str, str], dtype: torch.dtype
) -> None:
    plain = Diary(tmp_path / "plain")
    short = Diary(tmp_path / "short", exchange=terms)
    for one in (plain, short):
        one.train()
    assert not plain.path("sent").exists()
    assert short.model.read_bytes() == plain.model.read_bytes()
    assert short.path("own").read_bytes() == plain.path("own").read_bytes()
    theirs = received(short, dtype)
    for name, tensor in short.weights("own").items():
        assert torch.equal(theirs[name], tensor.to(dtype).float())
    wire = short.site.wire
    header = len(short.layout.header)
    assert short.path("sent").stat().st_size == wire.file_bytes
    assert wire.file_bytes - len(wire.header) == (short.layout.file_bytes - header) // 2


def test_the_mean_is_of_what_was_received_and_of_the_own_model_in_full(tmp_path: Path) -> None:
    one, other = (
        Diary(tmp_path / name, name=name, rule={"name": "fedavg"}, exchange=BRAIN)
        for name in ("a", "b")
    )
    for each in (one, other):
        each.train()
    ours, theirs = one.weights("own"), received(other)
    one.close({"b": other.path("sent")})
    for name, merged in Weights(one.model, one.layout).items():
        assert torch.equal(merged, ours[name] + 0.5 * (theirs[name] - ours[name]))


@pytest.mark.parametrize("rule", [{}, {"guard": False}, {"name": "afa"}])
def test_rounded_peers_are_judged_as_they_were(tmp_path: Path, rule: dict[str, Any]) -> None:
    """The same sites once with and once without rounding: the same verdicts, nearly the scores."""
    verdicts = {}
    for terms in ({}, BRAIN, HALF):
        folder = tmp_path / str(terms.get("dtype"))
        folder.mkdir()
        one = Diary(folder / "one", rule=rule, exchange=terms)
        peers = [Diary(folder / n, name=n, exchange=terms) for n in ("b", "c")]
        bad = Diary(folder / "d", name="d", malfunction="sfa", exchange=terms)
        for each in (one, *peers, bad):
            each.train()
            each.close()
            each.train()
        files = {each.folder.name: each.path("sent" if terms else "own") for each in peers}
        verdicts[one.terms["exchange"].dtype] = judged(one, **files, d=bad.path("sent")).verdicts
    plain = verdicts["float32"]
    assert [verdict.accepted for verdict in plain] == [True, True, False]
    for short in (verdicts["bfloat16"], verdicts["float16"]):
        for before, after in zip(plain, short, strict=True):
            assert (before.reason, before.weight) == (after.reason, after.weight)
            if before.score is not None:
                assert after.score == pytest.approx(before.score, abs=0.01)


@pytest.mark.parametrize("kind", Malfunction)
def test_malfunctions_are_rounded_after_they_have_struck(tmp_path: Path, kind: str) -> None:
    plain = Diary(tmp_path / "plain", malfunction=kind)
    short = Diary(tmp_path / "short", malfunction=kind, exchange=BRAIN)
    for one in (plain, short):
        one.train()
        one.close()
        one.train()
    expected, theirs = plain.weights("sent"), received(short)
    for name, tensor in expected.items():
        assert torch.equal(theirs[name].nan_to_num(7), tensor.bfloat16().float().nan_to_num(7))


@pytest.mark.parametrize("rule", [{"name": "ditto", "options": {"lam": 0.5}}, {"name": "fedprox"}])
def test_training_knows_nothing_of_rounding(tmp_path: Path, rule: dict[str, Any]) -> None:
    folders = []
    for name, terms in (("plain", {}), ("short", BRAIN)):
        one = Diary(tmp_path / name, rule=rule, exchange=terms)
        for _ in range(2):
            one.train()
            one.close()
            one.restart()
        folders.append(one.folder)
    plain, short = folders
    for name in ("own-0", "own-1", "model", "carry"):
        assert (plain / name).read_bytes() == (short / name).read_bytes()


def test_a_double_precision_model_stays_one(tmp_path: Path) -> None:
    x, y = samples()
    one, other = (
        Diary(
            tmp_path / name,
            name=name,
            model=lambda: net().double(),
            exchange=BRAIN,
            train_data=[(x.double(), y)],
            val_data=[(x.double(), y)],
        )
        for name in ("a", "b")
    )
    for each in (one, other):
        each.train()
    assert all(verdict.accepted for verdict in judged(one, b=other.path("sent")).verdicts)
    one.close({"b": other.path("sent")})
    merged = dict(Weights(one.model, one.layout))
    assert {tensor.dtype for tensor in merged.values()} == {torch.float64}
    data = one.site.wire.file_bytes - len(one.site.wire.header)
    assert data == (one.layout.file_bytes - len(one.layout.header)) // 4


def trained(one: Diary) -> Trained:
    return one.site.train(
        base=one.model,
        carry=None,
        round=0,
        own=one.path("own"),
        outgoing=one.path("sent"),
        carry_out=one.folder / "carry",
    )


def test_a_weight_too_large_for_its_type_is_sent_as_the_largest_and_told(tmp_path: Path) -> None:
    def inflate(model: nn.Module, optimizer: Any, device: Any) -> None:
        with torch.no_grad():
            next(model.parameters())[0, :2] = torch.tensor([1e6, -1e6])

    counts = {}
    for terms in (BRAIN, HALF):
        one = Diary(tmp_path / terms["dtype"], exchange=terms, train_round=inflate)
        counts[terms["dtype"]] = trained(one).clamped
    assert counts == {"bfloat16": 0, "float16": 2}
    assert received(one, torch.float16)["0.weight"][0, :2].tolist() == [65504.0, -65504.0]


def test_only_what_is_included_travels(tmp_path: Path) -> None:
    terms = {"include": ["2.*"], "exclude": ["*.bias"], "dtype": "bfloat16"}
    one, other = (
        Diary(tmp_path / name, name=name, exchange=terms, rule={"guard": False})
        for name in ("a", "b")
    )
    for each in (one, other):
        each.train()
    assert list(one.site.wire.entries) == ["2.weight"]
    at_home = carry_file.load(one.folder / "carry")["shared"]["tensors"]
    one.close({"b": other.path("sent")})
    kept = one.site._shared.model.state_dict()
    assert at_home.keys() == {"0.weight", "0.bias", "2.bias"}
    assert all(torch.equal(kept[name], tensor) for name, tensor in at_home.items())
    assert not torch.equal(kept["2.weight"], one.weights("own", 0)["2.weight"])


def opened(**exchange: Any) -> Site:
    terms = ExchangeTerms(**exchange)
    return Site(task(), name="a", seed=3, rule=RuleTerms(), device="cpu", exchange=terms)


def test_patterns_that_match_nothing() -> None:
    assert opened(exclude=("2.*",)).opened().warnings == ()
    [warning] = opened(exclude=("2.*", "haed.*")).opened().warnings
    assert "haed.*" in warning
    with pytest.raises(ConfigError, match="haed"):
        opened(include=("haed.*",))


class Words(nn.Module):
    """The next word after four: its head is its embedding."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 12, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(words)))  # (b, 12)
        return logits


def speaker(folder: Path, name: str, **changed: Any) -> Diary:
    """It learns that numbers go up."""
    first = torch.arange(48) % 12
    words, following = (first[:, None] + torch.arange(4)) % 12, (first + 4) % 12
    return Diary(
        folder / name,
        name=name,
        **{
            "model": Words,
            "train_data": [(words, following)] * 4,
            "val_data": [(words, following)],
            "optimizer": lambda parameters: torch.optim.Adam(parameters, 0.02),
            **changed,
        },
    )


@pytest.mark.parametrize("terms", [{}, BRAIN], ids=["float32", "bfloat16"])
def test_a_tied_head_trains_is_judged_and_merged(tmp_path: Path, terms: dict[str, str]) -> None:
    kind = "sent" if terms else "own"
    one, other = (speaker(tmp_path, name, exchange=terms) for name in ("a", "b"))
    bad = speaker(tmp_path, "c", exchange=terms, malfunction="head-flip")
    for _ in range(4):
        for each in (one, other, bad):
            each.train()
        good, flipped = judged(one, b=other.path(kind), c=bad.path("sent")).verdicts
        assert good.accepted
        assert good.score is not None
        assert not flipped.accepted
        files = {"a": one.path(kind), "b": other.path(kind)}
        one.close({"b": files["b"]})
        other.close({"a": files["a"]})
        bad.close()
        model = one.site._shared.model
        assert isinstance(model, Words)
        assert model.head.weight is model.embedding.weight
    assert "head.weight" not in one.layout.entries
    assert one.metrics["accuracy"] > 0.9


def test_a_restarted_site_with_a_tied_head_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is carried at home must not bring back the head that merging has replaced."""
    ditto = {"name": "ditto", "options": {"lam": 0.1}}
    results = []
    for name in ("calm", "torn"):
        folder = tmp_path / name
        folder.mkdir()
        one, other = speaker(folder, "a", rule=ditto), speaker(folder, "b", rule={"name": "fedavg"})
        for _ in range(3):
            one.train()
            other.train()
            one.close({"b": other.path("own")})
            other.close()
            if name == "torn":
                one.restart()
        results.append((one.model.read_bytes(), (folder / "a" / "carry").read_bytes()))
        start, merged = one.weights("own", 0), dict(Weights(one.model, one.layout))
        assert distance(start, merged) > 0
    assert results[0] == results[1]
    carried = carry_file.load(tmp_path / "calm" / "a" / "carry")
    assert carried["shared"]["tensors"] == {}
    assert "head.weight" not in carried["personal"]["tensors"]


def test_no_peer_can_make_two_names_differ(tmp_path: Path) -> None:
    """A file with both names has another header, and is refused before a byte of it is used."""
    one = speaker(tmp_path, "a", rule={"name": "fedavg"})
    one.train()
    both = {name: tensor.clone() for name, tensor in Words().state_dict().items()}
    write(tmp_path / "both", Layout.of(both), both)
    assert "head.weight" in both
    with pytest.raises(SchemaMismatch):
        judged(one, b=tmp_path / "both")
    with pytest.raises(SchemaMismatch):
        one.close({"b": tmp_path / "both"})
    one.close({"b": one.path("own")})
    model = one.site._shared.model.state_dict()
    assert torch.equal(model["head.weight"], model["embedding.weight"])


@pytest.mark.parametrize(
    ("kind", "bias", "changed"),
    [
        ("head-flip", True, {"embedding.weight", "head.bias"}),
        ("head-scale", False, {"embedding.weight"}),
        ("bias-shift", True, {"head.bias"}),
        ("random", True, set(exchanged(Words()))),
    ],
)
def test_malfunctions_find_a_tied_head(
    tmp_path: Path, kind: str, bias: bool, changed: set[str]
) -> None:
    one = speaker(tmp_path, "a", malfunction=kind, model=lambda: Words(bias))
    one.train()
    own, sent = one.weights("own"), one.weights("sent")
    assert {name for name in own if not torch.equal(own[name], sent[name])} == changed


def test_the_bias_of_a_tied_head_is_measured_by_the_heads_weight(tmp_path: Path) -> None:
    tensors = exchanged(Words())
    layout = Layout.of(tensors, {"head.weight": "embedding.weight"})
    write(tmp_path / "w", layout, tensors)
    tied = Ruler.of(Weights(tmp_path / "w", layout))
    norm = float(tensors["embedding.weight"].norm())
    assert tied.scales["head.bias"] == pytest.approx(norm)
    assert Ruler.of(tensors).scales["head.bias"] < norm / 4
