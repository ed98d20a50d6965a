"""Simulated federations: the worker's own code without the exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from lightyear_node.config.federation import ALONE, ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import ConfigError
from lightyear_node.lab.federation import LabError, site_names
from lightyear_node.lab.jobs import Job, row_of
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_process import SimulationProcess, simulate_in_child
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.learning.rules import Judgement
from lightyear_node.types import Reason, Round, Verdict
from lightyear_node.worker.job_types import CandidateFile, MergeResult, TrainedUpdate

pytest.importorskip("sklearn")

NAMES = site_names(3)
BAD = NAMES[-1]
SPEC = SimulationSpec(
    sites=NAMES,
    rounds=2,
    seed=7,
    rule=RuleConfig(),
    task=TaskConfig(args={"epochs": 1, "batch_size": 64}),
    malfunctions={BAD: MalfunctionConfig(kind="sfa")},
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def under(rule: str) -> SimulationSpec:
    return replace(SPEC, rule=RuleConfig(name=rule))


def verdicts_on_bad(result: SimulationResult) -> list[tuple[bool, Reason]]:
    return [
        (verdict.accepted, verdict.reason)
        for rounds in result.sites.values()
        for one in rounds
        for verdict in one.verdicts
        if verdict.peer == BAD
    ]


class RecordingSite:
    """A site whose models are texts of what it was given."""

    models: ClassVar[list[str]] = []
    """All merged models, in order."""

    def __init__(self, task: str, **settings: object) -> None:
        self.task = task

    def write_initial(self, path: Path) -> None:
        path.write_text("start")

    def train(
        self, *, base: Path, carry: Path | None, round: int, own: Path, outgoing: Path,
        carry_out: Path, measure: bool,
    ) -> TrainedUpdate:  # fmt: skip
        carried = carry.read_text() if carry else "nothing"
        own.write_text(f"{self.task}{round}({base.read_text()}, {carried})")
        carry_out.write_text(f"carry{round}")
        return TrainedUpdate(samples=1, metrics={"accuracy": float(round)})

    def judge(
        self, *, own: Path, before: Path, peers: Sequence[CandidateFile], round: int,
        state: Mapping[str, object],
    ) -> Judgement:  # fmt: skip
        assert own.read_text().startswith(f"{self.task}{round}({before.read_text()}, ")
        assert state == ({"judged": round - 1} if round else {})
        verdicts = [Verdict(peer.peer, True, Reason.OK, weight=0.5) for peer in peers]
        return Judgement(tuple(verdicts), {"judged": round})

    def merge(
        self, *, own: Path, accepted: Sequence[tuple[CandidateFile, float]], round: int, out: Path,
        worth: None, measure: bool,
    ) -> MergeResult:  # fmt: skip
        theirs = "".join(f" + {w}·{Path(peer.path).read_text()}" for peer, w in accepted)
        out.write_text(own.read_text() + theirs)
        self.models.append(out.read_text())
        return MergeResult(metrics={"accuracy": 10.0 + round})


def test_files_are_passed_on_as_in_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Mapping[str, object]] = []

    def build(entry: str, builder: object, arguments: object, context: Mapping[str, object]) -> str:
        contexts.append(context)
        return str(context["site_name"])[-1].upper()

    monkeypatch.setattr(RecordingSite, "models", [])
    monkeypatch.setattr("lightyear_node.lab.faulty_site.FaultySite", RecordingSite)
    monkeypatch.setattr("lightyear_node.worker.task.build_task", build)
    spec = replace(SPEC, sites=NAMES[:2], malfunctions={})
    a, b = simulate(spec).sites.values()
    assert contexts == [
        {"site_name": name, "site_index": index, "site_count": 2, "seed": 7}
        for index, name in enumerate(NAMES[:2])
    ]
    a0, b0 = "A0(start, nothing)", "B0(start, nothing)"
    a1, b1 = f"A1({a0} + 0.5·{b0}, carry0)", f"B1({b0} + 0.5·{a0}, carry0)"
    assert RecordingSite.models == [
        f"{a0} + 0.5·{b0}",
        f"{b0} + 0.5·{a0}",
        f"{a1} + 0.5·{b1}",
        f"{b1} + 0.5·{a1}",
    ]
    for rounds in (a, b):
        assert [(one.local, one.merged) for one in rounds] == [
            ({"accuracy": 0.0}, {"accuracy": 10.0}),
            ({"accuracy": 1.0}, {"accuracy": 11.0}),
        ]


def test_the_guard_rejects_updates_that_averaging_accepts() -> None:
    steps: list[tuple[int, int]] = []
    guarded = simulate(SPEC, lambda done, total: steps.append((done, total)))
    averaged = simulate(under("fedavg"))
    # Judged once per round by each of the two others.
    assert verdicts_on_bad(guarded) == [(False, Reason.TOO_FAR)] * 4
    assert verdicts_on_bad(averaged) == [(True, Reason.OK)] * 4
    assert steps == [(done, 6) for done in range(1, 7)]


def test_final_only_measures_the_last_round() -> None:
    every, last = simulate(SPEC), simulate(replace(SPEC, final_only=True))
    for name, rounds in last.sites.items():
        assert [bool(one.local or one.merged) for one in rounds] == [False, True]
        assert rounds[-1] == every.sites[name][-1]
    assert last.update_bytes == every.update_bytes > 4 * 87_178  # parameters of the digits' network
    assert SimulationResult.of(last.to_plain()) == last
    assert SimulationSpec.of(replace(SPEC, final_only=True).to_plain()) == replace(
        SPEC, final_only=True
    )


def test_bfloat16_halves_the_update_and_changes_only_the_merged_model() -> None:
    whole = replace(under("fedavg"), rounds=1, malfunctions={})
    short = replace(whole, exchange=ExchangeConfig(dtype="bfloat16"))
    plain, rounded = simulate(whole), simulate(short)
    assert rounded.update_bytes == pytest.approx(plain.update_bytes / 2, rel=0.02)
    for name in NAMES:
        before, after = plain.sites[name][0], rounded.sites[name][0]
        assert before.local == after.local
        assert before.merged["loss"] != after.merged["loss"]
        assert before.merged["loss"] == pytest.approx(after.merged["loss"], rel=0.02)
    assert SimulationSpec.of(short.to_plain()) == short


def test_a_malfunction_corrupts_only_the_outgoing_update() -> None:
    clean = simulate(replace(SPEC, rounds=1, malfunctions={}))
    broken = simulate(replace(SPEC, rounds=1))
    # The bad site trains, judges and merges as before; the others receive another model.
    assert clean.sites[BAD] == broken.sites[BAD]
    seen = {
        verdict.digest
        for result in (clean, broken)
        for verdict in result.sites[NAMES[0]][0].verdicts
        if verdict.peer == BAD
    }
    assert len(seen) == 2


def rounds_of(spec: SimulationSpec) -> dict[str, list[bool]]:
    return {
        name: [spec.takes_part(name, Round(number)) for number in range(spec.rounds)]
        for name in spec.sites
    }


def test_sites_take_part_with_the_given_probability_by_seed() -> None:
    many = replace(SPEC, rounds=1000, participation=0.3)
    drawn = rounds_of(many)
    for name in NAMES:
        assert 250 < sum(drawn[name]) < 350
    # Independent of each other: together as often as chance has it.
    both = sum(a and b for a, b in zip(drawn[NAMES[0]], drawn[NAMES[1]], strict=True))
    assert 60 < both < 125
    assert rounds_of(many) == drawn != rounds_of(replace(many, seed=8))
    assert all(all(one) for one in rounds_of(replace(many, participation=1.0)).values())


@pytest.mark.parametrize("rule", ["fedavg", "krum", "ditto", "lightyear", ALONE])
def test_a_site_that_does_not_take_part_keeps_its_model_and_sends_nothing(rule: str) -> None:
    spec = replace(under(rule), rounds=6, participation=0.5)
    task = TaskConfig(entry="tests.support.tiny_task:build")
    spec = replace(spec, task=task, malfunctions={})
    drawn = rounds_of(spec)
    together = [[name for name in NAMES if drawn[name][number]] for number in range(6)]
    # The seed gives rounds with all, with some and with one.
    assert {1, 2, 3} <= {len(names) for names in together}
    result = simulate(spec)
    for name, rounds in result.sites.items():
        assert [one.takes_part for one in rounds] == drawn[name]
        for one in rounds:
            others = [peer for peer in together[one.round] if peer != name]
            judged = one.takes_part and rule != ALONE
            assert [verdict.peer for verdict in one.verdicts] == (others if judged else [])
            assert {"loss", "accuracy"} <= one.merged.keys()
            if not one.takes_part:
                assert one.local == one.merged
                if one.round > 0:
                    assert one.merged == rounds[one.round - 1].merged
    last = simulate(replace(spec, final_only=True))
    for name, rounds in last.sites.items():
        assert rounds[-1].merged == result.sites[name][-1].merged
    assert SimulationResult.of(json.loads(json.dumps(result.to_plain()))) == result
    assert SimulationSpec.of(spec.to_plain()) == spec


def test_a_federation_in_which_no_site_takes_part_measures_the_initial_model() -> None:
    result = simulate(replace(SPEC, participation=1e-9, rounds=1))
    assert result.update_bytes == 0
    assert all(one.merged and not one.takes_part for [one] in result.sites.values())


def test_alone_there_are_no_verdicts_and_the_trained_model_is_kept() -> None:
    result = simulate(under(ALONE))
    for rounds in result.sites.values():
        assert [one.round for one in rounds] == [0, 1]
        assert all(not one.verdicts and one.merged == one.local for one in rounds)
    # The second round continues from the first.
    first, second = (one.local["loss"] for one in result.sites[NAMES[0]])
    assert second < first


def test_merging_changes_results_and_equal_seeds_repeat_them() -> None:
    alone, averaged = simulate(under(ALONE)), simulate(under("fedavg"))
    # Round 0 starts from the same model everywhere; its merge changes round 1.
    for name in NAMES:
        assert alone.sites[name][0].local == averaged.sites[name][0].local
        assert alone.sites[name][1].local != averaged.sites[name][1].local
    assert simulate(under("fedavg")) == averaged
    other = simulate(replace(under("fedavg"), seed=8))
    assert other.final("accuracy") != averaged.final("accuracy")


def test_a_child_process_gives_the_same_results() -> None:
    steps: list[tuple[int, int]] = []
    short = replace(SPEC, rounds=1)
    specs = [short, replace(short, rule=RuleConfig(name=ALONE))]
    results = simulate_in_child(specs, lambda done, total: steps.append((done, total)))
    assert results == [SimulationResult.of(simulate(spec).to_plain()) for spec in specs]
    assert steps == [(done, 6) for done in range(1, 7)]


def test_an_error_in_the_child_is_raised_in_the_caller() -> None:
    wrong = replace(SPEC, task=TaskConfig(args={"no_such_argument": 1}))
    with pytest.raises(ConfigError, match="takes no argument `no_such_argument`"):
        simulate_in_child([wrong])


def test_a_killed_child_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps: list[int] = []

    def leave(done: int, total: int) -> None:
        steps.append(done)
        assert list(tmp_path.glob("*/*/site-*"))
        raise KeyboardInterrupt

    with SimulationProcess([replace(SPEC, rounds=1000)]) as process:
        # Just after the fork a process has no name of its own yet; but it is the only child.
        [child] = psutil.Process().children()
        child.kill()
        with pytest.raises(LabError, match="exit code -9"):
            process.results()
    with pytest.raises(KeyboardInterrupt):
        simulate_in_child([replace(SPEC, rounds=1000)], leave)
    assert steps == [1]
    assert not psutil.Process().children()
    assert list(tmp_path.iterdir()) == []


def test_updates_dropped_by_the_merge_check_are_in_results_and_rows() -> None:
    job = Job(
        grid="main",
        task="digits",
        entry=TaskConfig(),
        metric="accuracy",
        clients=3,
        rounds=2,
        seed=7,
        rule=RuleConfig(guard=False, harm_max=0.1),
        label="lightyear",
        malfunction=MalfunctionConfig(kind="head-flip"),
        bad=1,
    )
    result = simulate(job.spec())
    assert SimulationResult.of(json.loads(json.dumps(result.to_plain()))) == result
    [bad] = job.spec().malfunctions
    honest = [rounds for name, rounds in result.sites.items() if name != bad]
    harms = [one.harm for rounds in honest for one in rounds]
    assert all(harm is not None for harm in harms)
    # The worst first; an honest peer may have to go, too.
    assert [harm.dropped[0] for harm in harms if harm and harm.dropped] == [bad, bad]
    merges = row_of("tiny", job, result, 1.0)["merges"]
    assert (merges["measured"], merges["malfunctioning"]) == (6, 2)
    off = replace(job, rule=RuleConfig(guard=False))
    assert "merges" not in row_of("tiny", off, simulate(off.spec()), 1.0)
