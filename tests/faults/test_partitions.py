"""Network partitions that form and heal, between sites on separate hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import Federation, Statuses, lay_out, site_names
from lightyear_node.types import PeerName
from tests.support.bad_network_setup import AVERAGE, counted, history, readdress
from tests.support.needs import need
from tests.support.network_hosts import Hosts, why_not
from tests.support.site_lives import check_caught_up
from tests.support.site_queries import DEADLINE_S, A, B, C, all_finished, check_histories

D = PeerName("site-d")
ALL = (A, B, C, D)
TERMS = BarrierConfig(min_peers=2, faulty_max=1, heartbeat=0.5, grace=2.0, suspect=4.0, observe=2.0)
"""Of four sites one may be faulty, so no round closes with fewer than three."""
STANDSTILL_S = 8.0
"""Longer than any message in flight, and than several rounds."""


def rounds_of(statuses: Statuses, names: Collection[PeerName]) -> list[int]:
    asked = [statuses[name] for name in names]
    return [-1 if status is None else status["round"] for status in asked]


def beyond(round: int, names: Collection[PeerName]) -> Callable[[Statuses], bool]:
    return lambda statuses: min(rounds_of(statuses, names)) > round


def within_two_rounds(statuses: Statuses) -> bool:
    """Tell whether all sites are within two rounds."""
    rounds = rounds_of(statuses, ALL)
    return max(rounds) - min(rounds) <= 2


def highest(federation: Federation) -> int:
    return max(rounds_of(federation.status(), ALL))


def check_standstill(federation: Federation, names: Collection[PeerName]) -> None:
    """Check that these sites close at most the round that they were closing."""
    before = rounds_of(federation.status(), names)
    until = time.monotonic() + STANDSTILL_S
    statuses = federation.wait_until(lambda _: time.monotonic() > until, DEADLINE_S)
    for was, now in zip(before, rounds_of(statuses, names), strict=True):
        assert now <= was + 1


def check_recovery(hosts: Hosts, federation: Federation, what: str) -> None:
    """Heal the network, and check that all sites progress without an operator."""
    hosts.heal()
    healed_at, reached = time.monotonic(), highest(federation)
    federation.wait_until(lambda s: beyond(reached, ALL)(s) and within_two_rounds(s), DEADLINE_S)
    went_on_s = time.monotonic() - healed_at
    federation.wait_until(all_reachable, DEADLINE_S)
    print(
        f"{what}: all go on {went_on_s:.1f} s after healing,"
        f" and reach each other after {time.monotonic() - healed_at:.1f} s"
    )


def all_reachable(statuses: Statuses) -> bool:
    return all(
        status is not None and peer["state"] == "reachable"
        for status in statuses.values()
        for peer in (status["peers"] if status else [{}])
    )


def states_of(federation: Federation, name: PeerName) -> dict[PeerName, str]:
    status = federation.status()[name]
    return {peer["name"]: peer["state"] for peer in status["peers"]} if status else {}


def test_partitions_heal_without_an_operator(tmp_path: Path) -> None:
    need(why_not())
    homes = lay_out(tmp_path, site_names(4), rounds=5000, barrier=TERMS, rule=AVERAGE)
    with Hosts(homes) as hosts:
        readdress(homes, {name: hosts.address(name) for name in ALL})
        with hosts.federation() as federation:
            federation.wait_until(beyond(0, ALL), DEADLINE_S)

            hosts.partition((A, B), (C, D))
            check_standstill(federation, ALL)
            check_recovery(hosts, federation, "two halves")

            hosts.partition((A, B, C), (D,))
            parted_at = highest(federation)
            federation.wait_until(beyond(parted_at + 5, (A, B, C)), DEADLINE_S)
            check_standstill(federation, (D,))
            federation.wait_until(
                lambda _: states_of(federation, D) == dict.fromkeys((A, B, C), "unreachable"),
                DEADLINE_S,
            )
            alone = next(home for home in hosts.homes if home.name == D)
            last_alone = history(alone)[-1].seq
            check_recovery(hosts, federation, "one isolated")
            federation.wait_until(beyond(highest(federation) + 2, ALL), DEADLINE_S)
            check_caught_up(hosts.homes, D, since=last_alone)

            # Packets are lost in one direction, which breaks every connection between the two.
            hosts.drop_from(A, B)
            federation.wait_until(beyond(highest(federation) + 5, ALL), DEADLINE_S)
            check_recovery(hosts, federation, "one direction lost")

            # Connections can be opened in one direction only.
            hosts.block_calls(B, A)
            federation.wait_until(lambda _: states_of(federation, A)[B] == "one-way", DEADLINE_S)
            assert states_of(federation, B)[A] == "reachable", "it can still call"
            federation.wait_until(beyond(highest(federation) + 5, ALL), DEADLINE_S)
            check_recovery(hosts, federation, "calls refused")

            for name in ALL:
                assert counted(hosts.metrics(name), "peer_refusals") == 0
    check_histories(hosts.homes, history)
    for home in homes:
        assert "Traceback" not in home.log.read_text()


def test_rounds_close_with_a_third_of_all_packets_lost(tmp_path: Path) -> None:
    need(why_not())
    sites, rounds = (A, B, C), 3
    barrier = BarrierConfig(heartbeat=0.5, grace=30.0, suspect=30.0, observe=2.0)
    homes = lay_out(tmp_path, site_names(3), rounds=rounds, barrier=barrier, rule=AVERAGE)
    with Hosts(homes) as hosts:
        readdress(homes, {name: hosts.address(name) for name in sites})
        hosts.drop_packets(0.3)
        with hosts.federation() as federation:
            began = time.monotonic()
            federation.wait_until(lambda s: min(rounds_of(s, sites)) >= 0, DEADLINE_S)
            federation.wait_until(all_finished, DEADLINE_S)
            print(f"{rounds} rounds took {time.monotonic() - began:.1f} s with 30 % lost")
            for name in sites:
                assert counted(hosts.metrics(name), "peer_refusals") == 0
                verdicts = [one for r in federation.rounds(name) for one in r["verdicts"]]
                assert not [one for one in verdicts if one["digest"] and not one["accepted"]]
                assert sum(one["accepted"] for one in verdicts) >= rounds
    check_histories(hosts.homes, history)
