"""Journals of sites that have run some rounds together: real round journals, no nodes."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lightyear_node.identity.invite import Invite
from lightyear_node.identity.keys import Identity, make_identity
from lightyear_node.node.journal_witness import JournalWitness
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.parameters import Cause
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.tools.peers_file import add_peers
from lightyear_node.types import (
    Digest,
    Generation,
    Manifest,
    PeerName,
    Reason,
    Round,
    Update,
    Verdict,
)

FEDERATION = "ward"
NOW = datetime.now(UTC)
NAMES = tuple(PeerName(f"site-{letter}") for letter in "abc")
IDENTITIES = {name: make_identity(name, NOW) for name in NAMES}
REFUSED = PeerName("site-c")
"""Rejected as too far in every round."""
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


class JournalSite:
    """The journal of one site, in its home directory."""

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
        self.round_journal = RoundJournal(
            self.journal,
            wall_ns=lambda: 1_700_000_000_000_000_000 + self.journal.length * 10**9,
            sign=lambda seq, hash: self.identity.sign_head(FEDERATION, seq, hash),
        )
        key = self.identity.certificate.signing_key
        self.witnesses = JournalWitness(
            self.round_journal, us=self.name, federation=FEDERATION, signing_key=key
        )
        about = {"site": self.name, "federation": FEDERATION, "signing_key": key.hex()}
        about["initial_model"] = digest("start")
        self.round_journal.start(
            schema=digest("schema"), initial_model=digest("start"), rule="lightyear", about=about
        )

    def update(self, round: int) -> Update:
        return Update(self.name, Generation(0), Round(round), digest(self.name, round))

    def seal(self, round: int) -> None:
        update = self.update(round)
        manifest = Manifest(FEDERATION, update, 1, digest("schema"), 10, 20)
        work = TrainingResult(update.digest, update.digest, digest("carry"), 10, 20, {"loss": 1.5})
        memory = DurableState(Generation(0), Round(round), announced=update)
        self.round_journal.seal(update, memory, work, self.identity.sign_manifest(manifest))

    def decide(self, round: int, others: Sequence[Update]) -> None:
        verdicts = tuple(_verdict(update) for update in others)
        accepted = tuple(update for update in others if update.peer != REFUSED)
        why = f"all {len(others)} peers delivered"
        decision = Decision(Round(round), Cause.ALL, why, accepted, verdicts)
        memory = DurableState(Generation(0), Round(round), self.update(round), decision)
        self.round_journal.decide(decision, memory, {})

    def commit(self, round: int) -> None:
        memory = DurableState(Generation(0), Round(round + 1), announced=self.update(round))
        self.round_journal.commit(
            Round(round), digest("merged", self.name, round), memory, {"loss": 1.25}
        )

    def close(self) -> None:
        self.journal.close()

    def alter(self, *statements: str) -> None:
        alter(self.path, *statements)


def _verdict(update: Update) -> Verdict:
    if update.peer != REFUSED:
        return Verdict(update.peer, True, Reason.OK, 0.81, 1 / 3, GUARD, update.digest)
    checks = {**GUARD, "distance": 1.9}
    return Verdict(update.peer, False, Reason.TOO_FAR, 0.81, 0.0, checks, update.digest)


def run_rounds(sites: Iterable[JournalSite], rounds: Iterable[int]) -> None:
    """Record these rounds at every site; every site witnesses the journals of all others."""
    sites = tuple(sites)
    for round in rounds:
        for site in sites:
            site.seal(round)
        for site in sites:
            others = [other for other in sites if other is not site]
            site.decide(round, [other.update(round) for other in others])
            site.commit(round)
            for other in others:
                head = site.round_journal.head
                assert head is not None
                other.witnesses.hold(site.name, head, [site.identity.certificate.signing_key])


def three_sites(folder: Path, rounds: int = 3) -> dict[PeerName, JournalSite]:
    sites = {name: JournalSite(folder / name, IDENTITIES[name]) for name in NAMES}
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
    """Three stopped sites with some completed rounds; each has the peers.yaml."""
    for site in three_sites(folder).values():
        site.close()
    joined = [
        Invite(name, f"127.0.0.1:{port}", identity.certificate)
        for port, (name, identity) in enumerate(IDENTITIES.items(), start=7443)
    ]
    for place in (folder, *(folder / name for name in NAMES)):
        add_peers(place / "peers.yaml", joined, FEDERATION)
    return folder
