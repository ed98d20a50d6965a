"""Directed schedules without Byzantine sites: slow, isolated, suspended and restarted sites."""

from __future__ import annotations

from lightyear_node.protocol.events import Fetched
from lightyear_node.protocol.parameters import Parameters, Phase
from lightyear_node.types import PeerName, Update
from tests.sim.federation import Federation
from tests.sim.site import Site
from tests.sim.world import Conditions

A, B, C, D = (PeerName(f"site-{name}") for name in "abcd")


def world_of(
    *names: PeerName, min_peers: int, rounds: int = 1000, **conditions: object
) -> Federation:
    parameters = Parameters(frozenset(names), min_peers, faulty_max=0, rounds=rounds)
    return Federation(Conditions(parameters, **conditions), seed=1)  # type: ignore[arg-type]


def round_of(site: Site) -> int:
    assert site.barrier is not None
    return site.barrier.round


def phase_of(site: Site) -> Phase:
    assert site.barrier is not None
    return site.barrier.phase


def announced_by(site: Site) -> Update | None:
    assert site.barrier is not None
    return site.barrier.announced


def boot_all(world: Federation) -> list[Site]:
    sites = list(world.sites.values())
    for site in sites:
        site.boot()
    return sites


def test_sites_that_start_one_after_the_other_all_take_part_in_the_first_round() -> None:
    world = world_of(A, B, C, min_peers=1, train_s=1.0)
    for wait_s, site in zip((0.0, 5.0, 10.0), world.sites.values(), strict=True):
        world.after(wait_s, site.boot)
    world.run_until(world.now + 60)
    for site in world.sites.values():
        merged = world.checker.merged_by(site.name)
        assert {update.peer for update in merged[min(merged)]} == set(site.others)
        assert min(merged) == 0


def test_a_slow_site_merges_the_others_updates_and_does_not_delay_them() -> None:
    world = world_of(A, B, C, D, min_peers=2, slowness={D: 12.0})
    boot_all(world)
    world.run_until(world.now + 1800)
    slow = world.checker.merged_by(D)
    assert world.checker.commits_of(A) > 3 * len(slow)
    assert len(slow) > 10
    assert all(len(merged) >= 2 for merged in slow.values())
    # The others merge its update if it arrives while they are collecting.
    of_the_slow = [u for merged in world.checker.merged_by(A).values() for u in merged]
    assert any(update.peer == D for update in of_the_slow)


def test_transfers_slower_than_the_others_rounds_still_arrive() -> None:
    world = world_of(A, B, C, min_peers=1, train_s=2.0, fetch_s=(20.0, 25.0))
    boot_all(world)
    world.run_until(world.now + 900)
    for site in world.sites.values():
        merged = [len(updates) for updates in world.checker.merged_by(site.name).values()]
        assert sum(merged) >= len(merged)


def test_an_isolated_site_waits_and_then_rejoins_the_others() -> None:
    world = world_of(A, B, C, D, min_peers=1)
    boot_all(world)
    world.run_until(world.now + 100)
    world.cut = {(one, two) for one in world.names for two in world.names if D in (one, two)}
    world.run_until(world.now + 60)
    alone, others = round_of(world.sites[D]), round_of(world.sites[A])
    world.run_until(world.now + 600)
    assert round_of(world.sites[D]) == alone
    assert round_of(world.sites[A]) > others + 10
    assert world.counts["alarms: degraded"] > 0
    world.cut = set()
    world.run_until(world.now + 60)
    rounds = [round_of(site) for site in world.sites.values()]
    assert max(rounds) - min(rounds) <= 2


def test_a_resumed_site_does_not_count_the_others_as_missing() -> None:
    world = world_of(A, B, C, min_peers=1)
    boot_all(world)
    world.run_until(world.now + 60)
    world.sites[C].pause()
    world.run_until(world.now + 300)
    before = world.checker.commits_of(C)
    world.sites[C].resume()
    world.run_until(world.now + 90)
    later = list(world.checker.merged_by(C).values())[before + 1 :]
    assert len(later) >= 2
    assert all(len(merged) == 2 for merged in later)


def test_all_sites_continue_where_they_were_after_a_common_power_failure() -> None:
    world = world_of(A, B, C, min_peers=2)
    sites = boot_all(world)
    for _ in range(20):
        world.run_until(world.now + 47)
        before = [announced_by(site) for site in sites]
        for site in sites:
            site.kill()
        boot_all(world)
        assert [announced_by(site) for site in sites] == before
    assert min(world.checker.commits_of(site.name) for site in sites) > 10


def test_slow_and_late_sites_finish_too() -> None:
    world = world_of(A, B, C, D, min_peers=1, rounds=6, slowness={C: 8.0})
    for name in (A, B, C):
        world.sites[name].boot()
    world.after(600.0, world.sites[D].boot)
    world.run_until(world.now + 500)
    assert [phase_of(world.sites[name]) for name in (A, B)] == [Phase.FINISHED] * 2
    world.run_until(world.now + 500)
    for site in world.sites.values():
        assert phase_of(site) is Phase.FINISHED
        merged = world.checker.merged_by(site.name)
        assert max(merged) == 5
        assert merged[max(merged)]


def test_a_finished_site_that_restarts_still_serves_its_last_update() -> None:
    world = world_of(A, B, C, min_peers=2, rounds=3, slowness={C: 3.0})
    sites = boot_all(world)
    world.run_until(world.now + 300)
    assert {phase_of(site) for site in sites} == {Phase.FINISHED}
    for site in sites:
        site.kill()
    boot_all(world)
    world.run_until(world.now + 30)
    for site in sites:
        last = announced_by(site)
        assert last is not None
        assert last.round == 2
        assert isinstance(site.serve(last), Fetched)
        assert world.checker.commits_of(site.name) == 3


def test_a_site_without_peers_finishes_however_often_it_crashes() -> None:
    world = world_of(A, min_peers=0, rounds=30, crash_at_point=0.1, crash_any_time=0.01)
    [site] = boot_all(world)
    world.run_until(world.now + 6000)
    assert world.counts["crashes"] > 5
    assert phase_of(site) is Phase.FINISHED
    assert sorted(world.checker.merged_by(A)) == list(range(30))
    assert not any(world.checker.merged_by(A).values())
