"""Measures a node's start with a journal of 100,000 rounds, and with an empty one.

Runs the steps of a start that use the journal: open and verify it, check its signatures, restore
the newest rounds, write the `start` record.  The journal has the records of a federation of five
sites, written by the product's own code.  Prints one JSON object.

    python tests/bench/journal_start.py [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightyear_node.audit.self_check import check_journal
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import PeerName
from tests.support.journals import FEDERATION, IDENTITIES, JournalSite, digest
from tests.support.sqlite_connections import recorded_connections

ROUNDS = 100_000
REPEATS = 7
SITE = PeerName("site-a")


def fill(folder: Path, rounds: int) -> JournalSite:
    """The journal of one site, written without syncing."""
    with recorded_connections(sqlite3.Connection) as opened:
        site = JournalSite(folder, IDENTITIES[SITE])
    opened[-1].execute("PRAGMA synchronous=OFF")
    others = [Other(name) for name in ("site-b", "site-c", "site-d", "site-e")]
    for round in range(rounds):
        site.seal(round)
        site.decide(round, [other.update(round) for other in others])
        site.commit(round)
    return site


class Other:
    def __init__(self, name: str) -> None:
        self.name = PeerName(name)

    update = JournalSite.update


def start(site: JournalSite) -> float:
    started = time.perf_counter()
    journal = Journal(site.path)
    keys = [site.identity.certificate.signing_key]
    assert not journal.length or check_journal(site.path.parent, keys).damage is None
    round_journal = RoundJournal(journal, wall_ns=time.time_ns)
    round_journal.start(
        schema=digest("schema"),
        initial_model=digest("start"),
        rule="lightyear",
        about={"site": SITE, "federation": FEDERATION, "signing_key": keys[0].hex()},
    )
    taken = time.perf_counter() - started
    journal.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        large = fill(Path(folder, "large"), rounds)
        large.close()
        small = fill(Path(folder, "small"), 0)
        small.close()
        times = {"large": [start(large) for _ in range(REPEATS)]}
        times["empty"] = [start(small) for _ in range(REPEATS)]
        files = list(large.path.parent.glob("journal*.db"))
        bytes_all = sum(one.stat().st_size for one in files)
        bytes_live = large.path.stat().st_size
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    print(
        json.dumps(
            {
                "bench": "journal_start",
                "rounds": rounds,
                "segments": len(files) - 1,
                "mib": round(bytes_all / 2**20, 1),
                "live_mib": round(bytes_live / 2**20, 1),
                "seconds": {name: round(value, 4) for name, value in seconds.items()},
                "large_over_empty": round(seconds["large"] / seconds["empty"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
