"""Small federations of real nodes: one process and one worker per site, mutual TLS, loopback."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import pytest

from lightyear_node.config.federation import BarrierConfig, ExchangeConfig, RuleConfig
from lightyear_node.lab.federation import SiteHome, lay_out, site_names
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.storage.hash_chain import Record
from lightyear_node.storage.journal import Journal
from lightyear_node.types import PeerName
from tests.support.journal_records import first_bad_record, read_records
from tests.support.site_queries import QUICK, SEED, LayOut


@pytest.fixture
def lay_out_sites(tmp_path: Path) -> LayOut:
    return laying_out(tmp_path)


@pytest.fixture(scope="module")
def lay_out_once(tmp_path_factory: pytest.TempPathFactory) -> LayOut:
    """Lay out a federation that all tests of a file share."""
    return laying_out(tmp_path_factory.mktemp("sites"))


def laying_out(directory: Path) -> LayOut:
    def make(
        sites: int = 3,
        *,
        rounds: int = 3,
        malfunctions: Mapping[PeerName, MalfunctionConfig] | None = None,
        barrier: BarrierConfig = QUICK,
        rule: RuleConfig | None = None,
        unreachable: Collection[PeerName] = (),
        exchange: ExchangeConfig | None = None,
    ) -> list[SiteHome]:
        return lay_out(
            directory / "sites",
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
    """Read a site's journal beside the running node, and check its hash chain."""
    opened: list[Journal] = []

    def read(home: SiteHome) -> list[Record]:
        journal = Journal(home.state_dir / "journal.db")
        opened.append(journal)
        assert first_bad_record(journal) is None
        return read_records(journal)

    yield read
    for journal in opened:
        journal.close()
