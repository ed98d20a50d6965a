"""The demonstration: five hospitals on one machine, one of them broken, from keys to report.

Orchestration only: the sites are real nodes (`federation`), the comparisons are simulated with the
same learning code (`simulate`), what is seen meanwhile is `view`, what remains is `report`.
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

from lightyear_node.config.agreement import ALONE, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.errors import ConfigError
from lightyear_node.lab import report, view
from lightyear_node.lab.counting import counting
from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.federation import (
    Federation,
    LabError,
    SiteHome,
    Statuses,
    described,
    lay_out,
    site_names,
)
from lightyear_node.lab.results import Results, SiteResult, judgements_of
from lightyear_node.lab.simulate import Apart, SimResult, Spec
from lightyear_node.records import PeerName

FEDERATION = "demo"
TASK = TaskEntry()
KINDS = ("ana", "sfa", "random", "dynamic")
REPORT_FOLDER = Path("demo-report")
STALL_S = 180.0
"""If no site takes any step for so long, something is wrong that waiting will not mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    sites: int = 5
    rounds: int = 8
    malfunction: str = "sfa"
    bad: int = 1
    seed: int = 7
    keep: Path | None = None
    """Where to leave the sites' homes and the report; otherwise only the report is kept."""
    view: bool = True
    serve: bool = False
    """Whether the sites and their page stay, once everything is done, until somebody ends them."""

    def checked(self) -> Options:
        if self.malfunction not in (*KINDS, "none"):
            known = ", ".join(KINDS)
            raise ConfigError(f"no malfunction `{self.malfunction}`", hint=f"known: {known}, none")
        if not 0 <= self.bad < self.sites:
            raise ConfigError(
                f"{self.bad} of {self.sites} sites cannot malfunction",
                hint="leave at least one honest site: make --bad smaller than --sites",
            )
        return self

    def malfunctions(self, names: Sequence[PeerName]) -> dict[PeerName, Malfunction]:
        """The last sites are the bad ones."""
        if self.malfunction == "none":
            return {}
        return {name: Malfunction(kind=self.malfunction) for name in names[len(names) - self.bad :]}


def run(
    options: Options,
    console: Console | None = None,
    tell: Callable[[Results], None] = lambda results: None,
) -> Results:
    """The whole demonstration; progress is for people and goes to `console`.

    `tell` is called with the results before the sites are left to whoever looks at their page.
    """
    console = console or Console(stderr=True)
    _need("matplotlib", "sklearn")
    names = site_names(options.checked().sites)
    malfunctions = options.malfunctions(names)
    page = (options.keep or REPORT_FOLDER) / report.PAGE_NAME
    report.make_room(page.parent)
    began = time.monotonic()
    with _terminated_like_interrupted(), _workshop(options) as folder:
        with counting(console, "making keys for every site", shown=options.view):
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
            with Apart(_comparisons(options, names, malfunctions), yielding=True) as apart:
                histories, moved = _run_sites(options, homes, console, sites)
                if not options.serve:
                    sites.close()
                label = "for comparison: alone, and everyone averaged in"
                with counting(console, label, shown=options.view) as count:
                    alone, averaged = apart.results(count)
            seconds = time.monotonic() - began
            results = _found(
                options, malfunctions, histories, moved, alone, averaged, seconds, page
            )
            with counting(console, "drawing the report", shown=options.view):
                report.write(results, histories)
            tell(results)
            if options.serve:
                _stay(console)
    return results


def print_summary(results: Results, console: Console | None = None) -> None:
    """The outcome, for people, on standard output."""
    (console or Console()).print(view.summary(results), highlight=False)


def _run_sites(
    options: Options, homes: Sequence[SiteHome], console: Console, running: ExitStack
) -> tuple[dict[PeerName, list[dict[str, Any]]], dict[str, int]]:
    """Every site's history and the bytes moved, once all have finished; they go on `running`."""
    cast = view.Cast(
        FEDERATION,
        [home.name for home in homes],
        options.rounds,
        {home.name: home.malfunction.kind for home in homes if home.malfunction},
    )
    patience = _Patience(time.monotonic())
    if options.view or options.serve:
        address = running.enter_context(serving(homes, cast.malfunctions))
        console.print(f"the sites' page: {address}", highlight=False, soft_wrap=True)
    sites = running.enter_context(Federation(homes))
    with view.watching(console, cast, shown=options.view) as watch:

        def look(statuses: Statuses) -> None:
            watch(statuses)
            patience.check(statuses, time.monotonic())

        statuses = sites.wait_until(_all_finished, float("inf"), look)
        histories = {name: sites.rounds(name) for name in sites.homes}
    received = [status["bytes"] for status in statuses.values() if status]
    return histories, {key: sum(one[key] for one in received) for key in ("raw", "wire")}


def _stay(console: Console) -> None:
    """Until Ctrl-C, or whatever else ends a program politely."""
    with suppress(KeyboardInterrupt):
        console.print("the sites are done; their page stays until Ctrl-C", highlight=False)
        threading.Event().wait()


def _all_finished(statuses: Statuses) -> bool:
    return all(status is not None and status["finished"] for status in statuses.values())


class _Patience:
    """Training may take as long as it takes, but something must go on."""

    def __init__(self, now: float) -> None:
        self._seen: object = None
        self._moved_at = now

    def check(self, statuses: Statuses, now: float) -> None:
        steps = [
            status and (status["round"], status["phase"], status["progress"], status["bytes"])
            for status in statuses.values()
        ]
        if steps != self._seen:
            self._seen, self._moved_at = steps, now
        elif now - self._moved_at > STALL_S:
            raise LabError(f"nothing has happened for {STALL_S:.0f} s:\n{described(statuses)}")


def _comparisons(
    options: Options, names: Sequence[PeerName], malfunctions: Mapping[PeerName, Malfunction]
) -> list[Spec]:
    """What the sites would have had alone, and with everybody averaged in unjudged."""
    return [
        Spec(
            sites=names,
            rounds=options.rounds,
            seed=options.seed,
            rule=RuleTerms(name=rule),
            task=TASK,
            malfunctions=malfunctions,
        )
        for rule in (ALONE, "fedavg")
    ]


def _found(
    options: Options,
    malfunctions: Mapping[PeerName, Malfunction],
    histories: Mapping[PeerName, Sequence[Mapping[str, Any]]],
    moved: Mapping[str, int],
    alone: SimResult,
    averaged: SimResult,
    seconds: float,
    page: Path,
) -> Results:
    metric = view.METRIC
    rule = RuleTerms()
    return Results(
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
        raw_bytes=moved["raw"],
        wire_bytes=moved["wire"],
        seconds=seconds,
        report=page,
    )


def _need(*packages: str) -> None:
    """Said before a minute's work rather than after it."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}", hint="pip install 'lightyear-node[demo]'"
        )


@contextmanager
def _workshop(options: Options) -> Iterator[Path]:
    """Where the sites live: kept if asked for, otherwise gone afterwards."""
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="lightyear-demo-") as folder:
            yield Path(folder)
        return
    folder_kept = options.keep / "sites"
    if folder_kept.exists():
        raise ConfigError(
            f"{folder_kept} is there already, perhaps from an earlier demo",
            hint="name another folder with --keep, or remove this one",
        )
    try:
        folder_kept.mkdir(parents=True)
    except OSError as problem:
        raise ConfigError(f"{options.keep}: cannot be made: {problem.strerror}") from None
    yield folder_kept.resolve()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """A plain `kill` or a closed terminal ends the demo as Ctrl-C does: nothing is left running."""
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
