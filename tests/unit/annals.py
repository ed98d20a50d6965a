"""Journals of sites that have run some rounds together: the real ledger, without a node."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lightyear_node.barrier import Cause, Decision, Memory
from lightyear_node.identity import Identity, make_identity
from lightyear_node.joining import Joined
from lightyear_node.journal import Journal
from lightyear_node.ledger import Ledger, Work
from lightyear_node.peers_file import add_peers
from lightyear_node.records import (
    Digest,
    Generation,
    Manifest,
    PeerName,
    Reason,
    Round,
    Update,
    Verdict,
)
from lightyear_node.witnesses import Witnesses

FEDERATION = "ward"
NOW = datetime.now(UTC)
NAMES = tuple(PeerName(f"site-{letter}") for letter in "abc")
IDENTITIES = {name: make_identity(name, NOW) for name in NAMES}
REFUSED = PeerName("site-c")
"""Too far from everybody in every round."""
GUARD = {
    "distance": 0.31,
    "distance_max": 0.5,
    "agreement": 0.81,
    "tau": 0.6,
    "regret": 0.02,
    "regret_max": 0.4,
}


def digest(*words: object) -> Digest:
    return Digest(hashlib.sha256(repr(words).encode()).hexdigest())


class Annalist:
    """One site, in its home directory."""

    def __init__(self, home: Path, identity: Identity) -> None:
        self.home = home
        self.identity = identity
        self.name = identity.name
        (home / "state").mkdir(parents=True)
        identity.save(home / "keys")
        (home / "node.yaml").write_text("address: null\n")
        self.path = home / "state/journal.db"
        self.open()

    def open(self) -> None:
        self.journal = Journal(self.path)
        stamps = itertools.count(self.journal.lamport + 1)
        self.ledger = Ledger(
            self.journal,
            wall_ns=lambda: 1_700_000_000_000_000_000 + self.journal.length * 10**9,
            stamp=lambda: next(stamps),
            sign=lambda seq, hash: self.identity.sign_head(FEDERATION, seq, hash),
        )
        key = self.identity.certificate.signing_key
        self.witnesses = Witnesses(
            self.ledger, us=self.name, federation=FEDERATION, signing_key=key
        )
        about = {"site": self.name, "federation": FEDERATION, "signing_key": key.hex()}
        about["initial_model"] = digest("start")
        self.ledger.start(
            schema=digest("schema"), initial_model=digest("start"), rule="lightyear", about=about
        )

    def update(self, round: int) -> Update:
        return Update(self.name, Generation(0), Round(round), digest(self.name, round))

    def seal(self, round: int) -> None:
        update = self.update(round)
        manifest = Manifest(FEDERATION, update, 1, digest("schema"), 10, 20)
        work = Work(update.digest, update.digest, digest("carry"), 10, 20, {"loss": 1.5})
        memory = Memory(Generation(0), Round(round), announced=update)
        self.ledger.seal(update, memory, work, self.identity.sign_manifest(manifest))

    def decide(self, round: int, others: Sequence[Update]) -> None:
        verdicts = tuple(_verdict(update) for update in others)
        accepted = tuple(update for update in others if update.peer != REFUSED)
        why = f"all {len(others)} peers delivered"
        decision = Decision(Round(round), Cause.ALL, why, accepted, verdicts)
        memory = Memory(Generation(0), Round(round), self.update(round), decision)
        self.ledger.decide(decision, memory, {})

    def commit(self, round: int) -> None:
        memory = Memory(Generation(0), Round(round + 1), announced=self.update(round))
        self.ledger.commit(Round(round), digest("merged", self.name, round), memory, {"loss": 1.25})

    def close(self) -> None:
        self.journal.close()

    def alter(self, *statements: str) -> None:
        alter(self.path, *statements)


def _verdict(update: Update) -> Verdict:
    if update.peer != REFUSED:
        return Verdict(update.peer, True, Reason.OK, 0.81, 1 / 3, GUARD, update.digest)
    checks = {**GUARD, "distance": 1.9}
    return Verdict(update.peer, False, Reason.TOO_FAR, 0.81, 0.0, checks, update.digest)


def run_rounds(sites: Iterable[Annalist], rounds: Iterable[int]) -> None:
    """Everybody's record of these rounds, with everybody as a witness of everybody."""
    sites = tuple(sites)
    for round in rounds:
        for site in sites:
            site.seal(round)
        for site in sites:
            others = [other for other in sites if other is not site]
            site.decide(round, [other.update(round) for other in others])
            site.commit(round)
            for other in others:
                head = site.witnesses.ours()
                assert head is not None
                other.witnesses.hold(site.name, head, [site.identity.certificate.signing_key])


def three_sites(folder: Path, rounds: int = 3) -> dict[PeerName, Annalist]:
    sites = {name: Annalist(folder / name, IDENTITIES[name]) for name in NAMES}
    run_rounds(sites.values(), range(rounds))
    return sites


def alter(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        for statement in statements:
            db.execute(statement)
    finally:
        db.close()


def a_federation(folder: Path) -> Path:
    """Three sites with some rounds behind them, none of which runs; each has the peers.yaml."""
    for site in three_sites(folder).values():
        site.close()
    joined = [
        Joined(name, f"127.0.0.1:{port}", identity.certificate)
        for port, (name, identity) in enumerate(IDENTITIES.items(), start=7443)
    ]
    for place in (folder, *(folder / name for name in NAMES)):
        add_peers(place / "peers.yaml", joined, FEDERATION)
    return folder
