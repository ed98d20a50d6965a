"""`simulate`: runs one simulated federation and prints its scores and verdicts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightyear_node.config.federation import LIGHTYEAR, SITES_MAX, ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab import federation_view
from lightyear_node.lab.experiment import SIMULATE
from lightyear_node.lab.jobs import client_names, malfunctions_of
from lightyear_node.lab.malfunctions import (
    ATTACK_SUCCESS,
    MalfunctionConfig,
    is_known,
    known_malfunctions,
)
from lightyear_node.lab.partition import PartitionConfig, config_of
from lightyear_node.lab.process_pool import ProcessPool, child_environment, run_until_signal
from lightyear_node.lab.progress_bar import progress_bar_shown
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationResult, SimulationSpec
from lightyear_node.lab.suite import NONE, known_rules, nearest
from lightyear_node.lab.tasks import BUILT_IN
from lightyear_node.types import PeerName

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    task: str = "digits"
    args: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None
    rule: str = LIGHTYEAR
    rule_given: bool = False
    """The rule is a function, and its name is known to errors only."""
    guard: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    malfunction: str = "sfa"
    scale: float | None = None
    malfunction_options: Mapping[str, Any] = field(default_factory=dict)
    bad: int = 1
    clients: int | None = None
    rounds: int | None = None
    seed: int = 0
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    partition: str | None = None
    partition_options: Mapping[str, Any] = field(default_factory=dict)
    participation: float = 1.0
    curves: bool = False
    """Measure after every round, not only after the last."""


@dataclass(frozen=True, slots=True)
class SiteSummary:
    """One site: its score before and after the last merge, and the verdicts on it."""

    name: PeerName
    malfunctioning: bool
    local: float | None
    merged: float | None
    judged: Mapping[str, int]
    left_out: int = 0
    """How often others accepted its update but dropped it in the merge check."""
    kept_local: int = 0
    """Rounds in which it dropped all updates and kept its own model."""
    rounds: Sequence[SimulatedRound] = ()
    alone: float | None = None
    """Score of the model that never merges, for rules with a shadow."""
    served: float | None = None
    """Score of the model that the site uses."""


@dataclass(frozen=True, slots=True)
class Simulation:
    spec: SimulationSpec
    task: str
    metric: str
    sites: Sequence[SiteSummary]
    update_bytes: int
    seconds: float

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores that the sites have."""
        return ("local", "merged", *(("alone", "served") if self.spec.rule.shadow else ()))

    def mean(self, which: str, *, honest: bool) -> float | None:
        """The mean over the sites that have a score."""
        chosen = [site for site in self.sites if not (honest and site.malfunctioning)]
        values = [value for site in chosen if (value := getattr(site, which)) is not None]
        return fmean(values) if values else None

    @property
    def attack_success(self) -> float | None:
        """Mean over the models that honest sites serve in the end; None if it was not measured."""
        last = [
            _score(site.rounds[-1].served, ATTACK_SUCCESS) for site in self.sites if site.rounds
        ]
        values = [value for value in last if value is not None]
        return fmean(values) if values else None

    def to_plain(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "metric": self.metric,
            "rounds": self.spec.rounds,
            "seed": self.spec.seed,
            "rule_terms": self.spec.rule.computed(),
            "partition": self.spec.partition.computed() if self.spec.partition else None,
            "participation": self.spec.participation,
            "malfunctions": {
                name: one.model_dump(mode="json") for name, one in self.spec.malfunctions.items()
            },
            "sites": [
                {
                    "name": site.name,
                    "malfunctioning": site.malfunctioning,
                    **{which: getattr(site, which) for which in self.scores},
                    "judged": dict(site.judged),
                    "left_out": site.left_out,
                    "kept_local": site.kept_local,
                    "rounds": [_round_to_plain(one) for one in site.rounds],
                }
                for site in self.sites
            ],
            "mean": {
                population: {
                    which: self.mean(which, honest=population == "honest") for which in self.scores
                }
                for population in ("all", "honest")
            },
            "update_bytes": self.update_bytes,
            "seconds": round(self.seconds, 3),
        }


def _round_to_plain(one: SimulatedRound) -> dict[str, Any]:
    """One point of a site's curves; the metrics are empty if they were not measured."""
    metrics = {"local": one.local, "merged": one.merged}
    if one.worth is not None:
        metrics |= {"alone": one.alone, "served": one.served}
    return {
        "round": one.round,
        **{
            which: {name: _finite(value) for name, value in found.items()}
            for which, found in metrics.items()
        },
        "takes_part": one.takes_part,
        "accepted": sum(verdict.accepted for verdict in one.verdicts),
        "rejected": sum(not verdict.accepted for verdict in one.verdicts),
    }


def run(options: SimulateOptions, console: Console | None = None) -> Simulation:
    console = console or Console(stderr=True)
    spec = spec_of(options)
    began = time.monotonic()
    label = f"simulating {len(spec.sites)} sites for {spec.rounds} rounds"
    with progress_bar_shown(console, label) as count:

        async def simulated() -> Any:
            async with ProcessPool(child_environment(options.data)) as pool:
                [answer] = await pool.run(SIMULATE, [spec.to_plain()], count)
                return answer

        answer = run_until_signal(simulated())
    return _summarised(options, spec, SimulationResult.of(answer), time.monotonic() - began)


def spec_of(options: SimulateOptions) -> SimulationSpec:
    built_in = BUILT_IN.get(options.task)
    if built_in is None and ":" not in options.task:
        raise ConfigError(
            f"there is no built-in task `{options.task}`",
            hint=f"{nearest(options.task, BUILT_IN)}  Your own is `module:function`.",
        )
    clients = options.clients or (built_in.clients if built_in else 5)
    rounds = options.rounds or (built_in.rounds if built_in else 8)
    if not 2 <= clients <= SITES_MAX:
        raise ConfigError(f"a federation has 2 to {SITES_MAX} sites, not {clients}")
    names = client_names(clients)
    malfunction = _malfunction(options, clients)
    return SimulationSpec(
        sites=names,
        rounds=rounds,
        seed=options.seed,
        rule=_rule(options),
        task=TaskConfig(
            entry=built_in.entry if built_in else options.task, args=dict(options.args)
        ),
        malfunctions=malfunctions_of(names, malfunction, options.bad, options.seed),
        final_only=not options.curves,
        exchange=options.exchange,
        partition=_partition(options),
        participation=_participation(options),
    )


def _malfunction(options: SimulateOptions, clients: int) -> MalfunctionConfig | None:
    if options.malfunction == NONE or options.bad == 0:
        return None
    if not is_known(options.malfunction):
        known = (NONE, *known_malfunctions())
        raise ConfigError(
            f"no malfunction `{options.malfunction}`", hint=nearest(options.malfunction, known)
        )
    if options.bad >= clients:
        raise ConfigError(
            f"{options.bad} of {clients} sites cannot malfunction",
            hint="leave at least one honest site: make --bad smaller than --clients",
        )
    given = {"scale": options.scale, "options": dict(options.malfunction_options)}
    try:
        return MalfunctionConfig.model_validate({"kind": options.malfunction, **given}).checked()
    except ValidationError as problem:
        message = problem.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"malfunction {options.malfunction}: {message}") from None


def _partition(options: SimulateOptions) -> PartitionConfig | None:
    if options.partition is None:
        if options.partition_options:
            raise ConfigError("a partition has options but no kind", hint="add --partition KIND")
        return None
    return config_of({**options.partition_options, "kind": options.partition})


def _participation(options: SimulateOptions) -> float:
    if not 0 < options.participation <= 1:
        raise ConfigError(
            f"the participation is {options.participation}",
            hint="give a probability above 0 and at most 1",
        )
    return options.participation


def _rule(options: SimulateOptions) -> RuleConfig:
    known = known_rules()
    if options.rule not in known and not options.rule_given:
        raise ConfigError(f"there is no rule `{options.rule}`", hint=nearest(options.rule, known))
    terms: dict[str, Any] = {} if options.guard is None else {"guard": options.guard}
    settings = dict(options.settings)
    if options.rule == LIGHTYEAR:
        unknown = [key for key in settings if key not in RuleConfig.model_fields]
        if unknown:
            settable = [key for key in RuleConfig.model_fields if key not in ("name", "options")]
            raise ConfigError(
                f"rule lightyear has no option `{unknown[0]}`", hint=nearest(unknown[0], settable)
            )
        terms |= settings
    else:
        terms |= {"options": settings}
    try:
        return RuleConfig.model_validate({"name": options.rule, **terms})
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"rule {options.rule}: {where + ': ' if where else ''}{message}",
            hint="correct --option or --guard",
        ) from None


def _summarised(
    options: SimulateOptions, spec: SimulationSpec, result: SimulationResult, seconds: float
) -> Simulation:
    judged: dict[PeerName, Counter[str]] = {name: Counter() for name in spec.sites}
    for rounds in result.sites.values():
        for verdict in (verdict for one in rounds for verdict in one.verdicts):
            judged[verdict.peer]["ok" if verdict.accepted else str(verdict.reason)] += 1
    harms = [one.harm for rounds in result.sites.values() for one in rounds if one.harm is not None]
    left_out = Counter(peer for harm in harms for peer in harm.dropped)
    metric = _metric(options.task, next(iter(result.sites.values()))[-1].merged)
    sites = [
        SiteSummary(
            name=name,
            malfunctioning=name in spec.malfunctions,
            local=_score(rounds[-1].local, metric),
            merged=_score(rounds[-1].merged, metric),
            judged=dict(sorted(judged[name].items())),
            left_out=left_out[name],
            kept_local=sum(one.harm is not None and one.harm.kept_local for one in rounds),
            rounds=rounds,
            alone=_score(rounds[-1].alone, metric),
            served=_score(rounds[-1].served, metric),
        )
        for name, rounds in sorted(result.sites.items())
    ]
    return Simulation(spec, options.task, metric, sites, result.update_bytes, seconds)


def _metric(task: str, metrics: Mapping[str, float]) -> str:
    """The metric of a built-in task; for other tasks the first that is not the loss."""
    if task in BUILT_IN:
        return BUILT_IN[task].metric
    return next((name for name in metrics if name not in (LOSS, ATTACK_SUCCESS)), LOSS)


def _score(metrics: Mapping[str, float], metric: str) -> float | None:
    value = metrics.get(metric)
    return None if value is None else _finite(value)


def _finite(value: float) -> float | None:
    """None for a model that has diverged: JSON has no NaN."""
    return value if math.isfinite(value) else None


def print_table(simulation: Simulation, console: Console | None = None) -> None:
    """Print the scores and verdicts of each site to standard output."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("site", no_wrap=True)
    table.add_column("sends", no_wrap=True)
    further = simulation.scores[2:]
    for heading in ("trained", "merged", *further, "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("rejected")
    for site in simulation.sites:
        malfunction = simulation.spec.malfunctions.get(site.name)
        refused = [f"{n} {reason}" for reason, n in site.judged.items() if reason != "ok"]
        refused += [f"{site.left_out} left out of the merge"] * bool(site.left_out)
        judged = sum(site.judged.values())
        table.add_row(
            Text(site.name, "red" if malfunction else ""),
            Text(federation_view.malfunction_text(malfunction.kind), "red")
            if malfunction
            else "its model",
            _number(site.local),
            Text(_number(site.merged), "bold"),
            *(_number(getattr(site, which)) for which in further),
            f"{site.judged.get('ok', 0)} of {judged}" if judged else "",
            ", ".join(refused),
        )
    table.add_section()
    for heading, honest in (("mean, all", False), ("mean, honest", True)):
        table.add_row(
            heading,
            "",
            _number(simulation.mean("local", honest=honest)),
            Text(_number(simulation.mean("merged", honest=honest)), "bold"),
            *(_number(simulation.mean(which, honest=honest)) for which in further),
        )
    console = console or Console()
    heading_text = (
        f"{simulation.metric} on each site's own test data after {simulation.spec.rounds} rounds"
    )
    heading_text += (
        f" of {simulation.task} under {simulation.spec.rule.name}, seed {simulation.spec.seed}:"
    )
    console.print(Text(heading_text))
    console.print(table)
    if simulation.attack_success is not None:
        console.print(f"Attack success at the honest sites: {_number(simulation.attack_success)}")
    size = federation_view.size(simulation.update_bytes)
    console.print(f"One update: {size}; {simulation.seconds:.0f} s in total.", highlight=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
