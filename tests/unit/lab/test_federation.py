"""Homes that real nodes accept, and processes that never outlive the federation."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from lightyear_node.config.federation import RuleConfig, load_federation_config
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import ConfigError
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
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.node.home import load_home
from lightyear_node.observe.admin_socket import ask
from tests.support.staged_demo import FAKE_NODE, write_finished_answers

DEADLINE_S = 60.0


@pytest.fixture
def homes(tmp_path: Path) -> list[SiteHome]:
    names = site_names(3)
    made = lay_out(
        tmp_path, names, rounds=2, malfunctions={names[2]: MalfunctionConfig(kind="sfa")}
    )
    write_finished_answers(made, rounds=2)
    return made


def are_up(statuses: lab.Statuses) -> bool:
    return all(statuses.values())


def pids_of(federation: Federation) -> list[int]:
    return [federation.pid(name) for name in federation.homes]


def none_alive(pids: Sequence[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_every_home_passes_the_checks_of_start(tmp_path: Path) -> None:
    names = site_names(3)
    homes = lay_out(
        tmp_path,
        names,
        federation="trial",
        seed=5,
        rounds=4,
        rule=RuleConfig(tau=0.7),
        malfunctions={names[2]: MalfunctionConfig(kind="ana", scale=2.0)},
        task=TaskConfig(args={"epochs": 1}),
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
        digests.add(loaded.federation.digest())
        assert loaded.us == home.name
        assert loaded.listen == home.address
        assert loaded.config.http.listen == home.http_address
        assert home.directory / loaded.config.state_dir == home.state_dir
        assert loaded.config.worker.threads == 1
        assert loaded.config.task.args == {"epochs": 1}
        assert "malfunction" not in (home.directory / "node.yaml").read_text()
        key = home.directory / "keys" / "tls.key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    config = load_federation_config(tmp_path / "peers.yaml")
    assert digests == {config.digest()}
    assert (config.federation, config.seed, config.rounds) == ("trial", 5, 4)
    assert config.rule.tau == 0.7
    assert config.barrier == lab.LOCAL_BARRIER
    assert [home.malfunction is not None for home in homes] == [False, False, True]


def test_site_names_are_sorted_and_limited_in_number() -> None:
    for count in (2, 5, 26, 27, 64):
        names = site_names(count)
        assert len(set(names)) == count
        assert names == sorted(names)
    for count in (1, 65):
        with pytest.raises(ConfigError, match="2 to 64 sites"):
            site_names(count)


def test_free_ports_are_different() -> None:
    ports = [*free_ports(40), *free_ports(40)]
    assert len(set(ports)) == 80


def test_a_port_in_use_is_not_returned() -> None:
    # It continues after the ports that were returned last: the next one is taken here.
    following = free_ports(1)[0] + 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", following))
        taken.listen()
        assert following not in free_ports(40)


def test_sites_answer_and_end_with_the_context(homes: list[SiteHome]) -> None:
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
def test_no_process_is_left_after_an_exception(
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


def test_a_site_that_ignores_sigterm_is_killed(
    homes: list[SiteHome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "STOP_TIMEOUT_S", 0.2)
    with Federation(homes, (*FAKE_NODE, "--stubborn")) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        pids = pids_of(federation)
    assert none_alive(pids)


def test_a_paused_site_is_terminated(homes: list[SiteHome]) -> None:
    with Federation(homes, FAKE_NODE) as federation:
        federation.wait_until(are_up, DEADLINE_S)
        os.kill(federation.pid(homes[0].name), signal.SIGSTOP)
    # By SIGTERM, not by SIGKILL.
    assert federation.wait_for_exit(homes[0].name) == 0


def test_a_crashed_site_is_reported_with_the_end_of_its_log(
    homes: list[SiteHome],
) -> None:
    with (
        pytest.raises(LabError, match=r"site-\w ended with exit code 7") as caught,
        Federation(homes, (*FAKE_NODE, "--crash")) as federation,
    ):
        federation.wait_until(are_up, DEADLINE_S)
    assert "cannot listen: the port is taken" in str(caught.value)


def test_a_site_can_be_killed_and_restarted(homes: list[SiteHome]) -> None:
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


def test_a_missed_deadline_reports_the_sites_states(homes: list[SiteHome]) -> None:
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


def test_the_log_tail_is_short_and_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "node.log"
    assert "no log" in log_tail(path)
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    tail = log_tail(path).splitlines()
    assert len(tail) == lab.LOG_TAIL_LINES
    assert tail[-1].strip() == "line 9999"
