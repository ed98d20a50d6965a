"""`audit compare` and `audit verify --peers` on the journals of three sites."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightyear_node.identity.invite import Invite
from lightyear_node.storage.journal_reader import reading
from lightyear_node.tools.peers_file import add_peers
from lightyear_node.types import PeerName, SignedHead
from tests.support.cli_runner import data_of, error_of, output_of, run_cli
from tests.support.journals import (
    FEDERATION,
    IDENTITIES,
    JournalSite,
    alter,
    digest,
    run_rounds,
)
from tests.support.tls_sites import FakeHost, serving

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
JOURNAL = "state/journal.db"


def test_two_sites_agree_from_exports_and_folders(home: Path, sites: Path) -> None:
    output_of("audit", "export", "-o", "a.jsonl")
    output_of("audit", "export", "--home", str(sites / B), "--format", "csv", "-o", "b.csv")
    for left, right in (("a.jsonl", "b.csv"), (".", str(sites / B)), ("state", "b.csv")):
        data = data_of("audit", "compare", left, right)
        assert (data["ok"], data["rounds"], data["uncovered"]) == (True, 3, 0)
        # In each round: one of each other, and that of the third site, which both reject.
        assert data["updates"] == 9
        assert data["heads"] == 5
    assert "site-a and site-c agree: 3 rounds" in output_of("audit", "compare", ".", str(sites / C))


def test_a_part_of_a_journal_agrees_with_the_whole(home: Path, sites: Path) -> None:
    output_of("audit", "export", "--from-round", "1", "--to-round", "1", "-o", "a.jsonl")
    data = data_of("audit", "compare", "a.jsonl", str(sites / B))
    assert (data["ok"], data["rounds"]) == (True, 1)
    assert data["uncovered"] > 0


class ThreeSites:
    """Three sites that can be made to differ in round 1."""

    def __init__(self, folder: Path) -> None:
        self.sites = {name: JournalSite(folder / name, IDENTITIES[name]) for name in (A, B, C)}
        run_rounds(self.sites.values(), [0])

    def run_round_1(self, had: dict[tuple[PeerName, PeerName], str]) -> None:
        """`had[site, sender]`: an update that a site received instead of the sealed one."""
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
    federation = ThreeSites(tmp_path)
    federation.run_round_1({(A, B): "forged"})
    text = output_of("audit", "compare", str(tmp_path / A), str(tmp_path / B), code=3)
    assert f"for round 1 site-a had the update {digest('forged')[:12]} of site-b" in text
    assert f"site-b has recorded {digest(B, 1)[:12]}" in text
    data = data_of("audit", "compare", str(tmp_path / B), str(tmp_path / A), code=3)
    assert data["first"]["round"] == 1
    # site-c is consistent with site-b, and had another update of site-b than site-a.
    output_of("audit", "compare", str(tmp_path / B), str(tmp_path / C))
    text = output_of("audit", "compare", str(tmp_path / A), str(tmp_path / C), code=3)
    assert "site-b has sent two different updates for one round" in text


def test_a_rewritten_journal_is_a_difference(tmp_path: Path) -> None:
    """Signed and consistent, but the other site holds a head of the original."""
    federation = ThreeSites(tmp_path / "first")
    federation.run_round_1({})
    other = ThreeSites(tmp_path / "second")
    shutil.rmtree(tmp_path / "second" / A)
    rewritten = JournalSite(tmp_path / "second" / A, IDENTITIES[A])
    rewritten.seal(0)
    rewritten.journal.append("operator", {"did": "something"}, wall_ns=1, lamport=99, round=0)
    rewritten.decide(0, [other.sites[B].update(0), other.sites[C].update(0)])
    rewritten.commit(0)
    rewritten.close()
    output_of("audit", "verify", "--home", str(rewritten.home))
    text = output_of("audit", "compare", str(tmp_path / "first" / B), str(rewritten.home), code=3)
    assert "is not in the journal site-a shows now" in text


def test_a_damaged_journal_is_not_compared(home: Path, sites: Path) -> None:
    alter(sites / B / JOURNAL, "DELETE FROM records WHERE seq = 5")
    text = output_of("audit", "compare", ".", str(sites / B), code=3)
    assert "does not hold in itself: record 5 is missing" in text


def test_what_cannot_be_compared_is_refused(home: Path, tmp_path: Path) -> None:
    assert "both are records of site-a" in str(error_of("audit", "compare", ".", "state"))
    assert "does not exist" in str(error_of("audit", "compare", ".", str(tmp_path / "nowhere")))
    new = JournalSite(tmp_path / "new", IDENTITIES[B])
    new.close()
    problem = error_of("audit", "compare", ".", str(new.home))
    assert "no update in common" in str(problem)


# Witnesses.


def with_peers(sites: Path, address: str) -> Path:
    peers = sites / "peers.yaml"
    known = [
        Invite(A, "127.0.0.1:1", IDENTITIES[A].certificate),
        Invite(B, address, IDENTITIES[B].certificate),
        Invite(C, None, IDENTITIES[C].certificate),
    ]
    add_peers(peers, known, FEDERATION, None)
    return peers


async def _verify_with_witness(sites: Path, held: SignedHead | None) -> tuple[int, dict[str, Any]]:
    """Run `audit verify --peers` at site-a, while site-b returns `held`."""
    host = FakeHost()
    host.answer = lambda peer, hello: replace(hello, your_head=held)
    async with serving(host, IDENTITIES[B], [IDENTITIES[A]]) as (_, address):
        peers = with_peers(sites, address)
        command = ["audit", "verify", "--home", str(sites / A), "--peers", str(peers)]
        ended = await asyncio.to_thread(run_cli, *command, "--format", "json")
    [(caller, greeting)] = host.calls
    assert (caller, greeting.probe) == (A, True)
    data = json.loads(ended.output)["data"]
    assert data["ok"] == (ended.exit_code == 0)
    return ended.exit_code, {one["peer"]: one for one in data["peers"]}


def verify_with_witness(sites: Path, held: SignedHead | None) -> tuple[int, dict[str, Any]]:
    return asyncio.run(_verify_with_witness(sites, held))


def head_in(home: Path) -> SignedHead:
    with reading(home / "state/journal.db") as copy:
        seq = max(copy.heads)
        hash, signature = copy.heads[seq]
    return SignedHead(seq, hash, bytes.fromhex(signature))


def test_a_witness_confirms_the_journal(sites: Path) -> None:
    code, peers = verify_with_witness(sites, head_in(sites / A))
    assert (code, peers[B]["ok"], peers[C]["ok"]) == (0, True, None)
    assert "holds record 10" in peers[B]["about"]
    assert "cannot be asked" in peers[C]["about"]


def test_a_witness_detects_a_truncated_journal(sites: Path) -> None:
    """The shortened journal is consistent in itself."""
    head = head_in(sites / A)
    shutil.rmtree(sites / A)
    site = JournalSite(sites / A, IDENTITIES[A])
    run_rounds([site], [0])
    site.close()
    output_of("audit", "verify", "--home", str(sites / A))
    code, peers = verify_with_witness(sites, head)
    assert (code, peers[B]["ok"]) == (3, False)
    assert "ends at record 4: it was cut short" in peers[B]["about"]


def test_a_head_that_we_did_not_sign_proves_nothing(sites: Path) -> None:
    code, peers = verify_with_witness(sites, SignedHead(99, digest("x"), b"\0" * 64))
    assert (code, peers[B]["ok"]) == (0, None)
    assert "not signed here" in peers[B]["about"]
    (sites / "peers.yaml").unlink()
    code, peers = verify_with_witness(sites, None)
    assert (code, peers[B]["ok"]) == (0, None)
    assert "no head" in peers[B]["about"]
