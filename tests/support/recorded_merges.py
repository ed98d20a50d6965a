"""Which hospital has merged which peer, read from the hospitals' journals."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.support.bad_network_setup import history
from tests.support.handbook import Hospitals
from tests.support.site_lives import round_of, status_of, wait_for


def merged(hospitals: Hospitals, at: str, peer: str, since: int = 0) -> bool:
    """Tell whether a site merged an update of a peer after record `since`."""
    return any(
        update["peer"] == peer
        for record in history(hospitals.home[at])
        if record.kind == "decision" and record.seq > since
        for update in record.body["accepted"]
    )


def last_record(hospitals: Hospitals, at: str) -> int:
    return history(hospitals.home[at])[-1].seq


def wait_until_all_merge_all(hospitals: Hospitals, since: Mapping[str, int] | None = None) -> None:
    pairs = [(at, peer) for at in hospitals.members for peer in hospitals.members if at != peer]
    wait_until_merged(hospitals, pairs, since or {})


def wait_until_merged(
    hospitals: Hospitals, pairs: Collection[tuple[str, str]], since: Mapping[str, int]
) -> None:
    """Wait until the first of each pair has merged the second."""

    def done() -> bool:
        hospitals.check()
        return all(
            status_of(hospitals.home[at]) is not None
            and merged(hospitals, at, peer, since.get(at, 0))
            for at, peer in pairs
        )

    wait_for(done)


def wait_for_rounds(hospitals: Hospitals, more: int) -> None:
    def reached() -> dict[str, int]:
        return {name: round_of(hospitals.home[name]) for name in hospitals.members}

    before = reached()

    def done() -> bool:
        hospitals.check()
        return all(now >= before[name] + more for name, now in reached().items())

    wait_for(done)
