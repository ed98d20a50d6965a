"""Simulates a federation without a network: all sites in one process, on temporary files.

Training, judging and merging are the worker's own code; only the exchange of files is left out.
It serves comparisons (the same federation without a rule) and short experiments.  Torch is loaded
only when a simulation runs; `simulation_process` keeps it in a child process.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulation_records import (
    SimulatedRound,
    SimulationResult,
    SimulationSpec,
)
from lightyear_node.types import Digest, PeerName, Round, Worth
from lightyear_node.worker.job_types import CandidateFile

if TYPE_CHECKING:
    from lightyear_node.lab.faulty_site import FaultySite
    from lightyear_node.lab.malfunction_plugins import Attack, AttackPlugin
    from lightyear_node.lab.training_cache import CacheSettings, TrainingCache
    from lightyear_node.worker.task import Task

FOLDER_PREFIX = "lightyear-simulate-"

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class SimulatedSite:
    """One site, its files of the current round and its finished rounds."""

    local_site: FaultySite
    folder: Path
    malfunction: MalfunctionConfig | None = None
    attack_is_common: bool = False
    """Whether all colluders send the same update."""
    rounds: list[SimulatedRound] = field(default_factory=list)
    trained: Mapping[str, float] = field(default_factory=dict)
    carried: bool = False
    rule_state: Mapping[str, Any] = field(default_factory=dict)
    worth: Worth | None = None

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def own(self) -> Path:
        return self.folder / "own"

    @property
    def carry(self) -> Path:
        return self.folder / "carry"

    @property
    def carry_before(self) -> Path | None:
        """The training state before the current round; None in the first."""
        return self._carry_before if self._carry_before.exists() else None

    @property
    def _carry_before(self) -> Path:
        return self.folder / "carry_before"

    @property
    def attacks(self) -> bool:
        """Whether its malfunction is a function that sees the other sites' updates."""
        return self.malfunction is not None and not self.malfunction.built_in

    def train(self, name: PeerName, round: Round, measure: bool) -> CandidateFile:
        """Train one round; return the update that this site sends, unless it `attacks`."""
        outgoing, carry_out = self.folder / "outgoing", self.folder / "carry_out"
        outgoing.unlink(missing_ok=True)
        trained = self.local_site.train(
            base=self.model,
            carry=self.carry if self.carried else None,
            round=round,
            own=self.own,
            outgoing=outgoing,
            carry_out=carry_out,
            measure=measure,
        )
        if self.carried:
            self.carry.replace(self._carry_before)
        carry_out.replace(self.carry)
        self.carried, self.trained = True, trained.metrics
        sent = outgoing if outgoing.exists() else self.own
        return CandidateFile(name, str(sent), trained.samples, _digest(sent))

    def attack(
        self,
        update: CandidateFile,
        colluders: Sequence[CandidateFile],
        honest: Sequence[CandidateFile],
        tasks: Mapping[PeerName, Task],
        round: Round,
    ) -> CandidateFile:
        """The update that this site sends instead, having seen those of the others."""
        assert self.malfunction is not None
        out = self.folder / "attack"
        self.local_site.write_corrupted(
            self.malfunction,
            base=self.model,
            carry=self.carry_before,
            own=self.own,
            round=round,
            out=out,
            colluders=colluders,
            honest=honest,
            tasks=tasks,
        )
        return replace(update, path=str(out), digest=_digest(out))

    def close(self, round: Round, peers: Sequence[CandidateFile], measure: bool) -> None:
        """Judge the peers' updates and merge the accepted ones."""
        judged = self.local_site.judge(
            own=self.own, before=self.model, peers=peers, round=round, state=self.rule_state
        )
        self.rule_state = judged.state
        by_peer = {candidate.peer: candidate for candidate in peers}
        accepted = [(by_peer[v.peer], v.weight) for v in judged.verdicts if v.accepted]
        merged_file = self.folder / "merged"
        merged = self.local_site.merge(
            own=self.own,
            accepted=accepted,
            round=round,
            out=merged_file,
            worth=self.worth,
            measure=measure,
        )
        merged_file.replace(self.model)
        self.worth = merged.worth
        self.rounds.append(
            SimulatedRound(
                round,
                self.trained,
                merged.metrics,
                judged.verdicts,
                merged.harm,
                worth=merged.worth,
            )
        )

    def skip(self, round: Round, measure: bool) -> None:
        """A round in which this site does not take part: it keeps its model."""
        metrics = self.local_site.measure(self.model) if measure else {}
        self.rounds.append(SimulatedRound(round, metrics, metrics, (), takes_part=False))

    def close_alone(self, round: Round) -> None:
        shutil.copyfile(self.own, self.model)
        self.rounds.append(SimulatedRound(round, self.trained, self.trained, ()))


@dataclass(frozen=True, slots=True)
class GivenFunctions:
    """Functions of the caller, which no name stands for; they cannot cross a process border."""

    task: Callable[..., Any] | None = None
    """Instead of the task's entry."""
    attack: Attack | None = None
    """Instead of the function that the malfunction's kind names."""
    rule: Callable[..., Any] | None = None
    """Instead of the rule of that name."""


def simulate(
    spec: SimulationSpec,
    progress: Progress = lambda done, total: None,
    functions: GivenFunctions | None = None,
    cache: CacheSettings | None = None,
) -> SimulationResult:
    """Run all rounds; `progress` counts one step per site and round.

    With a `cache`, training that an earlier simulation has done is not repeated; the results are
    the same.
    """
    total = spec.rounds * len(spec.sites)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        stored = _opened(cache, spec, functions)
        sites = make_sites(spec, Path(folder), functions, stored)
        update_bytes = trainings = 0
        for number in range(spec.rounds):
            round = Round(number)
            measure = number == spec.rounds - 1 or not spec.final_only
            trained = []
            for place, (name, site) in enumerate(sites.items(), start=1):
                if spec.takes_part(name, round):
                    trained.append(site.train(name, round, measure))
                    trainings += 1
                else:
                    site.skip(round, measure)
                progress(number * len(sites) + place, total)
            sent = _attacked(sites, trained, round)
            for candidate in sent:
                peers = [one for one in sent if one is not candidate]
                if spec.rule.alone or not peers:
                    sites[candidate.peer].close_alone(round)
                else:
                    sites[candidate.peer].close(round, peers, measure)
            update_bytes = Path(sent[0].path).stat().st_size if sent else update_bytes
        return SimulationResult(
            {name: site.rounds for name, site in sites.items()},
            update_bytes,
            trainings,
            stored.cache.hits if stored else 0,
        )


def _attacked(
    sites: Mapping[PeerName, SimulatedSite], trained: Sequence[CandidateFile], round: Round
) -> list[CandidateFile]:
    """Replace the updates of attacking sites, each of which sees what all others trained."""
    colluders = [one for one in trained if sites[one.peer].attacks]
    honest = [one for one in trained if sites[one.peer].malfunction is None]
    tasks = {name: site.local_site.task for name, site in sites.items()}
    common: dict[str, CandidateFile] = {}
    sent = []
    for one in trained:
        site = sites[one.peer]
        if site.malfunction is None or not site.attacks:
            sent.append(one)
            continue
        kind = site.malfunction.model_dump_json()
        if kind in common:
            sent.append(replace(one, path=common[kind].path, digest=common[kind].digest))
            continue
        others = [colluder for colluder in colluders if colluder is not one]
        sent.append(site.attack(one, others, honest, tasks, round))
        if site.attack_is_common:
            common[kind] = sent[-1]
    return sent


@dataclass(frozen=True, slots=True)
class OpenedCache:
    """A cache and the parts of its keys that are equal at all sites of a simulation."""

    cache: TrainingCache
    settings: CacheSettings
    machine: Mapping[str, Any]

    def of_site(
        self, spec: SimulationSpec, name: PeerName, success: AttackPlugin | None
    ) -> dict[str, Any]:
        """The arguments of one site."""
        from lightyear_node.lab.training_key import site_inputs

        measured = {"name": success.name, **success.options} if success else None
        inputs = {
            "package": self.settings.package,
            "machine": self.machine,
            **site_inputs(spec, name, self.settings.data, measured),
        }
        return {"cache": self.cache, "cache_inputs": inputs}


def _opened(
    settings: CacheSettings | None, spec: SimulationSpec, functions: GivenFunctions | None
) -> OpenedCache | None:
    """The cache, unless something that determines this training cannot be keyed."""
    from lightyear_node.lab.training_cache import TrainingCache
    from lightyear_node.lab.training_key import is_keyed, machine_inputs

    if settings is None or functions or not is_keyed(spec, settings.data):
        return None
    cache = TrainingCache(Path(settings.folder), settings.bytes_max)
    return OpenedCache(cache, settings, machine_inputs())


def make_sites(
    spec: SimulationSpec,
    folder: Path,
    functions: GivenFunctions | None = None,
    stored: OpenedCache | None = None,
) -> dict[PeerName, SimulatedSite]:
    """Build every site's task and write its initial model below `folder`."""
    from lightyear_node.lab.faulty_site import FaultySite
    from lightyear_node.lab.malfunction_plugins import load_plugin

    given = functions or GivenFunctions()
    plugin = _success(spec, given.attack)
    sites = {}
    for name, task in _tasks(spec, given.task).items():
        malfunction = spec.malfunctions.get(name)
        success = plugin if malfunction is None else None
        local = FaultySite(
            task,
            name=name,
            seed=spec.seed,
            rule=spec.rule,
            rounds=spec.rounds,
            exchange=spec.exchange,
            malfunction=malfunction,
            attack=given.attack,
            sees_others=True,
            rule_function=given.rule,
            success=success.success if success else None,
            tolerant=True,
            **(stored.of_site(spec, name, success) if stored else {}),
        )
        site = SimulatedSite(local, folder / name, malfunction)
        if malfunction is not None and not malfunction.built_in:
            site.attack_is_common = load_plugin(malfunction, given.attack).common
        site.folder.mkdir()
        local.write_initial(site.model)
        sites[name] = site
    return sites


def _success(spec: SimulationSpec, given: Attack | None) -> AttackPlugin | None:
    """The attack whose success is measured at the honest sites; of several, the first."""
    from lightyear_node.lab.malfunction_plugins import load_plugin

    for _, malfunction in sorted(spec.malfunctions.items()):
        if (
            not malfunction.built_in
            and (plugin := load_plugin(malfunction, given)).measures_success
        ):
            return plugin
    return None


def _tasks(spec: SimulationSpec, given: Callable[..., Any] | None) -> dict[PeerName, Task]:
    """The sites' tasks by name, in sorted order; `given` replaces the entry's function."""
    from lightyear_node.worker.task import build_task, load_builder

    entry, arguments, names = spec.task.entry, spec.task.args, sorted(spec.sites)
    if entry is None or isinstance(arguments, tuple):
        raise ConfigError(
            f"{spec.task.name} cannot be simulated: only a `Task` can (`task.entry`)",
            hint="run it in a federation of nodes",
        )
    builder = load_builder(entry) if given is None else given

    def build(name: PeerName, index: int) -> Task:
        context = {
            "site_name": name,
            "site_index": index,
            "site_count": len(names),
            "seed": spec.seed,
        }
        return build_task(entry, builder, arguments, context)

    if spec.partition is None:
        return {name: build(name, index) for index, name in enumerate(names)}
    from lightyear_node.lab.repartition import repartitioned, same_at_every_site

    # A task that does not depend on the site has all data: once is enough.
    kept = names[:1] if same_at_every_site(builder) else names
    tasks = [build(name, index) for index, name in enumerate(kept)]
    divided = repartitioned(tasks, len(names), spec.partition, spec.seed)
    return dict(zip(names, divided, strict=True))


def _digest(path: Path) -> Digest:
    from lightyear_node.storage.blobs import hash_file

    return hash_file(path)[0]
