"""Small federations of real nodes: one process and one worker per site, mutual TLS, loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from lightyear_node.config.agreement import BarrierTerms, ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.journal import Journal, Record
from lightyear_node.lab.federation import SiteHome, lay_out, site_names
from lightyear_node.records import PeerName

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "byzantine"))

from asking import QUICK, SEED, LayOut


@pytest.fixture
def lay_out_sites(tmp_path: Path) -> LayOut:
    return laying_out(tmp_path)


@pytest.fixture(scope="module")
def lay_out_once(tmp_path_factory: pytest.TempPathFactory) -> LayOut:
    """For a federation that all tests of a file share."""
    return laying_out(tmp_path_factory.mktemp("sites"))


def laying_out(directory: Path) -> LayOut:
    def make(
        sites: int = 3,
        *,
        rounds: int = 3,
        malfunctions: Mapping[PeerName, Malfunction] | None = None,
        barrier: BarrierTerms = QUICK,
        rule: RuleTerms | None = None,
        unreachable: Collection[PeerName] = (),
        exchange: ExchangeTerms | None = None,
    ) -> list[SiteHome]:
        # A test that is tried again gets new sites.
        runs = len(list(directory.glob("run-*")))
        return lay_out(
            directory / f"run-{runs}",
            site_names(sites),
            seed=SEED,
            rounds=rounds,
            barrier=barrier,
            malfunctions=malfunctions,
            rule=rule,
            unreachable=unreachable,
            exchange=exchange,
        )

    return make


@pytest.fixture
def records() -> Iterator[Callable[[SiteHome], list[Record]]]:
    """A site's journal, read beside the running node; its chain must hold."""
    opened: list[Journal] = []

    def read(home: SiteHome) -> list[Record]:
        journal = Journal(home.state_dir / "journal.db")
        opened.append(journal)
        assert journal.first_bad_record() is None
        return list(journal.records())

    yield read
    for journal in opened:
        journal.close()
