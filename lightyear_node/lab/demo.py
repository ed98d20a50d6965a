"""The demo: five hospitals on one machine, one of them malfunctioning, from keys to report.

Orchestration only: the sites are real nodes (`federation`), the comparisons are simulated with the
same learning code (`simulate`), `federation_view` shows the progress, `demo_report` the results.
"""

from __future__ import annotations

import importlib.util
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightyear_node.config.federation import ALONE, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab import demo_report
from lightyear_node.lab import federation_view as view
from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.demo_results import DemoResults, SiteResult, judgements_of
from lightyear_node.lab.federation import (
    Federation,
    LabError,
    SiteHome,
    Statuses,
    described,
    lay_out,
    site_names,
)
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.progress_bar import progress_bar_shown
from lightyear_node.lab.simulation_process import SimulationProcess
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.types import PeerName

FEDERATION = "demo"
TASK = TaskConfig()
KINDS = ("ana", "sfa", "random", "dynamic")
REPORT_FOLDER = Path("demo-report")
STALL_S = 180.0
"""The demo fails if no site makes progress for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    sites: int = 5
    rounds: int = 8
    malfunction: str = "sfa"
    bad: int = 1
    seed: int = 7
    keep: Path | None = None
    """Folder for the sites' homes and the report; otherwise only the report is kept."""
    view: bool = True
    serve: bool = False
    """Whether the sites and their page keep running after the last round, until interrupted."""

    def checked(self) -> DemoOptions:
        if self.malfunction not in (*KINDS, "none"):
            known = ", ".join(KINDS)
            raise ConfigError(f"no malfunction `{self.malfunction}`", hint=f"known: {known}, none")
        if not 0 <= self.bad < self.sites:
            raise ConfigError(
                f"{self.bad} of {self.sites} sites cannot malfunction",
                hint="leave at least one honest site: make --bad smaller than --sites",
            )
        return self

    def malfunctions(self, names: Sequence[PeerName]) -> dict[PeerName, MalfunctionConfig]:
        """The last sites are the bad ones."""
        if self.malfunction == "none":
            return {}
        return {
            name: MalfunctionConfig(kind=self.malfunction)
            for name in names[len(names) - self.bad :]
        }


def run(
    options: DemoOptions,
    console: Console | None = None,
    on_results: Callable[[DemoResults], None] = lambda results: None,
) -> DemoResults:
    """Run the whole demo; progress is shown on `console`.

    `on_results` is called with the results, before the sites are served until interrupted.
    """
    console = console or Console(stderr=True)
    _require("matplotlib", "sklearn")
    names = site_names(options.checked().sites)
    malfunctions = options.malfunctions(names)
    page = (options.keep or REPORT_FOLDER) / demo_report.PAGE_NAME
    demo_report.create_folder(page.parent)
    began = time.monotonic()
    with _signals_interrupt(), _sites_folder(options) as folder:
        with progress_bar_shown(console, "making keys for every site", shown=options.view):
            homes = lay_out(
                folder,
                names,
                federation=FEDERATION,
                seed=options.seed,
                rounds=options.rounds,
                malfunctions=malfunctions,
                task=TASK,
            )
        with ExitStack() as sites:
            with SimulationProcess(
                _comparisons(options, names, malfunctions), yielding=True
            ) as comparisons:
                histories, transferred = _run_sites(options, homes, console, sites)
                if not options.serve:
                    sites.close()
                label = "for comparison: alone, and everyone averaged in"
                with progress_bar_shown(console, label, shown=options.view) as count:
                    alone, averaged = comparisons.results(count)
            seconds = time.monotonic() - began
            results = _results(
                options, malfunctions, histories, transferred, alone, averaged, seconds, page
            )
            with progress_bar_shown(console, "drawing the report", shown=options.view):
                demo_report.write(results, histories)
            on_results(results)
            if options.serve:
                _wait_for_interrupt(console)
    return results


def print_summary(results: DemoResults, console: Console | None = None) -> None:
    """Print the results to standard output."""
    (console or Console()).print(view.summary(results), highlight=False)


def _run_sites(
    options: DemoOptions, homes: Sequence[SiteHome], console: Console, running: ExitStack
) -> tuple[dict[PeerName, list[dict[str, Any]]], dict[str, int]]:
    """Run until all sites have finished; return their histories and the bytes transferred.

    The sites keep running until `running` is closed.
    """
    info = view.FederationInfo(
        FEDERATION,
        [home.name for home in homes],
        options.rounds,
        {home.name: home.malfunction.kind for home in homes if home.malfunction},
    )
    stall = _StallDetector(time.monotonic())
    if options.view or options.serve:
        address = running.enter_context(serving(homes, info.malfunctions))
        console.print(f"the sites' page: {address}", highlight=False, soft_wrap=True)
    sites = running.enter_context(Federation(homes))
    with view.watching(console, info, shown=options.view) as watch:

        def on_statuses(statuses: Statuses) -> None:
            watch(statuses)
            stall.check(statuses, time.monotonic())

        statuses = sites.wait_until(_all_finished, float("inf"), on_statuses)
        histories = {name: sites.rounds(name) for name in sites.homes}
    received = [status["bytes"] for status in statuses.values() if status]
    return histories, {key: sum(one[key] for one in received) for key in ("raw", "wire")}


def _wait_for_interrupt(console: Console) -> None:
    """Wait for SIGINT, SIGTERM or SIGHUP."""
    with suppress(KeyboardInterrupt):
        console.print("the sites are done; their page stays until Ctrl-C", highlight=False)
        threading.Event().wait()


def _all_finished(statuses: Statuses) -> bool:
    return all(status is not None and status["finished"] for status in statuses.values())


class _StallDetector:
    """Raises if no site has made progress for STALL_S; training itself has no time limit."""

    def __init__(self, now: float) -> None:
        self._last: object = None
        self._changed_at = now

    def check(self, statuses: Statuses, now: float) -> None:
        steps = [
            status and (status["round"], status["phase"], status["progress"], status["bytes"])
            for status in statuses.values()
        ]
        if steps != self._last:
            self._last, self._changed_at = steps, now
        elif now - self._changed_at > STALL_S:
            raise LabError(f"nothing has happened for {STALL_S:.0f} s:\n{described(statuses)}")


def _comparisons(
    options: DemoOptions,
    names: Sequence[PeerName],
    malfunctions: Mapping[PeerName, MalfunctionConfig],
) -> list[SimulationSpec]:
    """The same sites alone, and with all updates averaged without judging."""
    return [
        SimulationSpec(
            sites=names,
            rounds=options.rounds,
            seed=options.seed,
            rule=RuleConfig(name=rule),
            task=TASK,
            malfunctions=malfunctions,
        )
        for rule in (ALONE, "fedavg")
    ]


def _results(
    options: DemoOptions,
    malfunctions: Mapping[PeerName, MalfunctionConfig],
    histories: Mapping[PeerName, Sequence[Mapping[str, Any]]],
    transferred: Mapping[str, int],
    alone: SimulationResult,
    averaged: SimulationResult,
    seconds: float,
    page: Path,
) -> DemoResults:
    metric = view.METRIC
    rule = RuleConfig()
    return DemoResults(
        federation=FEDERATION,
        rounds=options.rounds,
        seed=options.seed,
        malfunction=options.malfunction if malfunctions else "none",
        rule=rule.name + (" with guard" if rule.guard else ""),
        tau=rule.tau,
        sites=[
            SiteResult(
                name=name,
                malfunctioning=name in malfunctions,
                alone=alone.final(metric)[name],
                federated=history[-1]["merged"][metric],
                averaged=averaged.final(metric)[name],
            )
            for name, history in histories.items()
        ],
        judgements=[
            one for name, history in histories.items() for one in judgements_of(name, history)
        ],
        raw_bytes=transferred["raw"],
        wire_bytes=transferred["wire"],
        seconds=seconds,
        report=page,
    )


def _require(*packages: str) -> None:
    """Raise if a package is missing, before the work starts."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}", hint="pip install 'lightyear-node[demo]'"
        )


@contextmanager
def _sites_folder(options: DemoOptions) -> Iterator[Path]:
    """The folder of the sites: kept with `--keep`, otherwise temporary."""
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="lightyear-demo-") as folder:
            yield Path(folder)
        return
    folder_kept = options.keep / "sites"
    if folder_kept.exists():
        raise ConfigError(
            f"{folder_kept} exists already, perhaps from an earlier demo",
            hint="name another folder with --keep, or remove this one",
        )
    try:
        folder_kept.mkdir(parents=True)
    except OSError as problem:
        raise ConfigError(f"{options.keep}: cannot be created: {problem.strerror}") from None
    yield folder_kept.resolve()


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that no process is left running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
