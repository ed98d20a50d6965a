"""Suite files: which are refused and how, and the jobs of a valid one."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import ALONE
from lightyear_node.errors import ConfigError
from lightyear_node.lab.jobs import (
    Job,
    bad_order,
    client_names,
    expand,
    expand_acceptance,
    malfunctions_of,
)
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.suite import NONE, RULES, RULES_GROUP, Suite, load_suite
from tests.support.paths import DOCS

RESULTS = DOCS / "results"
PUBLISHED = sorted(file.parent for file in RESULTS.glob("*/manifest.json"))
GRID: dict[str, Any] = {
    "name": "main",
    "task": "digits",
    "clients": 4,
    "rounds": 2,
    "rules": ["local", "fedavg", {"name": "lightyear", "guard": False, "label": "LIGHTYEAR"}],
    "malfunctions": ["none", "sfa", {"kind": "ana", "scale": 50}],
    "bad": [1, 3],
    "seeds": [0, 1],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def suite_from(document: object) -> Suite:
    Path("suite.yaml").write_text(json.dumps(document, indent=1))  # JSON is YAML
    return load_suite(Path("suite.yaml"))


def suite_with(**changes: object) -> Suite:
    grid = {key: value for key, value in (GRID | changes).items() if value is not ...}
    return suite_from({"name": "tiny", "grids": [grid]})


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        suite_with(**changes)
    return str(caught.value)


def labels_of(jobs: list[Job]) -> list[tuple[str, str, int, int]]:
    return [
        (job.label, job.malfunction.kind if job.malfunction else NONE, job.bad, job.seed)
        for job in jobs
    ]


@pytest.mark.usefixtures("folder")
class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"sedes": [1]}, "unknown key `sedes`: did you mean `seeds`?"),
            ({"ruls": ["fedavg"], "rules": ...}, "unknown key `ruls`: did you mean `rules`?"),
            ({"rules": ...}, "`grids.0.rules` is missing"),
            ({"task": "digit"}, "there is no built-in task `digit`: did you mean `digits`?"),
            ({"task": "my module:f"}, "pattern"),
            ({"rules": ["fedavgg"]}, "there is no rule `fedavgg`: did you mean `fedavg`?"),
            ({"rules": [{"name": "lightyear", "gama": 1}]}, "did you mean `gamma`?"),
            ({"rules": [{"name": "lightyear", "tau": 2}]}, "`grids.0.rules.0.tau`"),
            ({"rules": [{"name": "krum", "tau": 0.5}]}, "stand under `options`"),
            ({"rules": [{"tau": 0.5}]}, "a mapping with `name`"),
            ({"rules": [3]}, "a rule is a name"),
            ({"rules": []}, "at least 1 item"),
            ({"malfunctions": ["sfaa"]}, "there is no malfunction `sfaa`: did you mean `sfa`?"),
            ({"malfunctions": []}, "at least 1 item"),
            ({"seeds": []}, "at least 1 item"),
            ({"seeds": [-1]}, "greater than or equal to 0"),
            ({"bad": [1, 4]}, "4 of 4 clients cannot malfunction"),
            ({"bad": [0]}, "0 of 4 clients cannot malfunction"),
            ({"bad": []}, "`bad` is empty: how many clients have the malfunction sfa?"),
            ({"clients": 1}, "greater than or equal to 2"),
            ({"rounds": 0}, "greater than or equal to 1"),
            ({"args": {"data": "/somewhere"}}, "with --data or LIGHTYEAR_DATA"),
            ({"task": "own:build", "metric": ...}, "`grids.0.metric` is missing"),
            ({"task": "own:build", "metric": "a", "rounds": ...}, "`grids.0.rounds` is missing"),
            ({"partition": "dirichlt"}, "`grids.0.partition.kind`: Input should be 'iid'"),
            ({"partition": {"kind": "iid", "alpha": 1}}, "partition iid has no `alpha`"),
            ({"partition": {"kind": "iid", "sed": 1}}, "unknown key `sed`: did you mean `seed`?"),
            ({"participation": 0}, "greater than 0"),
            ({"participation": 1.5}, "less than or equal to 1"),
            ({"malfunctions": [{"kind": "sfa", "options": {"a": 1}}]}, "sfa has no option `a`"),
            ({"name": "Main grid"}, "a name is lower-case letters"),
        ],
    )
    def test_an_invalid_grid_is_refused_with_a_helpful_message(
        self, changes: dict[str, object], words: str
    ) -> None:
        assert words in refusal(**changes)

    def test_one_label_for_two_rules_is_refused(self) -> None:
        rules = [{"name": "lightyear", "gamma": gamma, "label": "X"} for gamma in (0.5, 0.9)]
        assert "two different rules are called `X`" in refusal(rules=rules)
        # Without a label their terms distinguish them.
        unnamed = [{"name": "lightyear", "gamma": gamma} for gamma in (0.5, 0.9)]
        assert len(expand(suite_with(rules=unnamed, malfunctions=["none"], seeds=[0]))) == 2

    def test_an_error_names_its_line(self) -> None:
        grid = ["- name: main", "  task: digits", "  rules: [local]", "  seedz: [1]"]
        text = "\n".join(["name: tiny", "grids:", *grid, ""])
        Path("suite.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"suite\.yaml:6: unknown key `seedz`"):
            load_suite(Path("suite.yaml"))

    @pytest.mark.parametrize(
        ("document", "words"),
        [
            ({"name": "tiny"}, "nothing to run"),
            ({"name": "tiny", "grids": [GRID, GRID]}, "two grids are called `main`"),
            ({"grids": [GRID]}, "`name` is missing"),
            ({"name": "tiny", "acceptance": [{"task": "digits"}]}, "`acceptance.0.rounds`"),
        ],
    )
    def test_an_invalid_suite_is_refused(self, document: object, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            suite_from(document)
        assert words in str(caught.value)

    def test_a_rule_of_an_installed_package_is_known(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "there is no rule `mine`" in refusal(rules=["mine"])
        metadata = folder / "other_rules-0.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: s\nVersion: 0.1\n")
        # The module does not exist: reading a suite imports nothing.
        points = f"[{RULES_GROUP}]\nmine = nowhere:rule\n"
        (metadata / "entry_points.txt").write_text(points)
        monkeypatch.syspath_prepend(str(folder))
        [rule] = suite_with(rules=[{"name": "mine", "options": {"top": None}}]).grids[0].rules
        assert (rule.label, rule.terms.options) == ("mine", {"top": None})
        assert "did you mean `mine`?" in refusal(rules=["mien"])

    def test_a_missing_file_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"elsewhere\.yaml: no such file"):
            load_suite(Path("elsewhere.yaml"))


@pytest.mark.usefixtures("folder")
class TestExpanded:
    def test_local_and_clean_runs_are_jobs_once_the_others_per_count(self) -> None:
        jobs = expand(suite_with())
        # Per seed: local; two rules clean; two rules × two malfunctions × two counts.
        assert len(jobs) == 2 * (1 + 2 + 2 * 2 * 2)
        counted = Counter(labels_of(jobs))
        assert set(counted.values()) == {1}
        for seed in (0, 1):
            assert [one for one in counted if one[0] == "local" and one[3] == seed] == [
                ("local", NONE, 0, seed)
            ]
            for label in ("fedavg", "LIGHTYEAR"):
                assert counted[label, NONE, 0, seed] == 1
                for kind in ("sfa", "ana"):
                    assert counted[label, kind, 1, seed] == counted[label, kind, 3, seed] == 1

    def test_without_none_only_local_runs_clean(self) -> None:
        jobs = expand(suite_with(malfunctions=["sfa"], bad=[2], seeds=[5]))
        assert labels_of(jobs) == [
            ("local", NONE, 0, 5),
            ("fedavg", "sfa", 2, 5),
            ("LIGHTYEAR", "sfa", 2, 5),
        ]

    def test_repetitions_are_dropped(self) -> None:
        once = suite_with(rules=["fedavg"], malfunctions=["none", "sfa"], bad=[1], seeds=[0])
        doubled = suite_with(
            rules=["fedavg"] * 2, malfunctions=["none", "sfa"] * 2, bad=[1, 1], seeds=[0, 0]
        )
        assert expand(doubled) == expand(once)
        assert len(expand(once)) == 2

    def test_the_first_seed_is_complete_first_and_begins_with_the_references(self) -> None:
        jobs = expand(suite_with())
        assert [job.seed for job in jobs] == [0] * 11 + [1] * 11
        assert labels_of(jobs)[:4] == [
            ("local", NONE, 0, 0),
            ("fedavg", NONE, 0, 0),
            ("LIGHTYEAR", NONE, 0, 0),
            ("fedavg", "sfa", 1, 0),
        ]

    def test_equal_jobs_of_two_grids_share_the_work_but_not_the_key(self) -> None:
        grid = GRID | {"rules": ["fedavg"], "malfunctions": ["none"], "seeds": [0]}
        one, two = expand(suite_from({"name": "t", "grids": [grid, grid | {"name": "again"}]}))
        assert (one.work, one.grid, two.grid) == (two.work, "main", "again")
        assert one.key != two.key

    @pytest.mark.parametrize(
        "change",
        [
            {"rounds": 3},
            {"clients": 5},
            {"seeds": [1]},
            {"args": {"lr": 0.1}},
            {"rules": [{"name": "fedavg", "options": {"weighted": False}}]},
            {"malfunctions": [{"kind": "sfa", "scale": 2.0}]},
            {"malfunctions": ["random"]},
            {"bad": [2]},
        ],
    )
    def test_a_different_computation_has_another_key(self, change: dict[str, Any]) -> None:
        plain: dict[str, Any] = {"rules": ["fedavg"], "malfunctions": ["sfa"], "bad": [1]}
        [before] = expand(suite_with(**plain, seeds=[0]))
        [after] = expand(suite_with(**({**plain, "seeds": [0]} | change)))
        assert before.work != after.work
        assert before.key != after.key
        assert len(before.key) == 16

    def test_keys_do_not_depend_on_order_or_suite_name(self) -> None:
        """Finished results are found by their keys, also by later versions."""
        reordered = dict(reversed(list(GRID.items())))
        assert {job.key for job in expand(suite_with())} == {
            job.key for job in expand(suite_from({"name": "other", "grids": [reordered]}))
        }

    @pytest.mark.parametrize("published", PUBLISHED, ids=lambda folder: folder.name)
    def test_published_results_have_the_keys_of_their_suites(self, published: Path) -> None:
        wanted = {job.key for job in expand(load_suite(published / "suite.yaml"))}
        lines = (published / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert {row["key"] for row in rows} == wanted
        assert not [row for row in rows if "failed" in row]

    @pytest.mark.parametrize("published", ["merge-check", "readings", "worst-case"])
    def test_published_results_name_the_digest_of_their_suite(self, published: str) -> None:
        """Older results were made before comments and defaults in their suites were changed."""
        suite = (RESULTS / published / "suite.yaml").read_bytes()
        manifest = json.loads((RESULTS / published / "manifest.json").read_text())
        assert manifest["suite_sha256"] == hashlib.sha256(suite).hexdigest()

    def test_the_merge_check_is_part_of_the_work_unless_it_is_the_default(self) -> None:
        def work(**terms: object) -> str:
            rule = {"name": "lightyear", **terms}
            [job] = expand(suite_with(rules=[rule], malfunctions=["none"], bad=[], seeds=[0]))
            return job.work

        assert work() == work(harm_max=0.1) != work(harm_max=0.2)
        assert work(harm_max=False) != work()
        assert work(guard=False) == work(guard=False, harm_max=False)
        assert work(guard=False) != work(guard=False, harm_max=0.1)

    def test_omitted_values_are_the_built_in_tasks_defaults(self) -> None:
        defaults = {"clients": ..., "rounds": ..., "seeds": ..., "bad": [4]}
        job = expand(suite_with(**defaults))[0]
        assert (job.clients, job.rounds, job.metric, job.seed) == (5, 8, "accuracy", 0)
        assert job.entry.entry == "lightyear_node.lab.tasks.digits:build"
        own = suite_with(task="my.module:build", metric="dice", args={"lr": 0.1})
        assert expand(own)[0].entry.model_dump() == {
            "entry": "my.module:build",
            "args": {"lr": 0.1},
        }

    def test_acceptance_blocks_become_one_job_per_seed(self) -> None:
        block = {"task": "digits", "clients": 3, "rounds": [0, 2], "seeds": [4, 5]}
        suite = suite_from({"name": "t", "acceptance": [block | {"malfunctions": ["none", "sfa"]}]})
        jobs = expand_acceptance(suite)
        assert [job.seed for job in jobs] == [4, 5]
        request = jobs[0].request()
        assert request["rounds"] == [0, 2]
        # Honest messages are always measured.
        assert [one["kind"] for one in request["malfunctions"]] == ["sfa"]
        assert len({job.key for job in jobs}) == 2

    def test_acceptance_is_measured_with_every_rule_of_its_block(self) -> None:
        block = {"task": "digits", "rounds": [0], "seeds": [4, 5]}
        softmax = {"name": "lightyear", "output": "softmax"}
        named = {**softmax, "unbiased": True, "label": "both"}
        rules = ["lightyear", softmax, named]
        [usual, _] = expand_acceptance(suite_from({"name": "t", "acceptance": [block]}))
        jobs = expand_acceptance(
            suite_from({"name": "t", "acceptance": [{**block, "rules": rules}]})
        )
        assert len({job.key for job in jobs}) == 6
        # Without `rules` or with the default one, finished measurements keep their keys.
        assert jobs[0].key == usual.key == "fd9300bbb167762d"
        rows = [job.labelled([{"round": 0}])[0] for job in jobs[:3]]
        assert [row.get("rule") for row in rows] == [None, "lightyear output=softmax", "both"]
        assert jobs[2].request()["rule"]["unbiased"]
        assert jobs[2].description() == "acceptance: digits, both, seed 4"


class TestBadSites:
    @pytest.mark.parametrize("seed", range(5))
    def test_the_set_of_k_is_part_of_the_set_of_k_plus_1(self, seed: int) -> None:
        order = bad_order(8, seed)
        assert sorted(order) == list(range(8))
        names = client_names(8)
        sets = [
            set(malfunctions_of(names, MalfunctionConfig(kind="sfa"), k, seed)) for k in range(9)
        ]
        assert [len(one) for one in sets] == list(range(9))
        assert all(smaller < larger for smaller, larger in itertools.pairwise(sets))

    def test_different_seeds_choose_different_sets(self) -> None:
        assert len({bad_order(8, seed) for seed in range(5)}) == 5

    @pytest.mark.usefixtures("folder")
    def test_all_rules_and_malfunctions_have_the_same_bad_sites(self) -> None:
        jobs = [job for job in expand(suite_with()) if job.bad == 3 and job.seed == 1]
        chosen = {frozenset(job.spec().malfunctions) for job in jobs}
        assert len(jobs) == 4
        assert len(chosen) == 1
        assert {one.kind for job in jobs for one in job.spec().malfunctions.values()} == {
            "sfa",
            "ana",
        }

    def test_names_sort_in_numeric_order(self) -> None:
        assert client_names(10)[-1] == "client-9"
        assert client_names(11)[:2] == ["client-00", "client-01"]
        for count in (2, 10, 11, 64):
            assert client_names(count) == sorted(client_names(count))


def test_the_listed_names_are_those_in_the_code() -> None:

    from lightyear_node.learning.rules import RULES as made
    from lightyear_node.learning.rules.plugins import GROUP

    assert ALONE in RULES
    assert sorted(RULES) == sorted(made)
    assert RULES_GROUP == GROUP


def test_reading_a_suite_loads_neither_torch_nor_numpy() -> None:
    modules = (
        "lightyear_node.lab.experiment, lightyear_node.lab.simulate_command, lightyear_node.cli.lab"
    )
    heavy = "{'torch', 'numpy', 'matplotlib', 'sklearn'}"
    probe = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    shown = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


@pytest.mark.usefixtures("folder")
def test_partition_and_participation_are_part_of_the_work_unless_they_are_the_default() -> None:
    usual = expand(suite_with())
    assert expand(suite_with(participation=1.0, partition=None)) == usual
    assert not {"partition", "participation"} & usual[0].identity().keys()
    changed = expand(suite_with(participation=0.5, partition="dirichlet"))
    assert {job.work for job in changed}.isdisjoint(job.work for job in usual)
    written = expand(suite_with(participation=0.5, partition={"kind": "dirichlet", "alpha": 0.5}))
    assert [job.work for job in written] == [job.work for job in changed]
    identity, spec = changed[0].identity(), changed[0].spec()
    assert identity["partition"] == {"kind": "dirichlet", "alpha": 0.5, "samples_min": 10}
    assert (identity["participation"], spec.participation) == (0.5, 0.5)
    assert spec.partition is not None
    block = {"task": "digits", "rounds": [0], "malfunctions": ["sfa"], "partition": "iid"}
    [job] = expand_acceptance(suite_from({"name": "t", "acceptance": [block]}))
    assert job.request()["partition"] == {"kind": "iid", "samples_min": 10}


@pytest.mark.usefixtures("folder")
def test_exchange_settings_are_part_of_the_work_unless_they_are_the_default() -> None:
    usual = expand(suite_with())
    assert expand(suite_with(exchange={"dtype": "float32", "include": ["*"]})) == usual
    assert all("exchange" not in job.identity() for job in usual)
    short = expand(suite_with(exchange={"dtype": "bfloat16", "exclude": ["*.bias"]}))
    assert {job.work for job in short}.isdisjoint(job.work for job in usual)
    expected = {"dtype": "bfloat16", "exclude": ["*.bias"]}
    assert all(job.identity()["exchange"] == expected for job in short)
    assert {job.spec().exchange.dtype for job in short} == {"bfloat16"}
    assert "'float16'" in refusal(exchange={"dtype": "flaot16"})


@pytest.mark.usefixtures("folder")
def test_acceptance_is_measured_with_lightyear_alone() -> None:
    block = {"task": "digits", "rounds": [0], "rules": ["lightyear", "krum"]}
    with pytest.raises(ConfigError, match="acceptance is measured with lightyear, not krum"):
        suite_from({"name": "t", "acceptance": [block]})
