"""A federation without a network: all sites in one process, round by round, on temporary files.

The learning is the worker's own code, called as the worker calls it; only the exchange is left out.
That makes it the place for comparisons ("what if nobody judged anybody?") and for quick trials.
Torch is loaded only when a simulation runs; `Apart` keeps it in a child process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.lab.federation import LabError, package_environment
from lightyear_node.records import Digest, Harm, PeerName, Round, Verdict
from lightyear_node.worker.jobs import Candidate, verdict_from_plain, verdict_to_plain

if TYPE_CHECKING:
    from lightyear_node.worker.site import Site

YIELDING_NICE = 10
FOLDER_PREFIX = "lightyear-simulate-"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Spec:
    """What is simulated.  Sites get their shares of the data by their place among the names."""

    sites: Sequence[PeerName]
    rounds: int
    seed: int
    rule: RuleTerms
    task: TaskEntry = field(default_factory=TaskEntry)
    malfunctions: Mapping[PeerName, Malfunction] = field(default_factory=dict)
    final_only: bool = False
    """Measure after the last round only: on small tasks measuring costs more than training."""
    exchange: ExchangeTerms = field(default_factory=ExchangeTerms)
    """Which tensors the sites would send, and as what."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "sites": list(self.sites),
            "rounds": self.rounds,
            "seed": self.seed,
            "rule": self.rule.model_dump(mode="json"),
            "task": self.task.model_dump(mode="json"),
            "malfunctions": {
                name: malfunction.model_dump(mode="json")
                for name, malfunction in self.malfunctions.items()
            },
            "final_only": self.final_only,
            "exchange": self.exchange.model_dump(mode="json"),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            sites=[PeerName(name) for name in plain["sites"]],
            rounds=plain["rounds"],
            seed=plain["seed"],
            rule=RuleTerms.model_validate(plain["rule"]),
            task=TaskEntry.model_validate(plain["task"]),
            malfunctions={
                PeerName(name): Malfunction.model_validate(value)
                for name, value in plain["malfunctions"].items()
            },
            final_only=plain["final_only"],
            exchange=ExchangeTerms.model_validate(plain["exchange"]),
        )


@dataclass(frozen=True, slots=True)
class SimRound:
    """One round at one site: its metrics after training and after merging, and its verdicts.

    `harm` is what measuring the merged model found, where the rule asks for that.
    """

    round: Round
    local: Mapping[str, float]
    merged: Mapping[str, float]
    verdicts: Sequence[Verdict]
    harm: Harm | None = None

    def to_plain(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "local": dict(self.local),
            "merged": dict(self.merged),
            "verdicts": [verdict_to_plain(verdict) for verdict in self.verdicts],
            "harm": asdict(self.harm) if self.harm is not None else None,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        verdicts = tuple(verdict_from_plain(verdict) for verdict in plain["verdicts"])
        harm = Harm.from_plain(plain["harm"]) if plain["harm"] else None
        return cls(Round(plain["round"]), plain["local"], plain["merged"], verdicts, harm)


@dataclass(frozen=True, slots=True)
class SimResult:
    """Every site's rounds, in order."""

    sites: Mapping[PeerName, Sequence[SimRound]]
    update_bytes: int = 0
    """Of one model, as one site sends it to one other."""

    def final(self, metric: str) -> dict[PeerName, float]:
        return {name: rounds[-1].merged[metric] for name, rounds in self.sites.items()}

    def to_plain(self) -> dict[str, Any]:
        sites = {name: [one.to_plain() for one in rounds] for name, rounds in self.sites.items()}
        return {"sites": sites, "update_bytes": self.update_bytes}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        sites = {
            PeerName(name): [SimRound.of(one) for one in rounds]
            for name, rounds in plain["sites"].items()
        }
        return cls(sites, plain["update_bytes"])


@dataclass(slots=True)
class Seat:
    """One site and its files of the current round."""

    site: Site
    folder: Path
    rounds: list[SimRound] = field(default_factory=list)
    trained: Mapping[str, float] = field(default_factory=dict)
    carried: bool = False
    rule_state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def own(self) -> Path:
        return self.folder / "own"

    @property
    def carry(self) -> Path:
        return self.folder / "carry"

    def train(self, name: PeerName, round: Round, measure: bool) -> Candidate:
        """What the others get to see of this site's round."""
        outgoing, carry_out = self.folder / "outgoing", self.folder / "carry_out"
        outgoing.unlink(missing_ok=True)
        trained = self.site.train(
            base=self.model,
            carry=self.carry if self.carried else None,
            round=round,
            own=self.own,
            outgoing=outgoing,
            carry_out=carry_out,
            measure=measure,
        )
        carry_out.replace(self.carry)
        self.carried, self.trained = True, trained.metrics
        sent = outgoing if outgoing.exists() else self.own
        return Candidate(name, str(sent), trained.samples, _digest(sent))

    def close(self, round: Round, peers: Sequence[Candidate], measure: bool) -> None:
        """Judge the others' models and merge those that are accepted."""
        judged = self.site.judge(
            own=self.own, before=self.model, peers=peers, round=round, state=self.rule_state
        )
        self.rule_state = judged.state
        by_peer = {candidate.peer: candidate for candidate in peers}
        accepted = [(by_peer[v.peer], v.weight) for v in judged.verdicts if v.accepted]
        merged_file = self.folder / "merged"
        merged = self.site.merge(
            own=self.own, accepted=accepted, round=round, out=merged_file, measure=measure
        )
        merged_file.replace(self.model)
        self.rounds.append(
            SimRound(round, self.trained, merged.metrics, judged.verdicts, merged.harm)
        )

    def close_alone(self, round: Round) -> None:
        shutil.copyfile(self.own, self.model)
        self.rounds.append(SimRound(round, self.trained, self.trained, ()))


def simulate(spec: Spec, progress: Progress = lambda done, total: None) -> SimResult:
    """Run all rounds; `progress` counts the rounds of single sites."""
    total = spec.rounds * len(spec.sites)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        seats = take_seats(spec, Path(folder))
        for number in range(spec.rounds):
            round = Round(number)
            measure = number == spec.rounds - 1 or not spec.final_only
            sent = []
            for place, (name, seat) in enumerate(seats.items(), start=1):
                sent.append(seat.train(name, round, measure))
                progress(number * len(seats) + place, total)
            for name, seat in seats.items():
                if spec.rule.alone:
                    seat.close_alone(round)
                else:
                    seat.close(round, [one for one in sent if one.peer != name], measure)
        update_bytes = Path(sent[0].path).stat().st_size
        return SimResult({name: seat.rounds for name, seat in seats.items()}, update_bytes)


def take_seats(spec: Spec, folder: Path) -> dict[PeerName, Seat]:
    from lightyear_node.worker.site import Site
    from lightyear_node.worker.task import build_task

    seats = {}
    for index, name in enumerate(sorted(spec.sites)):
        context = {
            "site_name": name,
            "site_index": index,
            "site_count": len(spec.sites),
            "seed": spec.seed,
        }
        task = build_task(spec.task.entry, spec.task.args, context)
        malfunction = spec.malfunctions.get(name)
        site = Site(
            task,
            name=name,
            seed=spec.seed,
            rule=spec.rule,
            rounds=spec.rounds,
            exchange=spec.exchange,
            malfunction=malfunction,
            tolerant=True,
        )
        seat = Seat(site, folder / name)
        seat.folder.mkdir()
        site.write_initial(seat.model)
        seats[name] = seat
    return seats


def _digest(path: Path) -> Digest:
    from lightyear_node.store import hash_file

    return hash_file(path)[0]


def simulate_apart(
    specs: Sequence[Spec], progress: Progress = lambda done, total: None
) -> list[SimResult]:
    """The same in a child process, so that its memory is free again when this returns."""
    with Apart(specs) as apart:
        return apart.results(progress)


class Apart:
    """Simulations in a child process, which ends with the context.

    It begins at once and needs nobody until its results are wanted.  With `yielding` it leaves the
    cores to whatever else runs.
    """

    def __init__(self, specs: Sequence[Spec], *, yielding: bool = False) -> None:
        # Ours, not the child's: it may be ended before it can clear up.
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX)
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, *(["--yielding"] if yielding else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**package_environment(), "TMPDIR": self._folder.name},
            # Ctrl-C at the terminal is for us; we end the child.
            start_new_session=True,
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `results` says why it is gone
            self._child.stdin.write(json.dumps([spec.to_plain() for spec in specs]))
            self._child.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._child.stdout is not None
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()
        self._folder.cleanup()

    def results(self, progress: Progress = lambda done, total: None) -> list[SimResult]:
        """One for each spec; blocks until the last is there."""
        assert self._child.stdout is not None
        answer: dict[str, Any] = {}
        for line in self._child.stdout:
            answer = json.loads(line)
            if "progress" in answer:
                progress(*answer["progress"])
        code = self._child.wait()
        if "error" in answer:
            kind = ConfigError if answer["error"] == "config" else LabError
            raise kind(answer["message"], hint=answer["hint"])
        if "ok" not in answer:
            raise LabError(f"the simulation ended with exit code {code}")
        return [SimResult.of(plain) for plain in answer["ok"]]


def answer_jobs(
    jobs: Sequence[Any],
    answers: TextIO,
    run: Callable[[Any, Progress], Any],
    steps: Callable[[Any], int],
) -> None:
    """The child's side: one line of JSON for every step, and one for the end.

    `run` does one job, of which `steps` tells the length.
    """

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")

    results = []
    try:
        import torch

        # The models of a trial are small: more threads would only wait for each other.
        torch.set_num_threads(1)
        # As the worker has it: a simulation must give the same bits.
        torch.set_flush_denormal(True)
        total, before = sum(map(steps, jobs)), 0
        for job in jobs:

            def step(done: int, of: int, before: int = before) -> None:
                say(progress=[before + done, total])

            results.append(run(job, step))
            before += steps(job)
    except LightyearError as problem:
        kind = "config" if isinstance(problem, ConfigError) else "failed"
        say(error=kind, message=str(problem), hint=problem.hint)
        sys.exit(problem.exit_code)
    say(ok=results)


def answer_all(jobs: Sequence[Any], answers: TextIO) -> None:
    """Simulate each spec, as plain values."""
    answer_jobs(
        jobs,
        answers,
        lambda job, progress: simulate(Spec.of(job), progress).to_plain(),
        lambda job: job["rounds"] * len(job["sites"]),
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    # Whatever the task prints must not come between the answers.
    os.dup2(2, 1)
    if "--yielding" in sys.argv[1:]:
        os.nice(YIELDING_NICE)
    answer_all(json.load(sys.stdin), answers)


if __name__ == "__main__":
    main()
