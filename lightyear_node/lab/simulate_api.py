"""`lightyear_node.simulate`: one simulated federation from Python, as flat records.

The work is done in a child process with one thread, as by `lightyear-node simulate`: the caller's
torch settings and random state stay untouched, and equal arguments give equal numbers.  Functions
that are given instead of names run in the caller's process, where a debugger reaches them, with
the same settings, which are restored afterwards.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightyear_node.config.federation import LIGHTYEAR
from lightyear_node.lab.process_pool import child_environment
from lightyear_node.lab.simulate import GivenFunctions, Progress
from lightyear_node.lab.simulate import simulate as simulate_here
from lightyear_node.lab.simulate_command import SimulateOptions, spec_of
from lightyear_node.lab.simulation_process import simulate_in_child
from lightyear_node.lab.simulation_records import SimulatedRound, SimulationSpec
from lightyear_node.lab.tasks import DATA_VARIABLE
from lightyear_node.types import PeerName

if TYPE_CHECKING:
    from lightyear_node.worker.task import Task

Record = dict[str, Any]


def simulate(
    task: str | Callable[..., Task] = "digits",
    *,
    rule: str | Callable[..., Any] = LIGHTYEAR,
    options: Mapping[str, Any] | None = None,
    guard: bool | None = None,
    sites: int | None = None,
    rounds: int | None = None,
    malfunction: str | Callable[..., Any] = "sfa",
    scale: float | None = None,
    malfunction_options: Mapping[str, Any] | None = None,
    bad: int = 1,
    partition: str | Mapping[str, Any] | None = None,
    participation: float = 1.0,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
    data: str | os.PathLike[str] | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Record]:
    """Simulate a federation without a network; return its rounds and verdicts as records.

    Each argument has the meaning and the default of the option of `lightyear-node simulate`:
    `options` are the rule's (`--option`), `arguments` the task's (`--arg`), `sites` is
    `--clients`; `partition` is a kind, or a mapping as in a suite.  `task`, `rule` and
    `malfunction` may also be functions.  `progress(done, total)` is called as sites finish
    rounds.

    A record of kind `round` holds one site's metrics in one round, `local.*` after training and
    `merged.*` after merging; one of kind `verdict` holds what a site decided about one peer.
    """
    shape = {} if partition is None or isinstance(partition, str) else dict(partition)
    kind = partition if isinstance(partition, str) else shape.pop("kind", None)
    spec = spec_of(
        SimulateOptions(
            task=_name(task),
            args=arguments or {},
            rule=_name(rule),
            rule_given=not isinstance(rule, str),
            guard=guard,
            settings=options or {},
            malfunction=_name(malfunction),
            scale=scale,
            malfunction_options=malfunction_options or {},
            bad=bad,
            clients=sites,
            rounds=rounds,
            seed=seed,
            partition=kind,
            partition_options=shape,
            participation=participation,
            curves=True,
        )
    )
    functions = GivenFunctions(
        task=None if isinstance(task, str) else task,
        attack=None if isinstance(malfunction, str) else malfunction,
        rule=None if isinstance(rule, str) else rule,
    )
    if functions == GivenFunctions():
        [result] = simulate_in_child([spec], progress, environment=_environment(data))
    else:
        with _settings_of_a_child(data):
            result = simulate_here(spec, progress, functions)
    return [
        record
        for name, site_rounds in sorted(result.sites.items())
        for one in site_rounds
        for record in _records(spec, name, one)
    ]


def _name(given: str | Callable[..., Any]) -> str:
    """The name of a function in errors and records, in the form `module:function`."""
    if isinstance(given, str):
        return given
    kind = given if hasattr(given, "__qualname__") else type(given)
    return ":".join(re.sub(r"[^\w.]", "", part) for part in (kind.__module__, kind.__qualname__))


@contextmanager
def _settings_of_a_child(data: str | os.PathLike[str] | None) -> Iterator[None]:
    """Torch's settings and the environment as in a child, so that the numbers are the same."""
    import torch

    threads, flushes = torch.get_num_threads(), not bool(torch.tensor(1e-30) * 1e-10)
    directory = os.environ.get(DATA_VARIABLE)
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_num_threads(1)
            torch.set_flush_denormal(True)
            if data is not None:
                os.environ[DATA_VARIABLE] = str(Path(data).resolve())
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(flushes)
            if data is not None:
                os.environ.pop(DATA_VARIABLE)
                os.environ.update({} if directory is None else {DATA_VARIABLE: directory})


def _environment(data: str | os.PathLike[str] | None) -> dict[str, str]:
    """The child imports from the same folders as the caller, and reads the same data sets."""
    directory = data or os.environ.get(DATA_VARIABLE)
    environment = child_environment(None if directory is None else Path(directory))
    folders = [environment.get("PYTHONPATH"), *(folder or str(Path.cwd()) for folder in sys.path)]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def _records(spec: SimulationSpec, site: PeerName, one: SimulatedRound) -> list[Record]:
    shared = {"round": one.round, "site": site, "site_malfunctions": site in spec.malfunctions}
    harm = one.harm
    summary = {
        "kind": "round",
        **shared,
        "takes_part": one.takes_part,
        "accepted": sum(verdict.accepted for verdict in one.verdicts),
        "rejected": sum(not verdict.accepted for verdict in one.verdicts),
        "dropped": len(harm.dropped) if harm is not None else 0,
        "kept_local": harm is not None and harm.kept_local,
        **one.metrics(),
    }
    verdicts = [
        {
            "kind": "verdict",
            **shared,
            "peer": verdict.peer,
            "peer_malfunctions": verdict.peer in spec.malfunctions,
            "verdict": str(verdict.fate),
            "reason": str(verdict.reason),
            "score": verdict.score,
            "weight": verdict.weight,
            **verdict.checks,
        }
        for verdict in one.verdicts
    ]
    return [summary, *verdicts]
