"""`audit compare`, and what witnesses say: the journals of three sites beside each other."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.joining import Joined
from lightyear_node.journal import reading
from lightyear_node.peers_file import add_peers
from lightyear_node.records import PeerName, SignedHead
from tests.unit.annals import (
    FEDERATION,
    IDENTITIES,
    Annalist,
    alter,
    digest,
    run_rounds,
    three_sites,
)
from tests.unit.desk import data_of, ran, refused, told
from tests.unit.sites import FakeHost, serving

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
JOURNAL = "state/journal.db"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for site in three_sites(folder).values():
        site.close()
    return folder


@pytest.fixture
def sites(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "sites"))


@pytest.fixture
def home(sites: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """We are at site-a."""
    monkeypatch.chdir(sites / A)
    return sites / A


def test_two_sites_agree_from_exports_and_folders(home: Path, sites: Path) -> None:
    told("audit", "export", "-o", "a.jsonl")
    told("audit", "export", "--home", str(sites / B), "--format", "csv", "-o", "b.csv")
    for left, right in (("a.jsonl", "b.csv"), (".", str(sites / B)), ("state", "b.csv")):
        data = data_of("audit", "compare", left, right)
        assert (data["ok"], data["rounds"], data["uncovered"]) == (True, 3, 0)
        # One of each other and a third site's, which both refuse, in each round.
        assert data["updates"] == 9
        assert data["heads"] == 5
    assert "site-a and site-c agree: 3 rounds" in told("audit", "compare", ".", str(sites / C))


def test_a_part_of_a_record_agrees_as_far_as_it_goes(home: Path, sites: Path) -> None:
    told("audit", "export", "--from-round", "1", "--to-round", "1", "-o", "a.jsonl")
    data = data_of("audit", "compare", "a.jsonl", str(sites / B))
    assert (data["ok"], data["rounds"]) == (True, 1)
    assert data["uncovered"] > 0


class Story:
    """Two sites whose stories differ in round 1."""

    def __init__(self, folder: Path) -> None:
        self.sites = {name: Annalist(folder / name, IDENTITIES[name]) for name in (A, B, C)}
        run_rounds(self.sites.values(), [0])

    def go_on(self, had: dict[tuple[PeerName, PeerName], str]) -> None:
        """`had`: what a site got of another in round 1, where that is not what it sealed."""
        for site in self.sites.values():
            site.seal(1)
        for name, site in self.sites.items():
            others = [
                replace(other.update(1), digest=digest(had.get((name, of), (of, 1))))
                if (name, of) in had
                else other.update(1)
                for of, other in self.sites.items()
                if of != name
            ]
            site.decide(1, others)
            site.commit(1)
            site.close()


def test_an_update_that_its_site_did_not_seal_is_a_difference(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.go_on({(A, B): "forged"})
    words = told("audit", "compare", str(tmp_path / A), str(tmp_path / B), code=3)
    assert f"for round 1 site-a had the update {digest('forged')[:12]} of site-b" in words
    assert f"site-b says it sealed {digest(B, 1)[:12]}" in words
    data = data_of("audit", "compare", str(tmp_path / B), str(tmp_path / A), code=3)
    assert data["first"]["round"] == 1
    # The others have nothing to do with it, except that they had something else of site-b.
    told("audit", "compare", str(tmp_path / B), str(tmp_path / C))
    words = told("audit", "compare", str(tmp_path / A), str(tmp_path / C), code=3)
    assert "site-b has sent two different updates for one round" in words


def test_a_record_that_was_written_anew_is_a_difference(tmp_path: Path) -> None:
    """With the right key, and sound in itself; but the other site has held its head."""
    story = Story(tmp_path / "first")
    story.go_on({})
    other = Story(tmp_path / "second")
    shutil.rmtree(tmp_path / "second" / A)
    anew = Annalist(tmp_path / "second" / A, IDENTITIES[A])
    anew.seal(0)
    anew.journal.append("operator", {"did": "something"}, wall_ns=1, lamport=99, round=0)
    anew.decide(0, [other.sites[B].update(0), other.sites[C].update(0)])
    anew.commit(0)
    anew.close()
    told("audit", "verify", "--home", str(anew.home))
    words = told("audit", "compare", str(tmp_path / "first" / B), str(anew.home), code=3)
    assert "is not in the record site-a shows now" in words


def test_a_record_that_does_not_hold_is_not_compared(home: Path, sites: Path) -> None:
    alter(sites / B / JOURNAL, "DELETE FROM records WHERE seq = 5")
    words = told("audit", "compare", ".", str(sites / B), code=3)
    assert "does not hold in itself: record 5 is missing" in words


def test_what_cannot_be_compared_is_refused(home: Path, tmp_path: Path) -> None:
    assert "both are records of site-a" in str(refused("audit", "compare", ".", "state"))
    assert "is not there" in str(refused("audit", "compare", ".", str(tmp_path / "nowhere")))
    new = Annalist(tmp_path / "new", IDENTITIES[B])
    new.close()
    problem = refused("audit", "compare", ".", str(new.home))
    assert "no update in common" in str(problem)


# Witnesses.


def with_peers(sites: Path, address: str) -> Path:
    peers = sites / "peers.yaml"
    known = [
        Joined(A, "127.0.0.1:1", IDENTITIES[A].certificate),
        Joined(B, address, IDENTITIES[B].certificate),
        Joined(C, None, IDENTITIES[C].certificate),
    ]
    add_peers(peers, known, FEDERATION, None)
    return peers


async def _asked(sites: Path, held: SignedHead | None) -> tuple[int, dict[str, Any]]:
    """`audit verify --peers` at site-a, while site-b answers that it holds this."""
    host = FakeHost()
    host.answer = lambda peer, hello: replace(hello, your_head=held)
    async with serving(host, IDENTITIES[B], [IDENTITIES[A]]) as (_, address):
        peers = with_peers(sites, address)
        words = ["audit", "verify", "--home", str(sites / A), "--peers", str(peers)]
        ended = await asyncio.to_thread(ran, *words, "--format", "json")
    [(caller, greeting)] = host.heard
    assert (caller, greeting.probe) == (A, True)
    data = json.loads(ended.output)["data"]
    assert data["ok"] == (ended.exit_code == 0)
    return ended.exit_code, {one["peer"]: one for one in data["peers"]}


def asked(sites: Path, held: SignedHead | None) -> tuple[int, dict[str, Any]]:
    return asyncio.run(_asked(sites, held))


def head_in(home: Path) -> SignedHead:
    with reading(home / "state/journal.db") as copy:
        seq = max(copy.heads)
        hash, signature = copy.heads[seq]
    return SignedHead(seq, hash, bytes.fromhex(signature))


def test_a_witness_confirms_the_journal(sites: Path) -> None:
    code, peers = asked(sites, head_in(sites / A))
    assert (code, peers[B]["ok"], peers[C]["ok"]) == (0, True, None)
    assert "holds record 10" in peers[B]["about"]
    assert "cannot be asked" in peers[C]["about"]


def test_a_witness_tells_of_a_journal_that_was_put_back(sites: Path) -> None:
    """Cut without a trace: everything in the file fits together."""
    head = head_in(sites / A)
    shutil.rmtree(sites / A)
    site = Annalist(sites / A, IDENTITIES[A])
    run_rounds([site], [0])
    site.close()
    told("audit", "verify", "--home", str(sites / A))
    code, peers = asked(sites, head)
    assert (code, peers[B]["ok"]) == (3, False)
    assert "ends at record 4: it was cut short" in peers[B]["about"]


def test_what_a_witness_has_not_from_us_proves_nothing(sites: Path) -> None:
    code, peers = asked(sites, SignedHead(99, digest("x"), b"\0" * 64))
    assert (code, peers[B]["ok"]) == (0, None)
    assert "not signed here" in peers[B]["about"]
    (sites / "peers.yaml").unlink()
    code, peers = asked(sites, None)
    assert (code, peers[B]["ok"]) == (0, None)
    assert "no head" in peers[B]["about"]
