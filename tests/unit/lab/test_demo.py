"""The demo from end to end, with fake nodes and invented comparisons."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Self

import psutil
import pytest
from rich.console import Console

from lightyear_node.errors import ConfigError
from lightyear_node.lab import demo
from lightyear_node.lab.demo import DemoOptions, print_summary, run
from lightyear_node.lab.federation import Federation, LabError, SiteHome, lay_out, site_names
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationResult, SimulationSpec
from lightyear_node.types import PeerName, Round
from tests.support.staged_demo import FAKE_NODE, status_of, write_finished_answers

ACCURACY = {"local": 0.8, "fedavg": 0.3}


class FakeSimulations:
    """Replaces the child process of the simulations."""

    seen: tuple[SimulationSpec, ...] = ()

    def __init__(self, specs: Sequence[SimulationSpec], *, yielding: bool) -> None:
        FakeSimulations.seen = tuple(specs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def results(self, progress: Callable[[int, int], None]) -> list[SimulationResult]:
        progress(1, 1)
        found = []
        for spec in FakeSimulations.seen:
            metrics = {"accuracy": ACCURACY[spec.rule.name]}
            last = SimulatedRound(Round(spec.rounds - 1), metrics, metrics, ())
            found.append(SimulationResult({name: [last] for name in spec.sites}))
        return found


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Runs the demo in a temporary folder with fake nodes; returns the folders of their homes."""
    used: list[Path] = []

    def lay_out_finished(
        folder: Path, names: Sequence[PeerName], **settings: Any
    ) -> list[SiteHome]:
        used.append(folder)
        homes = lay_out(folder, names, **settings)
        write_finished_answers(homes, rounds=settings["rounds"])
        return homes

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "lay_out", lay_out_finished)
    monkeypatch.setattr(demo, "Federation", partial(Federation, command=FAKE_NODE))
    monkeypatch.setattr(demo, "SimulationProcess", FakeSimulations)
    return used


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_the_demo_runs_from_keys_to_report(folders: list[Path]) -> None:
    console = quiet()
    results = run(DemoOptions(sites=3, rounds=2), console)
    assert results.to_plain() == {
        "federation": "demo",
        "rounds": 2,
        "sites": [
            {
                "name": f"site-{letter}",
                "malfunctioning": letter == "c",
                "metric_alone": 0.8,
                "metric_federated": 0.91,
            }
            for letter in "abc"
        ],
        "everyone_averaged": pytest.approx(0.3),
        "verdicts": {
            "honest_accepted": 8,
            "honest_rejected": 0,
            "malfunctioning_accepted": 0,
            "malfunctioning_rejected": 4,
        },
        "bytes": {"raw": 3000, "wire": 1200},
        "report": "demo-report/report.html",
    }
    written = {path.name for path in Path("demo-report").iterdir()}
    assert written == {"report.html", "report.png", "results.json"}
    assert json.loads(Path("demo-report/results.json").read_text()) == results.to_plain()
    # The sites are not kept.
    assert folders
    assert not folders[0].exists()
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    for stage in ("making keys", "3 of 3 sites are up", "for comparison", "drawing the report"):
        assert stage in output


def test_the_comparisons_simulate_the_same_federation(folders: list[Path]) -> None:
    run(DemoOptions(sites=4, rounds=3, seed=11, malfunction="ana", bad=2, view=False), quiet())
    alone, averaged = FakeSimulations.seen
    assert (alone.rule.name, averaged.rule.name) == ("local", "fedavg")
    for spec in FakeSimulations.seen:
        assert (list(spec.sites), spec.rounds, spec.seed) == (site_names(4), 3, 11)
        assert {name: m.kind for name, m in spec.malfunctions.items()} == {
            PeerName("site-c"): "ana",
            PeerName("site-d"): "ana",
        }


def test_kept_sites_are_kept_and_never_overwritten(folders: list[Path]) -> None:
    options = DemoOptions(sites=2, rounds=1, malfunction="none", keep=Path("kept"), view=False)
    results = run(options, quiet())
    assert results.bad == frozenset()
    assert results.report == Path("kept/report.html")
    assert Path("kept/sites/site-a/node.log").exists()
    assert Path("kept/sites/peers.yaml").exists()
    with pytest.raises(ConfigError, match="exists already"):
        run(options, quiet())


def test_without_view_only_the_summary_is_printed(folders: list[Path]) -> None:
    console, out = quiet(), quiet()
    results = run(DemoOptions(sites=2, rounds=1, view=False), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
    print_summary(results, out)
    assert isinstance(out.file, io.StringIO)
    assert "site-b (sends flipped signs)" in out.file.getvalue()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_sites(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    running: list[psutil.Process] = []

    def kill_ourselves(statuses: object) -> None:
        running.extend(psutil.Process().children())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(demo.view, "watching", lambda *_, **__: nullcontext(kill_ourselves))
    with pytest.raises(KeyboardInterrupt):
        run(DemoOptions(sites=2, rounds=1, view=False), quiet())
    assert len(running) >= 2
    assert not any(process.is_running() for process in running)
    assert not folders[0].exists()
    assert signal.getsignal(number) == before


def test_sites_without_progress_are_an_error(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = PeerName("site-a")
    idle: Any = {name: status_of(name, [], rounds=2)}
    busy = {name: idle[name] | {"progress": [1, 2]}}
    polls = [(0, idle), (1, idle), (1.01, busy), (2, busy), (2.02, busy), (9, busy)]
    now = 0.0

    class ScriptedFederation(Federation):
        def wait_until(self, predicate: Any, deadline_s: float, watch: Any = None) -> NoReturn:
            nonlocal now
            for at, statuses in polls:
                now = at * demo.STALL_S
                watch(statuses)
            raise AssertionError("the stall was not noticed")

    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(demo, "Federation", partial(ScriptedFederation, command=FAKE_NODE))
    with pytest.raises(LabError, match="site-a: finished"):
        run(DemoOptions(sites=2, rounds=2, view=False), quiet())
    assert now == 2.02 * demo.STALL_S


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DemoOptions(sites=1, bad=0), "2 to 64 sites"),
        (DemoOptions(sites=3, bad=3), "3 of 3 sites cannot"),
        (DemoOptions(malfunction="gremlins"), "no malfunction `gremlins`"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(
    folders: list[Path], options: DemoOptions, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(options, quiet())
    assert folders == []
    assert not Path("demo-report").exists()


def test_missing_packages_are_reported_with_a_hint(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    with pytest.raises(ConfigError, match="the demo needs sklearn") as caught:
        run(DemoOptions(), quiet())
    assert caught.value.hint == "pip install 'lightyear-node[demo]'"
    assert folders == []


def test_the_demo_itself_never_loads_torch() -> None:
    heavy = ("torch", "numpy", "matplotlib", "grpc")
    probe = f"import sys, lightyear_node.lab.demo; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_served_sites_run_until_a_signal(folders: list[Path]) -> None:
    """After the results, page and sites are up; a signal ends them."""
    console = quiet()
    assert isinstance(console.file, io.StringIO)
    output = console.file
    seen: list[Any] = []

    def check_page(results: object) -> None:
        found = re.search(r"the sites' page: (\S+)", output.getvalue())
        assert found
        with urllib.request.urlopen(found[1]) as answer:
            seen.append(answer.headers["Content-Security-Policy"])
        with urllib.request.urlopen(f"{found[1]}api/v1/sites") as answer:
            seen.append(json.load(answer)["sites"])
        seen.append(len(psutil.Process().children()))
        threading.Thread(target=interrupt_when_served, daemon=True).start()

    def interrupt_when_served() -> None:
        while "stays until Ctrl-C" not in output.getvalue():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    results = run(DemoOptions(sites=2, rounds=1, view=False, serve=True), console, check_page)
    assert results.rounds == 1
    policy, sites, running = seen
    assert policy.startswith("default-src 'none'")
    assert [site["api"] for site in sites] == ["sites/site-a/api/v1", "sites/site-b/api/v1"]
    assert [site["about"] for site in sites] == [None, "sends flipped signs"]
    assert running >= 2
    assert psutil.Process().children() == []
    assert not folders[0].exists()
