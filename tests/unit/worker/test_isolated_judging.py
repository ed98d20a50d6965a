"""A peer's file never prevents other peers from being judged (real worker code)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import TaskFailed
from lightyear_node.learning import Weights, write
from lightyear_node.learning.rules import RULES
from lightyear_node.learning.rules.base import Judgement
from lightyear_node.types import Digest, PeerName, Reason
from lightyear_node.worker.bad_file_search import TriedFiles, tried
from lightyear_node.worker.isolated_judging import judge_isolated
from lightyear_node.worker.job_types import CandidateFile
from tests.support.installed_package import install_package
from tests.support.tiny_site import CLASSES, TinySite

BAD = PeerName("site-c")
HONEST = tuple(PeerName(f"site-{letter}") for letter in "bdef")
LIMIT = 1e6


class Fragile(nn.Module):
    """A user's network that raises for some weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if float(self.body.weight.detach().abs().max()) > LIMIT:
            raise RuntimeError("weights out of range")
        result: Tensor = self.head(torch.relu(self.body(x)))
        return result


class SiteWithPeers(TinySite):
    """A site in its second round, with honest peers close to it and one bad peer."""

    def __init__(self, folder: Path, rule: str, **changed: Any) -> None:
        super().__init__(folder, rule={"name": rule}, model=Fragile, **changed)
        self.train()
        self.finish_round()
        self.train()
        generator = torch.Generator().manual_seed(9)
        trained = self.weights("own")
        self.honest = [
            self.candidate(
                name,
                {
                    n: t + 1e-3 * torch.randn(t.shape, generator=generator)
                    for n, t in trained.items()
                },
            )
            for name in HONEST
        ]

    def candidate(self, name: PeerName, tensors: dict[str, Tensor]) -> CandidateFile:
        path = self.folder / f"from-{name}"
        write(path, self.layout, tensors)
        return CandidateFile(name, str(path), 1, Digest("0" * 64))

    def file(self, content: bytes) -> CandidateFile:
        path = self.folder / f"from-{BAD}"
        path.write_bytes(content)
        return CandidateFile(BAD, str(path), 1, Digest("0" * 64))

    def filled(self, value: float) -> CandidateFile:
        tensors = {n: torch.full_like(t, value) for n, t in self.weights("own").items()}
        return self.candidate(BAD, tensors)

    def judge(
        self, peers: Sequence[CandidateFile], state: dict[str, Any] | None = None
    ) -> Judgement:
        return self.local_site.judge(
            own=self.path("own"),
            before=self.model,
            peers=peers,
            round=self.round,
            state=state,
            carry=self.folder / "carry",
        )


def with_honest_peers(site: SiteWithPeers, bad: CandidateFile) -> list[CandidateFile]:
    return sorted([*site.honest, bad], key=lambda peer: peer.peer)


def own_file(site: SiteWithPeers) -> bytes:
    return site.path("own").read_bytes()


UNREADABLE: dict[str, Callable[[SiteWithPeers], bytes]] = {
    "empty": lambda site: b"",
    "one byte": lambda site: b"\0",
    "only a header": lambda site: own_file(site)[: len(site.layout.header)],
    "cut short": lambda site: own_file(site)[:-4],
    "too long": lambda site: own_file(site) + bytes(4),
    "of another model": lambda site: own_file(site).replace(b"body", b"tors"),
}
EXTREME = (float("nan"), float("inf"), torch.finfo(torch.float32).max, -3e38, 1e-45, 0.0)


@pytest.fixture(scope="module", params=sorted(RULES))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SiteWithPeers:
    return SiteWithPeers(tmp_path_factory.mktemp("sites") / "site", request.param)


def test_an_unreadable_file_rejects_only_its_own_peer(site: SiteWithPeers) -> None:
    without = site.judge(site.honest)
    assert {verdict.peer for verdict in without.verdicts} == set(HONEST)
    for kind, content in UNREADABLE.items():
        found = site.judge(with_honest_peers(site, site.file(content(site))))
        verdicts = {verdict.peer: verdict for verdict in found.verdicts}
        bad = verdicts.pop(BAD)
        assert (bad.accepted, bad.reason) == (False, Reason.MALFORMED), kind
        assert tuple(verdicts.values()) == without.verdicts, kind
        assert found.state == without.state, kind


def test_a_missing_file_is_damaged_not_malformed(site: SiteWithPeers) -> None:
    missing = CandidateFile(BAD, str(site.folder / "nothing"), 1, Digest("0" * 64))
    without = site.judge(site.honest)
    verdicts = {v.peer: v for v in site.judge(with_honest_peers(site, missing)).verdicts}
    assert verdicts.pop(BAD).reason is Reason.DAMAGED
    assert tuple(verdicts.values()) == without.verdicts


def test_peers_are_judged_despite_extreme_values_of_another(site: SiteWithPeers) -> None:
    for value in EXTREME:
        verdicts = {
            v.peer: v for v in site.judge(with_honest_peers(site, site.filled(value))).verdicts
        }
        assert verdicts.keys() == {*HONEST, BAD}
        unjudged = {Reason.UNSCORED, Reason.MALFORMED, Reason.DAMAGED}
        assert not unjudged & {verdicts[name].reason for name in HONEST}, value
        # The other rules compare peers with each other.
        if site.settings["rule"].name in ("lightyear", "fedavg", "balance"):
            assert all(verdicts[name].accepted for name in HONEST), value


def test_weights_that_make_the_network_raise_are_malformed(tmp_path: Path) -> None:
    """Without the guard only the network itself checks the weights."""
    site = SiteWithPeers(tmp_path / "site", "lightyear")
    site.settings["rule"] = RuleConfig(name="lightyear", guard=False)
    site.restart()
    verdicts = {
        v.peer: v for v in site.judge(with_honest_peers(site, site.filled(10 * LIMIT))).verdicts
    }
    assert verdicts[BAD].reason is Reason.MALFORMED
    assert all(verdicts[name].accepted for name in HONEST)


def test_a_failure_of_our_own_file_is_not_blamed_on_a_peer(tmp_path: Path) -> None:
    site = SiteWithPeers(tmp_path / "site", "lightyear")
    site.path("own").write_bytes(b"")
    with pytest.raises(ValueError, match="bytes"):
        site.judge(site.honest)


USER_RULES = f"""
def shares(peers):
    return {{peer.peer: 0.1 for peer in peers}}

def strict(own, peers, validation, context):
    if any(peer.peer == "{BAD}" for peer in peers):
        raise ZeroDivisionError
    return shares(peers)

def needs_several(own, peers, validation, context):
    if len(peers) == 1:
        raise ZeroDivisionError
    return strict(own, peers, validation, context)

def broken(own, peers, validation, context):
    raise ZeroDivisionError
"""


@pytest.fixture
def user_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with the rules above."""
    points = {name: f"user_rules:{name}" for name in ("strict", "needs_several", "broken")}
    install_package(tmp_path / "installed", "user_rules", USER_RULES, points)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))


@pytest.mark.usefixtures("user_rules")
@pytest.mark.parametrize(
    ("rule", "reason"), [("strict", Reason.MALFORMED), ("needs_several", Reason.UNSCORED)]
)
def test_a_user_rule_that_raises_with_one_peer_judges_the_others(
    tmp_path: Path, rule: str, reason: Reason
) -> None:
    """A rule that needs several peers cannot show that the bad one is the cause."""
    site = SiteWithPeers(tmp_path / "site", rule)
    verdicts = {v.peer: v for v in site.judge(with_honest_peers(site, site.filled(0.5))).verdicts}
    assert verdicts[BAD].reason is reason
    assert all(verdicts[name].accepted for name in HONEST)


@pytest.mark.usefixtures("user_rules")
def test_a_user_rule_that_always_raises_fails_the_task(tmp_path: Path) -> None:
    site = SiteWithPeers(tmp_path / "site", "broken")
    with pytest.raises(TaskFailed, match="ZeroDivisionError"):
        site.judge(site.honest)


def test_out_of_memory_is_not_blamed_on_a_file(tmp_path: Path) -> None:
    """The worker fails, and the daemon starts a new one."""
    tries: list[int] = []

    def judge(files: Sequence[Any]) -> Judgement:
        tries.append(len(files))
        raise MemoryError

    site = SiteWithPeers(tmp_path / "site", "fedavg")
    with pytest.raises(MemoryError):
        judge_isolated(site.honest, lambda path: Weights(Path(path), site.layout), judge)
    assert tries == [len(HONEST)]


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_exactly_the_files_that_fail_alone_are_found(peers: set[int], bad: set[int]) -> None:
    attempts: list[Sequence[int]] = []

    def attempt(files: Sequence[int]) -> str | None:
        attempts.append(files)
        return None if bad & set(files) else f"{sorted(files)}"

    found: TriedFiles[int, str] = tried(sorted(peers), attempt)
    failing = peers & bad
    if len(peers) > 1 and failing == peers:
        assert found == TriedFiles("[]", (), tuple(sorted(peers)), job_at_fault=True), (
            "the job itself may be at fault"
        )
    else:
        assert found == TriedFiles(f"{sorted(peers - bad)}", tuple(sorted(failing)))
    assert len(attempts) <= 2 * len(peers) + 3
    assert len(attempts) == 1 or failing
