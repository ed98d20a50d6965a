"""Simulated federations: the worker's own learning, without the exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from lightyear_node.config.agreement import ALONE, ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction, TaskEntry
from lightyear_node.errors import ConfigError
from lightyear_node.lab.federation import LabError, site_names
from lightyear_node.lab.jobs import Job, row_of
from lightyear_node.lab.simulate import Apart, SimResult, Spec, simulate, simulate_apart
from lightyear_node.learning.rules import Judgement
from lightyear_node.records import Reason, Verdict
from lightyear_node.worker.jobs import Candidate, Merged, Trained

pytest.importorskip("sklearn")

NAMES = site_names(3)
BAD = NAMES[-1]
SPEC = Spec(
    sites=NAMES,
    rounds=2,
    seed=7,
    rule=RuleTerms(),
    task=TaskEntry(args={"epochs": 1, "batch_size": 64}),
    malfunctions={BAD: Malfunction(kind="sfa")},
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def under(rule: str) -> Spec:
    return replace(SPEC, rule=RuleTerms(name=rule))


def verdicts_on_bad(result: SimResult) -> list[tuple[bool, Reason]]:
    return [
        (verdict.accepted, verdict.reason)
        for rounds in result.sites.values()
        for one in rounds
        for verdict in one.verdicts
        if verdict.peer == BAD
    ]


class Scribe:
    """A site that writes down what it was given instead of learning from it."""

    models: ClassVar[list[str]] = []
    """All that were merged, in turn."""

    def __init__(self, task: str, **terms: object) -> None:
        self.task = task

    def write_initial(self, path: Path) -> None:
        path.write_text("start")

    def train(
        self, *, base: Path, carry: Path | None, round: int, own: Path, outgoing: Path,
        carry_out: Path, measure: bool,
    ) -> Trained:  # fmt: skip
        carried = carry.read_text() if carry else "nothing"
        own.write_text(f"{self.task}{round}({base.read_text()}, {carried})")
        carry_out.write_text(f"carry{round}")
        return Trained(samples=1, metrics={"accuracy": float(round)})

    def judge(
        self, *, own: Path, before: Path, peers: Sequence[Candidate], round: int,
        state: Mapping[str, object],
    ) -> Judgement:  # fmt: skip
        assert own.read_text().startswith(f"{self.task}{round}({before.read_text()}, ")
        assert state == ({"judged": round - 1} if round else {})
        verdicts = [Verdict(peer.peer, True, Reason.OK, weight=0.5) for peer in peers]
        return Judgement(tuple(verdicts), {"judged": round})

    def merge(
        self, *, own: Path, accepted: Sequence[tuple[Candidate, float]], round: int, out: Path,
        measure: bool,
    ) -> Merged:  # fmt: skip
        theirs = "".join(f" + {w}·{Path(peer.path).read_text()}" for peer, w in accepted)
        out.write_text(own.read_text() + theirs)
        self.models.append(out.read_text())
        return Merged(metrics={"accuracy": 10.0 + round})


def test_every_file_goes_where_the_node_would_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Mapping[str, object]] = []

    def build(entry: str, arguments: object, context: Mapping[str, object]) -> str:
        contexts.append(context)
        return str(context["site_name"])[-1].upper()

    monkeypatch.setattr(Scribe, "models", [])
    monkeypatch.setattr("lightyear_node.worker.site.Site", Scribe)
    monkeypatch.setattr("lightyear_node.worker.task.build_task", build)
    spec = replace(SPEC, sites=NAMES[:2], malfunctions={})
    a, b = simulate(spec).sites.values()
    assert contexts == [
        {"site_name": name, "site_index": index, "site_count": 2, "seed": 7}
        for index, name in enumerate(NAMES[:2])
    ]
    a0, b0 = "A0(start, nothing)", "B0(start, nothing)"
    a1, b1 = f"A1({a0} + 0.5·{b0}, carry0)", f"B1({b0} + 0.5·{a0}, carry0)"
    assert Scribe.models == [
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


def test_the_guard_refuses_what_averaging_takes_in() -> None:
    steps: list[tuple[int, int]] = []
    guarded = simulate(SPEC, lambda done, total: steps.append((done, total)))
    averaged = simulate(under("fedavg"))
    # Judged once a round by each of the two others.
    assert verdicts_on_bad(guarded) == [(False, Reason.TOO_FAR)] * 4
    assert verdicts_on_bad(averaged) == [(True, Reason.OK)] * 4
    assert steps == [(done, 6) for done in range(1, 7)]


def test_metrics_of_the_last_round_only() -> None:
    every, last = simulate(SPEC), simulate(replace(SPEC, final_only=True))
    for name, rounds in last.sites.items():
        assert [bool(one.local or one.merged) for one in rounds] == [False, True]
        assert rounds[-1] == every.sites[name][-1]
    assert last.update_bytes == every.update_bytes > 4 * 87_178  # parameters of the digits' network
    assert SimResult.of(last.to_plain()) == last
    assert Spec.of(replace(SPEC, final_only=True).to_plain()) == replace(SPEC, final_only=True)


def test_rounding_halves_what_is_sent_and_changes_only_what_is_merged() -> None:
    whole = replace(under("fedavg"), rounds=1, malfunctions={})
    short = replace(whole, exchange=ExchangeTerms(dtype="bfloat16"))
    plain, rounded = simulate(whole), simulate(short)
    assert rounded.update_bytes == pytest.approx(plain.update_bytes / 2, rel=0.02)
    for name in NAMES:
        before, after = plain.sites[name][0], rounded.sites[name][0]
        assert before.local == after.local
        assert before.merged["loss"] != after.merged["loss"]
        assert before.merged["loss"] == pytest.approx(after.merged["loss"], rel=0.02)
    assert Spec.of(short.to_plain()) == short


def test_the_malfunction_spoils_only_what_is_sent() -> None:
    clean = simulate(replace(SPEC, rounds=1, malfunctions={}))
    broken = simulate(replace(SPEC, rounds=1))
    # The broken site itself trains, judges and merges as before; the others see another model.
    assert clean.sites[BAD] == broken.sites[BAD]
    seen = {
        verdict.digest
        for result in (clean, broken)
        for verdict in result.sites[NAMES[0]][0].verdicts
        if verdict.peer == BAD
    }
    assert len(seen) == 2


def test_alone_nobody_is_judged_and_the_trained_model_is_kept() -> None:
    result = simulate(under(ALONE))
    for rounds in result.sites.values():
        assert [one.round for one in rounds] == [0, 1]
        assert all(not one.verdicts and one.merged == one.local for one in rounds)
    # The second round goes on from the first, not from the start again.
    first, second = (one.local["loss"] for one in result.sites[NAMES[0]])
    assert second < first


def test_exchange_makes_a_difference_and_equal_seeds_make_none() -> None:
    alone, averaged = simulate(under(ALONE)), simulate(under("fedavg"))
    # Round 0 starts from the common model everywhere; what is merged then changes round 1.
    for name in NAMES:
        assert alone.sites[name][0].local == averaged.sites[name][0].local
        assert alone.sites[name][1].local != averaged.sites[name][1].local
    assert simulate(under("fedavg")) == averaged
    other = simulate(replace(under("fedavg"), seed=8))
    assert other.final("accuracy") != averaged.final("accuracy")


def test_a_child_process_finds_the_same() -> None:
    steps: list[tuple[int, int]] = []
    short = replace(SPEC, rounds=1)
    specs = [short, replace(short, rule=RuleTerms(name=ALONE))]
    apart = simulate_apart(specs, lambda done, total: steps.append((done, total)))
    assert apart == [SimResult.of(simulate(spec).to_plain()) for spec in specs]
    assert steps == [(done, 6) for done in range(1, 7)]


def test_what_a_child_complains_about_reaches_the_caller() -> None:
    wrong = replace(SPEC, task=TaskEntry(args={"no_such_argument": 1}))
    with pytest.raises(ConfigError, match="takes no argument `no_such_argument`"):
        simulate_apart([wrong])


def test_a_child_that_dies_is_an_error_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    steps: list[int] = []

    def leave(done: int, total: int) -> None:
        steps.append(done)
        assert list(tmp_path.glob("*/*/site-*"))
        raise KeyboardInterrupt

    with Apart([replace(SPEC, rounds=1000)]) as apart:
        # Newly made, a process may not have its own name yet; but it is the only child.
        [child] = psutil.Process().children()
        child.kill()
        with pytest.raises(LabError, match="exit code -9"):
            apart.results()
    with pytest.raises(KeyboardInterrupt):
        simulate_apart([replace(SPEC, rounds=1000)], leave)
    assert steps == [1]
    assert not psutil.Process().children()
    assert list(tmp_path.iterdir()) == []


def test_who_is_left_out_of_merges_is_told_in_results_and_in_rows() -> None:
    job = Job(
        grid="main",
        task="digits",
        entry=TaskEntry(),
        metric="accuracy",
        clients=3,
        rounds=2,
        seed=7,
        rule=RuleTerms(guard=False, harm_max=0.1),
        label="lightyear",
        malfunction=Malfunction(kind="head-flip"),
        bad=1,
    )
    result = simulate(job.spec())
    assert SimResult.of(json.loads(json.dumps(result.to_plain()))) == result
    [bad] = job.spec().malfunctions
    honest = [rounds for name, rounds in result.sites.items() if name != bad]
    harms = [one.harm for rounds in honest for one in rounds]
    assert all(harm is not None for harm in harms)
    assert [harm.dropped for harm in harms if harm and harm.dropped] == [(bad,), (bad,)]
    merges = row_of("tiny", job, result, 1.0)["merges"]
    assert (merges["measured"], merges["malfunctioning"]) == (6, 2)
    off = replace(job, rule=RuleTerms(guard=False))
    assert "merges" not in row_of("tiny", off, simulate(off.spec()), 1.0)
