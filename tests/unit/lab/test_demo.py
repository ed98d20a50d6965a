"""The demonstration from end to end, with sites that only pretend and comparisons made up."""

from __future__ import annotations

import functools
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
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from rich.console import Console
from staged import FAKE_NODE, pretend_to_be_done, status_of

from lightyear_node.errors import ConfigError
from lightyear_node.lab import demo
from lightyear_node.lab.demo import Options, print_summary, run
from lightyear_node.lab.federation import Federation, LabError, SiteHome, lay_out, site_names
from lightyear_node.lab.simulate import SimResult, SimRound, Spec
from lightyear_node.records import PeerName, Round

ACCURACY = {"local": 0.8, "fedavg": 0.3}


class MadeUp:
    """In place of the simulations' child process."""

    seen: tuple[Spec, ...] = ()

    def __init__(self, specs: Sequence[Spec], *, yielding: bool) -> None:
        MadeUp.seen = tuple(specs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        pass

    def results(self, progress: Callable[[int, int], None]) -> list[SimResult]:
        progress(1, 1)
        found = []
        for spec in MadeUp.seen:
            metrics = {"accuracy": ACCURACY[spec.rule.name]}
            last = SimRound(Round(spec.rounds - 1), metrics, metrics, ())
            found.append(SimResult({name: [last] for name in spec.sites}))
        return found


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Runs the demo in a temporary place with pretended sites; gives the folders they lived in."""
    used: list[Path] = []

    def lay_out_done(folder: Path, names: Sequence[PeerName], **terms: Any) -> list[SiteHome]:
        used.append(folder)
        homes = lay_out(folder, names, **terms)
        pretend_to_be_done(homes, rounds=terms["rounds"])
        return homes

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "lay_out", lay_out_done)
    monkeypatch.setattr(demo, "Federation", functools.partial(Federation, command=FAKE_NODE))
    monkeypatch.setattr(demo, "Apart", MadeUp)
    return used


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_the_whole_way_from_keys_to_report(folders: list[Path]) -> None:
    console = quiet()
    results = run(Options(sites=3, rounds=2), console)
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
    # The sites were not to be kept.
    assert folders
    assert not folders[0].exists()
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    for stage in ("making keys", "3 of 3 sites are up", "for comparison", "drawing the report"):
        assert stage in said


def test_the_comparisons_are_of_the_same_federation(folders: list[Path]) -> None:
    run(Options(sites=4, rounds=3, seed=11, malfunction="ana", bad=2, view=False), quiet())
    alone, averaged = MadeUp.seen
    assert (alone.rule.name, averaged.rule.name) == ("local", "fedavg")
    for spec in MadeUp.seen:
        assert (list(spec.sites), spec.rounds, spec.seed) == (site_names(4), 3, 11)
        assert {name: m.kind for name, m in spec.malfunctions.items()} == {
            PeerName("site-c"): "ana",
            PeerName("site-d"): "ana",
        }


def test_kept_sites_are_kept_and_never_overwritten(folders: list[Path]) -> None:
    options = Options(sites=2, rounds=1, malfunction="none", keep=Path("kept"), view=False)
    results = run(options, quiet())
    assert results.bad == frozenset()
    assert results.report == Path("kept/report.html")
    assert Path("kept/sites/site-a/node.log").exists()
    assert Path("kept/sites/peers.yaml").exists()
    with pytest.raises(ConfigError, match="there already"):
        run(options, quiet())


def test_without_view_only_the_summary_is_printed(folders: list[Path]) -> None:
    console, out = quiet(), quiet()
    results = run(Options(sites=2, rounds=1, view=False), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
    print_summary(results, out)
    assert isinstance(out.file, io.StringIO)
    assert "site-b (sends flipped signs)" in out.file.getvalue()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_plain_kill_leaves_no_site_behind(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    running: list[psutil.Process] = []

    def killed_meanwhile(statuses: object) -> bool:
        running.extend(psutil.Process().children())
        os.kill(os.getpid(), number)
        return False

    monkeypatch.setattr(demo, "_all_finished", killed_meanwhile)
    with pytest.raises(KeyboardInterrupt):
        run(Options(sites=2, rounds=1, view=False), quiet())
    assert len(running) >= 2
    assert not any(process.is_running() for process in running)
    assert not folders[0].exists()
    assert signal.getsignal(number) == before


def test_sites_that_do_nothing_any_more_are_not_waited_for() -> None:
    name = PeerName("site-a")
    idle: Any = {name: status_of(name, [], rounds=2)}
    patience = demo._Patience(0.0)
    patience.check(idle, 0.0)
    patience.check(idle, demo.STALL_S)
    busy = {name: idle[name] | {"progress": [1, 2]}}
    patience.check(busy, demo.STALL_S + 1)
    patience.check(busy, 2 * demo.STALL_S)
    with pytest.raises(LabError, match="site-a: finished"):
        patience.check(busy, 2 * demo.STALL_S + 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(sites=1, bad=0), "2 to 64 sites"),
        (Options(sites=3, bad=3), "3 of 3 sites cannot"),
        (Options(malfunction="gremlins"), "no malfunction `gremlins`"),
    ],
)
def test_impossible_wishes_are_refused_before_anything_starts(
    folders: list[Path], options: Options, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(options, quiet())
    assert folders == []
    assert not Path("demo-report").exists()


def test_missing_packages_are_named_with_the_remedy(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    with pytest.raises(ConfigError, match="the demo needs sklearn") as caught:
        run(Options(), quiet())
    assert caught.value.hint == "pip install 'lightyear-node[demo]'"
    assert folders == []


def test_the_demo_itself_never_loads_torch() -> None:
    heavy = ("torch", "numpy", "matplotlib", "grpc")
    probe = f"import sys, lightyear_node.lab.demo; print([m for m in {heavy} if m in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def test_served_sites_stay_until_somebody_ends_them(folders: list[Path]) -> None:
    """Results are told, the page is there, the sites run; then a signal ends it all."""
    console = quiet()
    assert isinstance(console.file, io.StringIO)
    said = console.file
    seen: list[Any] = []

    def look(results: object) -> None:
        found = re.search(r"the sites' page: (\S+)", said.getvalue())
        assert found
        with urllib.request.urlopen(found[1]) as answer:
            seen.append(answer.headers["Content-Security-Policy"])
        with urllib.request.urlopen(f"{found[1]}api/v1/sites") as answer:
            seen.append(json.load(answer)["sites"])
        seen.append(len(psutil.Process().children()))
        threading.Thread(target=end_when_it_stays, daemon=True).start()

    def end_when_it_stays() -> None:
        while "stays until Ctrl-C" not in said.getvalue():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    results = run(Options(sites=2, rounds=1, view=False, serve=True), console, look)
    assert results.rounds == 1
    policy, sites, running = seen
    assert policy.startswith("default-src 'none'")
    assert [site["api"] for site in sites] == ["sites/site-a/api/v1", "sites/site-b/api/v1"]
    assert [site["about"] for site in sites] == [None, "sends flipped signs"]
    assert running >= 2
    assert psutil.Process().children() == []
    assert not folders[0].exists()
