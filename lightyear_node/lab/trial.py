"""One simulated federation and its table: who ended where, and how everybody was judged."""

from __future__ import annotations

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

from lightyear_node.config.agreement import LIGHTYEAR, SITES_MAX, ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.errors import ConfigError
from lightyear_node.lab import view
from lightyear_node.lab.children import Nursery, child_environment, run_until_signal
from lightyear_node.lab.counting import counting
from lightyear_node.lab.experiment import SIMULATE
from lightyear_node.lab.jobs import client_names, malfunctions_of
from lightyear_node.lab.simulate import SimResult, Spec
from lightyear_node.lab.suite import MALFUNCTIONS, NONE, RULES, nearest
from lightyear_node.records import PeerName
from lightyear_node.tasks import BUILT_IN

LOSS = "loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    task: str = "digits"
    args: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None
    rule: str = LIGHTYEAR
    guard: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    malfunction: str = "sfa"
    scale: float | None = None
    bad: int = 1
    clients: int | None = None
    rounds: int | None = None
    seed: int = 0
    exchange: ExchangeTerms = field(default_factory=ExchangeTerms)


@dataclass(frozen=True, slots=True)
class Seen:
    """One site: its score before and after the last merge, and what the others said of it."""

    name: PeerName
    malfunctioning: bool
    local: float | None
    merged: float | None
    judged: Mapping[str, int]
    left_out: int = 0
    """Times that others accepted it, and left it out of their merge."""
    kept_local: int = 0
    """Rounds in which it left out everybody."""


@dataclass(frozen=True, slots=True)
class Trial:
    spec: Spec
    task: str
    metric: str
    sites: Sequence[Seen]
    update_bytes: int
    seconds: float

    def mean(self, which: str, *, honest: bool) -> float | None:
        """Over those sites that have a score."""
        chosen = [site for site in self.sites if not (honest and site.malfunctioning)]
        values = [value for site in chosen if (value := getattr(site, which)) is not None]
        return fmean(values) if values else None

    def to_plain(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "metric": self.metric,
            "rounds": self.spec.rounds,
            "seed": self.spec.seed,
            "rule_terms": self.spec.rule.computed(),
            "malfunctions": {
                name: one.model_dump(mode="json") for name, one in self.spec.malfunctions.items()
            },
            "sites": [
                {
                    "name": site.name,
                    "malfunctioning": site.malfunctioning,
                    "local": site.local,
                    "merged": site.merged,
                    "judged": dict(site.judged),
                    "left_out": site.left_out,
                    "kept_local": site.kept_local,
                }
                for site in self.sites
            ],
            "mean": {
                population: {
                    which: self.mean(which, honest=population == "honest")
                    for which in ("local", "merged")
                }
                for population in ("all", "honest")
            },
            "update_bytes": self.update_bytes,
            "seconds": round(self.seconds, 3),
        }


def run(options: Options, console: Console | None = None) -> Trial:
    console = console or Console(stderr=True)
    spec = spec_of(options)
    began = time.monotonic()
    label = f"simulating {len(spec.sites)} sites for {spec.rounds} rounds"
    with counting(console, label) as count:

        async def simulated() -> Any:
            async with Nursery(child_environment(options.data)) as nursery:
                [answer] = await nursery.ask(SIMULATE, [spec.to_plain()], count)
                return answer

        answer = run_until_signal(simulated())
    return _seen(options, spec, SimResult.of(answer), time.monotonic() - began)


def spec_of(options: Options) -> Spec:
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
    return Spec(
        sites=names,
        rounds=rounds,
        seed=options.seed,
        rule=_rule(options),
        task=TaskEntry(entry=built_in.entry if built_in else options.task, args=dict(options.args)),
        malfunctions=malfunctions_of(names, malfunction, options.bad, options.seed),
        final_only=True,
        exchange=options.exchange,
    )


def _malfunction(options: Options, clients: int) -> Malfunction | None:
    if options.malfunction == NONE or options.bad == 0:
        return None
    if options.malfunction not in MALFUNCTIONS:
        known = (NONE, *MALFUNCTIONS)
        raise ConfigError(
            f"no malfunction `{options.malfunction}`", hint=nearest(options.malfunction, known)
        )
    if options.bad >= clients:
        raise ConfigError(
            f"{options.bad} of {clients} sites cannot malfunction",
            hint="leave at least one honest site: make --bad smaller than --clients",
        )
    return Malfunction(kind=options.malfunction, scale=options.scale)


def _rule(options: Options) -> RuleTerms:
    if options.rule not in RULES:
        raise ConfigError(f"there is no rule `{options.rule}`", hint=nearest(options.rule, RULES))
    beside: dict[str, Any] = {} if options.guard is None else {"guard": options.guard}
    settings = dict(options.settings)
    if options.rule == LIGHTYEAR:
        unknown = [key for key in settings if key not in RuleTerms.model_fields]
        if unknown:
            known = [key for key in RuleTerms.model_fields if key not in ("name", "options")]
            raise ConfigError(
                f"rule lightyear has no option `{unknown[0]}`", hint=nearest(unknown[0], known)
            )
        beside |= settings
    else:
        beside |= {"options": settings}
    try:
        return RuleTerms.model_validate({"name": options.rule, **beside})
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"rule {options.rule}: {where + ': ' if where else ''}{message}",
            hint="correct --option or --guard",
        ) from None


def _seen(options: Options, spec: Spec, result: SimResult, seconds: float) -> Trial:
    judged: dict[PeerName, Counter[str]] = {name: Counter() for name in spec.sites}
    for rounds in result.sites.values():
        for verdict in (verdict for one in rounds for verdict in one.verdicts):
            judged[verdict.peer]["ok" if verdict.accepted else str(verdict.reason)] += 1
    harms = [one.harm for rounds in result.sites.values() for one in rounds if one.harm is not None]
    left_out = Counter(peer for harm in harms for peer in harm.dropped)
    metric = _metric(options.task, next(iter(result.sites.values()))[-1].merged)
    sites = [
        Seen(
            name=name,
            malfunctioning=name in spec.malfunctions,
            local=_score(rounds[-1].local, metric),
            merged=_score(rounds[-1].merged, metric),
            judged=dict(sorted(judged[name].items())),
            left_out=left_out[name],
            kept_local=sum(one.harm is not None and one.harm.kept_local for one in rounds),
        )
        for name, rounds in sorted(result.sites.items())
    ]
    return Trial(spec, options.task, metric, sites, result.update_bytes, seconds)


def _metric(task: str, metrics: Mapping[str, float]) -> str:
    """A built-in task's own; of another task the first that is not its loss."""
    if task in BUILT_IN:
        return BUILT_IN[task].metric
    return next((name for name in metrics if name != LOSS), LOSS)


def _score(metrics: Mapping[str, float], metric: str) -> float | None:
    value = metrics.get(metric)
    return value if value is not None and abs(value) < float("inf") else None


def print_table(trial: Trial, console: Console | None = None) -> None:
    """For people, on standard output."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("site", no_wrap=True)
    table.add_column("sends", no_wrap=True)
    for heading in ("trained", "merged", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("rejected")
    for site in trial.sites:
        malfunction = trial.spec.malfunctions.get(site.name)
        refused = [f"{n} {reason}" for reason, n in site.judged.items() if reason != "ok"]
        refused += [f"{site.left_out} left out of the merge"] * bool(site.left_out)
        heard = sum(site.judged.values())
        table.add_row(
            Text(site.name, "red" if malfunction else ""),
            Text(view.in_short(malfunction.kind), "red") if malfunction else "its model",
            _number(site.local),
            Text(_number(site.merged), "bold"),
            f"{site.judged.get('ok', 0)} of {heard}" if heard else "",
            ", ".join(refused),
        )
    table.add_section()
    for heading, honest in (("mean, all", False), ("mean, honest", True)):
        table.add_row(
            heading,
            "",
            _number(trial.mean("local", honest=honest)),
            Text(_number(trial.mean("merged", honest=honest)), "bold"),
        )
    console = console or Console()
    words = f"{trial.metric} on each site's own test data after round {trial.spec.rounds}"
    words += f" of {trial.task} under {trial.spec.rule.name}, seed {trial.spec.seed}:"
    console.print(Text(words))
    console.print(table)
    size = view.size(trial.update_bytes)
    console.print(f"One update has {size}; {trial.seconds:.0f} s in all.", highlight=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
