"""Laying out homes that real nodes accept, and never leaving a process behind."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from staged import FAKE_NODE, pretend_to_be_done

from lightyear_node.config.agreement import RuleTerms, load_agreement
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.errors import ConfigError
from lightyear_node.home import load_home
from lightyear_node.lab import federation as lab
from lightyear_node.lab.federation import (
    Federation,
    LabError,
    SiteHome,
    free_ports,
    lay_out,
    log_tail,
    site_names,
)
from lightyear_node.observe.admin import ask

DEADLINE_S = 60.0


@pytest.fixture
def homes(tmp_path: Path) -> list[SiteHome]:
    names = site_names(3)
    made = lay_out(tmp_path, names, rounds=2, malfunctions={names[2]: Malfunction(kind="sfa")})
    pretend_to_be_done(made, rounds=2)
    return made


def are_up(statuses: lab.Statuses) -> bool:
    return all(statuses.values())


def pids_of(federation: Federation) -> list[int]:
    return [federation.pid(name) for name in federation.homes]


def none_alive(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_every_home_passes_the_checks_of_a_real_start(tmp_path: Path) -> None:
    names = site_names(3)
    homes = lay_out(
        tmp_path,
        names,
        federation="trial",
        seed=5,
        rounds=4,
        rule=RuleTerms(tau=0.7),
        malfunctions={names[2]: Malfunction(kind="ana", scale=2.0)},
        task=TaskEntry(args={"epochs": 1}),
    )
    digests = set()
    for home in homes:
        loaded = load_home(
            home.directory,
            home.directory / "peers.yaml",
            environment={},
            flags={},
            now=datetime.now(UTC),
        )
        digests.add(loaded.agreement.digest())
        assert loaded.us == home.name
        assert loaded.listen == home.address
        assert loaded.site.http.listen == home.http_address
        assert home.directory / loaded.site.state_dir == home.state_dir
        assert loaded.site.worker.threads == 1
        assert loaded.site.task.args == {"epochs": 1}
        assert loaded.site.malfunction == home.malfunction
        key = home.directory / "keys" / "tls.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    agreement = load_agreement(tmp_path / "peers.yaml")
    assert digests == {agreement.digest()}
    assert (agreement.federation, agreement.seed, agreement.rounds) == ("trial", 5, 4)
    assert agreement.rule.tau == 0.7
    assert agreement.barrier == lab.LOCAL_BARRIER
    assert [home.malfunction is not None for home in homes] == [False, False, True]


def test_names_are_in_the_order_the_data_is_dealt_in() -> None:
    for count in (2, 5, 26, 27, 64):
        names = site_names(count)
        assert len(set(names)) == count
        assert names == sorted(names)
    for count in (1, 65):
        with pytest.raises(ConfigError, match="2 to 64 sites"):
            site_names(count)


def test_no_port_is_given_twice() -> None:
    ports = free_ports(40)
    assert len(set(ports)) == 40


def test_sites_are_asked_and_end_with_the_context(homes: list[SiteHome]) -> None:
    with Federation(homes, FAKE_NODE) as federation:
        statuses = federation.wait_until(are_up, DEADLINE_S)
        assert {name: status and status["name"] for name, status in statuses.items()} == {
            home.name: home.name for home in homes
        }
        assert [entry["round"] for entry in federation.rounds(homes[0].name)] == [0, 1]
        pids = pids_of(federation)
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert none_alive(pids)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_nothing_is_left_when_the_context_ends_by_an_exception(
    homes: list[SiteHome], kind: type[BaseException]
) -> None:
    pids: list[int] = []

    def interrupted() -> None:
        with Federation(homes, FAKE_NODE) as federation:
            pids.extend(pids_of(federation))
            raise kind

    with pytest.raises(kind):
        interrupted()
    assert len(pids) == 3
    assert none_alive(pids)


def test_a_site_that_does_not_listen_is_killed(
    homes: list[SiteHome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "STOP_TIMEOUT_S", 0.2)
    with Federation(homes, (*FAKE_NODE, "--stubborn")) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        pids = pids_of(federation)
    assert none_alive(pids)


def test_a_paused_site_is_stopped_too(homes: list[SiteHome]) -> None:
    with Federation(homes, FAKE_NODE) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        os.kill(federation.pid(homes[0].name), signal.SIGSTOP)
    # By being asked, not by force.
    assert federation.wait_for_exit(homes[0].name) == 0


def test_a_site_that_ends_by_itself_is_told_with_the_end_of_its_log(
    homes: list[SiteHome],
) -> None:
    with (
        pytest.raises(LabError, match=r"site-\w ended with exit code 7") as caught,
        Federation(homes, (*FAKE_NODE, "--crash")) as federation,
    ):
        federation.wait_until(are_up, DEADLINE_S)
    assert "cannot listen: the port is taken" in str(caught.value)


def test_a_site_may_be_killed_and_started_again(homes: list[SiteHome]) -> None:
    name = homes[1].name
    with Federation(homes, FAKE_NODE) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        first = federation.pid(name)
        with pytest.raises(LabError, match="running already"):
            federation.start(name)
        federation.kill(name, signal.SIGKILL)
        assert federation.wait_for_exit(name) == -signal.SIGKILL
        statuses = federation.wait_until(lambda s: s[name] is None, DEADLINE_S)
        assert sum(status is not None for status in statuses.values()) == 2
        federation.start(name)
        federation.wait_until(are_up, DEADLINE_S)
        assert federation.pid(name) != first


def test_a_deadline_that_passes_says_what_the_sites_were_doing(homes: list[SiteHome]) -> None:
    with Federation(homes, FAKE_NODE) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        seen: list[lab.Statuses] = []
        with pytest.raises(LabError, match="site-a: finished, finished: still serving"):
            federation.wait_until(lambda statuses: False, 0.0, seen.append)
        assert seen


def test_the_callers_settings_do_not_reach_the_sites(
    homes: list[SiteHome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTYEAR_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("SOMETHING_ELSE", "kept")
    with Federation(homes, FAKE_NODE) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        environment = ask(homes[0].state_dir, "environment")
    assert "LIGHTYEAR_LISTEN" not in environment
    assert environment["SOMETHING_ELSE"] == "kept"


def test_the_tail_of_a_log_is_short_and_needs_no_log(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    assert "no log" in log_tail(path)
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    tail = log_tail(path).splitlines()
    assert len(tail) == lab.LOG_TAIL_LINES
    assert tail[-1].strip() == "line 9999"
