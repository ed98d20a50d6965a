"""The worker of a real node is killed during its start, or exceeds its memory limit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from lightyear_node.lab.federation import Federation, SiteHome, Statuses
from lightyear_node.node.worker_jobs import TRIES
from lightyear_node.storage.hash_chain import Record
from tests.support.site_queries import DEADLINE_S, A, B, LayOut, check_histories, finished

Records = Callable[[SiteHome], list[Record]]

KILLS = 10
START_S = 4.0
"""A starting worker is killed within this time, sometimes before it loads anything."""

GREEDY = """
import os
import torch
from lightyear_node.lab.tasks import digits

def build(mark, **arguments):
    task = digits.build(**arguments)
    usual = task.loss
    def loss(*given):
        if torch.is_grad_enabled() and not os.path.exists(mark):
            if mark.endswith("once"):
                open(mark, "w").close()
            torch.zeros(1 << 30)  # 4 GiB
        return usual(*given)
    task.loss = loss
    return task
"""


def worker_of(federation: Federation, than: int | None) -> int | None:
    """Return the PID of site-a's worker, if it is a new one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(federation.pid(A)).children():
            if child.pid != than and child.status() != psutil.STATUS_ZOMBIE:
                return child.pid
    return None


def kill_while_it_starts(federation: Federation, before: int | None, wait_s: float) -> int | None:
    """Kill the next worker this long after it appears; None if the node had started by then."""
    ends_at = time.monotonic() + DEADLINE_S
    while (pid := worker_of(federation, before)) is None:
        federation.check()
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    time.sleep(wait_s)
    if federation.status()[A] is not None:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_that_is_killed_while_it_starts_is_restarted(lay_out_sites: LayOut) -> None:
    """A start is retried as often as any other job, at whatever point it fails."""
    [home, _] = lay_out_sites(2, rounds=400)
    chance = random.Random(7)
    moments = [0.0, 0.001, *(chance.uniform(0, START_S) for _ in range(KILLS - 2))]
    federation = Federation([home])
    with contextlib.ExitStack() as ending:
        ending.callback(federation.stop)
        while moments:
            federation.start(A)
            worker: int | None = None
            for wait_s in [moments.pop() for _ in range(TRIES - 1)]:
                worker = kill_while_it_starts(federation, worker, wait_s)
                if worker is None:  # no other worker will appear
                    break
            federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
            federation.kill(A, signal.SIGTERM)
            assert federation.wait_for_exit(A, DEADLINE_S) == 0
    assert "during `open`; starting another" in home.log.read_text()


def test_a_worker_that_is_killed_at_every_start_stops_the_node(lay_out_sites: LayOut) -> None:
    [home, _] = lay_out_sites(2, rounds=400)
    federation = Federation([home])
    with contextlib.ExitStack() as ending:
        ending.callback(federation.stop)
        federation.start(A)
        federation.kill(A, signal.SIGCONT)  # it is expected to exit by itself
        worker: int | None = None
        for _ in range(TRIES):
            worker = kill_while_it_starts(federation, worker, 0.0)
        assert federation.wait_for_exit(A, DEADLINE_S) == 3
    assert "the worker died (SIGKILL, perhaps out of memory) during `open`" in home.log.read_text()


def limit_memory(home: SiteHome, mark: Path) -> None:
    settings = home.directory / "node.yaml"
    plain = yaml.safe_load(settings.read_text())
    plain["worker"]["memory_max"] = "1GiB"
    plain["task"] = {"entry": "greedy:build", "args": {"mark": str(mark)}}
    settings.write_text(yaml.safe_dump(plain))
    (home.directory / "greedy.py").write_text(GREEDY)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts this memory")
def test_a_worker_out_of_memory_is_replaced_and_the_node_continues(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    homes = lay_out_sites(2, rounds=2)
    limit_memory(homes[0], tmp_path / "once")
    with Federation(homes) as federation:
        federation.wait_until(finished(*federation.homes), DEADLINE_S)
    log = homes[0].log.read_text()
    assert "no memory left: RuntimeError (greedy.py:" in log
    assert "`worker.memory_max` in node.yaml is 1.0 GiB, raise it; starting another" in log
    check_histories(homes, records)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts this memory")
def test_a_node_serves_its_peers_while_its_training_fails(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    """The cause is in `status`; when it is gone, the next attempt continues."""
    homes = lay_out_sites(2, rounds=2)
    enough = tmp_path / "enough"
    limit_memory(homes[0], enough)

    def failing(statuses: Statuses) -> bool:
        a, b = statuses[A], statuses[B]
        if a is None or b is None:
            return False
        [seen] = [peer["state"] for peer in b["peers"]]
        told = any("round 0: training fails: no memory left" in one for one in a["problems"])
        return told and seen == "reachable"

    with Federation(homes) as federation:
        federation.wait_until(failing, DEADLINE_S)
        enough.touch()
        statuses = federation.wait_until(finished(*federation.homes), DEADLINE_S)
        status = statuses[A]
        assert status is not None
        assert status["problems"] == []
    log = homes[0].log.read_text()
    assert "raise `worker.memory_max`, or let the task use less" in log
    assert "the next attempt is in 10 s" in log
    check_histories(homes, records)
