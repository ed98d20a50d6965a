"""Tables: the numbers equal those computed by hand, and nothing is dropped silently."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.lab import paper_numbers, table_formats
from lightyear_node.lab.results_reader import read
from lightyear_node.lab.tables import LONG_COLUMNS, Table, chapters, long_rows
from tests.support.invented_results import Line, job, write

ONE, TWO = [0.5, 0.7, 0.9, 0.3], [0.7, 0.7, 0.7, 0.7]
"""Means 60 and 70; over the clients sqrt(500) = 22.36 and 0; over the seeds sqrt(50) = 7.07."""


def tables_of(folder: Path, lines: list[Line]) -> dict[str, Table]:
    parts = chapters(read(write(folder, lines)))
    return {table.title: table for part in parts for table in part.tables}


def texts(table: Table) -> list[list[str]]:
    return [[entry.text for entry in line] for line in table.lines]


def markdown_of(folder: Path, lines: list[Line]) -> str:
    return table_formats.markdown(chapters(read(write(folder, lines))))


def long_of(folder: Path, lines: list[Line]) -> list[dict[str, str]]:
    text = table_formats.comma_separated(LONG_COLUMNS, long_rows(read(write(folder, lines))))
    return list(csv.DictReader(io.StringIO(text)))


def test_means_and_spreads_equal_values_computed_by_hand(tmp_path: Path) -> None:
    lines = [
        job("fedavg", ONE, malfunction="sfa", bad=1, seed=0),
        job("fedavg", TWO, malfunction="sfa", bad=1, seed=1),
    ]
    everyone, honest = long_of(tmp_path, lines)
    assert (everyone["population"], everyone["mean"]) == ("all", "65.0000")
    assert (everyone["std_clients"], everyone["std_seeds"]) == ("11.1803", "7.0711")
    assert everyone["seeds"] == "2"
    # The first client is the malfunctioning one: (70 + 90 + 30) / 3, then 70.
    assert (honest["population"], honest["mean"]) == ("honest", "66.6667")
    shown = tables_of(tmp_path, lines)["femnist, main: flipped signs (SFA), all clients"]
    assert texts(shown) == [["FedAvg", "65.0 ± 11.2 (± 7.1)"]]
    assert list(shown.columns) == ["rule", "1"]


def test_the_long_table_has_these_columns_and_counts(tmp_path: Path) -> None:
    verdicts = {
        "honest": {"ok": 30, "too_far": 4, "agreement_below_tau": 2},
        "malfunctioning": {"ok": 5, "too_far": 7},
    }
    lines = [
        job("krum", ONE, malfunction="ana", scale=120.5, bad=1, seed=seed, verdicts=verdicts)
        for seed in (0, 1)
    ]
    row = long_of(tmp_path, lines)[0]
    assert ",".join(row) == (
        "task,grid,rule_label,malfunction,scale,bad,population,seeds,mean,std_clients,std_seeds,"
        "diverged,malfunctioning_accepted,malfunctioning_judged,honest_rejected,honest_judged,"
        "paper_mean,paper_std"
    )
    assert (row["rule_label"], row["malfunction"], row["scale"]) == ("Krum", "ana", "120.5")
    assert (row["malfunctioning_accepted"], row["malfunctioning_judged"]) == ("10", "24")
    assert (row["honest_rejected"], row["honest_judged"]) == ("12", "72")


def test_differences_compare_the_same_clients_and_seed(tmp_path: Path) -> None:
    lines = [
        job("local", [0.1, 0.2, 0.3, 0.4], seed=0),
        job("local", [0.0, 0.5, 0.5, 0.5], seed=1),
        job("krum", [0.9, 0.6, 0.7, 0.2], seed=0),
        job("krum", ONE, malfunction="sfa", bad=1, seed=0),
        job("krum", TWO, malfunction="sfa", bad=1, seed=1),
    ]
    tables = tables_of(tmp_path, lines)
    start = "femnist, main: flipped signs (SFA), honest clients minus "
    # Seed 0: +50, +60, -10 (mean 33.3, std 30.9); seed 1: three times +20 (std 0).
    alone = tables[start + "local-only training, percentage points"]
    assert texts(alone) == [["Krum", "+26.7 ± 15.5 (± 9.4)"]]
    # Only seed 0 has a clean run: +10, +20, +10 (mean 13.3, std 4.7).
    clean = tables[start + "the same rule without malfunction, percentage points"]
    assert texts(clean) == [["Krum", "+13.3 ± 4.7 ‡1"]]
    assert "‡n: only n of 2 seeds are there." in clean.notes


def test_local_runs_of_another_grid_count_only_if_their_arguments_are_known(tmp_path: Path) -> None:
    title = "femnist, noise: flipped signs (SFA), honest clients minus local-only training"

    def compared(run: dict[str, Any], alone: dict[str, Any]) -> bool:
        lines = [
            job("local", TWO, grid="main", **alone),
            job("krum", ONE, grid="noise", malfunction="sfa", bad=1, **run),
        ]
        return f"{title}, percentage points" in tables_of(tmp_path, lines)

    assert compared({"args": {"network": "small"}}, {"args": {"network": "small"}})
    assert not compared({"args": {"network": "small"}}, {"args": {"network": "paper"}})
    assert not compared({}, {})


def test_missing_and_diverged_clients_are_marked(tmp_path: Path) -> None:
    lines = [
        job("fedavg", [None, 0.9, 0.7, None], malfunction="sfa", bad=1),
        job("fedavg", [None] * 4, malfunction="sfa", bad=3),
        job("krum", [0.5] * 4, malfunction="sfa", bad=1),
    ]
    shown = tables_of(tmp_path, lines)["femnist, main: flipped signs (SFA), all clients"]
    assert texts(shown) == [
        ["FedAvg", "80.0 ± 10.0 †2", "— †4"],
        ["Krum", "50.0 ± 0.0", "·"],
    ]
    assert any("6 of 12 in this table" in note for note in shown.notes)
    first = long_of(tmp_path, lines)[0]
    assert (first["mean"], first["diverged"]) == ("80.0000", "2")
    gone = next(row for row in long_of(tmp_path, lines) if row["bad"] == "3")
    assert (gone["mean"], gone["std_clients"], gone["diverged"]) == ("", "", "4")


def test_a_nan_in_the_file_is_a_diverged_client(tmp_path: Path) -> None:
    (row, _) = long_of(tmp_path, [job("fedavg", [float("nan"), 0.5])])
    assert (row["mean"], row["diverged"]) == ("50.0000", "1")


def test_one_client_has_no_spread_over_clients(tmp_path: Path) -> None:
    rows = long_of(tmp_path, [job("krum", [0.5, 0.7], malfunction="sfa", bad=1)])
    assert [(row["population"], row["mean"], row["std_clients"]) for row in rows] == [
        ("all", "60.0000", "10.0000"),
        ("honest", "70.0000", ""),
    ]


def test_the_best_is_bold_but_never_a_rule_with_diverged_clients(tmp_path: Path) -> None:
    lines = [
        job("fedavg", [None, 0.99], malfunction="sfa", bad=1),
        job("krum", [0.60, 0.60], malfunction="sfa", bad=1),
        job("balance", [0.6002, 0.6002], malfunction="sfa", bad=1),
        job("afa", [0.5, 0.5], malfunction="sfa", bad=1),
    ]
    shown = tables_of(tmp_path, lines)["femnist, main: flipped signs (SFA), all clients"]
    bold = [line[0].text for line in shown.lines if line[1].bold]
    assert bold == ["Krum", "BALANCE"]  # equal as shown
    assert r"Krum & \textbf{60.0 $\pm$ 0.0} \\" in table_formats.latex(chapters(read(tmp_path)))


def test_clean_and_local_runs_are_shown_once_and_rules_in_the_papers_order(tmp_path: Path) -> None:
    lines = [
        job("lightyear", TWO, label="LIGHTYEAR + guard"),
        job("lightyear", TWO, label="LIGHTYEAR", terms={"guard": False}),
        job("mine", TWO),
        job("krum", TWO),
        job("fedavg", TWO),
        job("local", ONE),
        job("krum", ONE, malfunction="sfa", bad=2),
    ]
    tables = tables_of(tmp_path, lines)
    reference = tables["femnist, main: no malfunction"]
    assert [line[0].text for line in reference.lines] == [
        *("local only", "FedAvg", "Krum", "mine", "LIGHTYEAR", "LIGHTYEAR + guard"),
    ]
    assert texts(tables["femnist, main: flipped signs (SFA), all clients"]) == [
        ["Krum", "60.0 ± 22.4"]
    ]


def test_verdicts_are_counted_by_rule_and_malfunction(tmp_path: Path) -> None:
    both = {"honest": {"ok": 9, "too_far": 1}, "malfunctioning": {"ok": 1, "too_far": 3}}
    lines = [
        job("krum", ONE, verdicts={"honest": {"ok": 12}}),
        job("krum", ONE, malfunction="sfa", bad=1, verdicts=both),
        job("krum", ONE, malfunction="sfa", bad=2, verdicts=both),
        job("fedavg", ONE, malfunction="sfa", bad=1),
    ]
    shown = tables_of(tmp_path, lines)["femnist, main: verdicts"]
    assert texts(shown) == [["Krum", "0 of 12", "2 of 8", "2 of 20"]]


def test_rules_that_differ_in_their_terms_never_share_a_line(tmp_path: Path) -> None:
    lines = [
        job("lightyear", ONE, label="ours", terms={"gamma": 0.5}),
        job("lightyear", TWO, label="ours", terms={"gamma": 0.9}),
    ]
    shown = tables_of(tmp_path, lines)["femnist, main: no malfunction"]
    assert [line[0].text for line in shown.lines] == ["ours (gamma 0.5)", "ours (gamma 0.9)"]


def test_each_strength_of_noise_has_its_own_table(tmp_path: Path) -> None:
    lines = [job("krum", ONE, malfunction="ana", scale=s, bad=1) for s in (50.0, 120.5)]
    titles = list(tables_of(tmp_path, lines))
    assert "femnist, main: noise (ANA), scale 50, all clients" in titles
    assert "femnist, main: noise (ANA), scale 120.5, all clients" in titles


def test_a_grid_with_two_settings_has_two_sections(tmp_path: Path) -> None:
    lines = [job("krum", ONE), job("krum", ONE, rounds=9)]
    assert [row["grid"] for row in long_of(tmp_path, lines)[::2]] == [
        "main (4 clients, 3 rounds)",
        "main (4 clients, 9 rounds)",
    ]


def test_latex_is_escaped_and_every_line_has_all_its_columns(tmp_path: Path) -> None:
    label = r"50%_of {A&B} #1 \x ~^ $2 <γ>"
    lines = [
        job("krum", ONE, label=label, malfunction="sfa", bad=1),
        job("krum", ONE, label=label, malfunction="sfa", bad=2),
    ]
    text = table_formats.latex(chapters(read(write(tmp_path, lines))))
    expected = (
        r"50\%\_of \{A\&B\} \#1 \textbackslash{}x \textasciitilde{}\textasciicircum{} \$2"
        r" \textless{}$\gamma$\textgreater{}"
    )
    assert expected in text
    body = text.replace(expected, "label")
    for tabular in re.findall(r"\\begin\{tabular\}\{(l c*|lc*)\}(.*?)\\end\{tabular\}", body, re.S):
        for line in tabular[1].splitlines():
            if line.endswith(r"\\") and "multicolumn" not in line:
                assert line.count(" & ") == len(tabular[0]) - 1, line
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr){2-3}"):
        assert part in text
    assert text.count(r"\begin{table*}") == text.count(r"\end{table*}") > 2


def test_markdown_labels_cannot_break_the_table(tmp_path: Path) -> None:
    text = table_formats.markdown(
        chapters(read(write(tmp_path, [job("krum", ONE, label="a|b*<i>")])))
    )
    line = next(line for line in text.splitlines() if line.startswith("| a"))
    assert line == r"| a\|b\*\<i\> | 60.0 ± 22.4 |"


@pytest.mark.parametrize(
    ("task", "clients", "rule", "kind", "bad", "expected"),
    [
        # Copied from the paper's supplementary tables.
        ("femnist", 8, "fedavg", "ana", 3, (75.0, 5.8)),
        ("femnist", 8, "krum", "sfa", 6, (3.5, 0.5)),
        ("pcam", 5, "afa", "sfa", 2, (58.6, 17.7)),
        ("cxr_lungs", 5, "balance", "ana", 1, (39.1, 15.5)),
        ("pcam", 5, "lightyear", "sfa", 4, (95.4, 2.8)),
    ],
)
def test_the_papers_numbers_are_found(
    tmp_path: Path,
    task: str,
    clients: int,
    rule: str,
    kind: str,
    bad: int,
    expected: tuple[float, float],
) -> None:
    made = job(rule, [0.5] * clients, malfunction=kind, bad=bad, task=task, terms={"guard": False})
    (row,) = read(write(tmp_path, [made])).rows
    assert paper_numbers.number(row) == expected
    everyone, honest = long_of(tmp_path, [made])
    assert (float(everyone["paper_mean"]), float(everyone["paper_std"])) == expected
    assert honest["paper_mean"] == ""


@pytest.mark.parametrize(
    "other",
    [
        {"finals": [0.5] * 5},
        {"task": "heart"},
        {"rule": "mine"},
        {"malfunction": "head-flip"},
        {"scale": 50.0},
        {"rule": "lightyear"},  # the guard is not in the paper
        {"rule": "lightyear", "terms": {"guard": False, "gamma": 0.5}},
        {"rule": "lightyear", "terms": {"guard": False, "harm_max": 0.1}},
        {"malfunction": "none", "bad": 0},
    ],
)
def test_a_case_that_is_not_in_the_paper_has_no_paper_number(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {
        "rule": "krum", "finals": [0.5] * 8, "malfunction": "ana", "bad": 1, "scale": 120.5,
    }  # fmt: skip
    (same,) = read(write(tmp_path, [job(**usual)])).rows
    assert paper_numbers.number(same) == (68.6, 9.4)
    (row,) = read(write(tmp_path, [job(**(usual | other))])).rows
    assert paper_numbers.number(row) is None


def test_our_numbers_are_shown_beside_the_papers(tmp_path: Path) -> None:
    lines = [
        job("krum", [0.5] * 8, malfunction="sfa", bad=1),
        job("lightyear", [0.7] * 8, malfunction="sfa", bad=1),
    ]
    tables = tables_of(tmp_path, lines)
    title = "femnist, main: flipped signs (SFA), ours / the paper's (FEMNIST)"
    assert texts(tables[title]) == [["Krum", "50.0 / 71.4"], ["LIGHTYEAR + guard", "70.0 / ·"]]
    assert any("not comparable one to one" in note for note in tables[title].notes)


def test_tables_do_not_depend_on_the_order_of_results(tmp_path: Path) -> None:
    lines = [
        job(rule, ONE, malfunction=kind, bad=bad, seed=seed)
        for rule in ("krum", "fedavg", "lightyear")
        for kind in ("sfa", "ana")
        for bad in (1, 2)
        for seed in (0, 1)
    ]
    before = (
        table_formats.markdown(chapters(read(write(tmp_path, lines)))),
        long_of(tmp_path, lines),
    )
    random.Random(5).shuffle(lines)
    after = markdown_of(tmp_path, lines), long_of(tmp_path, lines)
    assert before == after


def test_the_last_row_of_a_job_counts_and_torn_lines_are_counted(tmp_path: Path) -> None:
    failed = {**job("krum", ONE, key="a"), "failed": "out of memory"}
    again = job("krum", TWO, key="a")
    gone = {**job("afa", ONE, malfunction="sfa", bad=2, key="b"), "failed": "killed"}
    write(tmp_path, [failed, again, gone])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(again)[:40])
    found = read(tmp_path)
    assert [site.final for site in found.rows[0].sites] == TWO
    assert [(one.what, one.message) for one in found.failures] == [
        ("femnist, main, afa, flipped signs (SFA), 2 malfunctioning, seed 0", "killed")
    ]
    assert found.unreadable == 1


def test_an_unreadable_line_is_reported_by_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no results"):
        read(tmp_path)
    without = job("krum", ONE)
    del without["sites"]
    with pytest.raises(ConfigError, match="line 2: not a job's result: 'sites' is missing"):
        read(write(tmp_path, [job("afa", ONE), without]))
    with pytest.raises(ConfigError, match="schema_version is '2'"):
        read(write(tmp_path, [{**job("afa", ONE), "schema_version": "2"}]))


def test_a_rule_with_a_shadow_has_its_own_label(tmp_path: Path) -> None:
    terms = {"harm_max": 0.1, "shadow": True}
    lines = [job("lightyear", TWO, terms=terms), job("fedavg", TWO, terms={"shadow": True})]
    found = {row.rule: row.label for row in read(write(tmp_path, lines)).rows}
    assert found["lightyear"] == "LIGHTYEAR + guard + do-no-harm + shadow"
    assert found["fedavg"].endswith(" + shadow")


def test_a_rule_with_merge_check_is_labelled_do_no_harm(tmp_path: Path) -> None:
    """Older results, without that check, keep their label."""
    lines = [job("lightyear", TWO), job("lightyear", TWO, grid="new", terms={"harm_max": 0.1})]
    rows = read(write(tmp_path, lines)).rows
    assert {row.grid: row.label for row in rows} == {
        "main": "LIGHTYEAR + guard",
        "new": "LIGHTYEAR + guard + do-no-harm",
    }


def shadowed(alone: float, federated: float, served: float, success: bool = False) -> Line:
    """A site's curves of two rounds; the first round does not count."""
    values = {"alone": alone, "merged": federated, "served": served}
    curves = {f"{kind}.accuracy": [0.1, value] for kind, value in values.items()}
    if success:
        curves |= {f"{kind}.attack_success": [0.0, value / 2] for kind, value in values.items()}
    return {"name": "client-0", "malfunctioning": False, "final": served, "curves": curves}


def test_gains_over_training_alone_are_shown_where_sites_have_a_shadow(tmp_path: Path) -> None:
    bad = {**shadowed(0.0, 0.0, 0.0), "malfunctioning": True}
    cases = [
        ("none", 0, [shadowed(0.5, 0.6, 0.6), shadowed(0.7, 0.6, 0.7)]),
        ("backdoor", 1, [bad, shadowed(0.5, 0.2, 0.5, True)]),
        ("ipm", 1, [bad, shadowed(0.5, 0.4, 0.45)]),
    ]
    lines = [
        job("lightyear", [0.5, 0.5], malfunction=kind, bad=count, sites=sites)
        for kind, count, sites in cases
    ]
    shown = tables_of(tmp_path, lines)["femnist, main: with a shadow, honest clients"]
    assert texts(shown) == [
        ["no malfunction", "2", "60.0", "+0.0 (−10.0)", "+5.0 (+0.0)", "·", "·"],
        ["1 x backdoor", "1", "50.0", "−30.0 (−30.0)", "+0.0 (+0.0)", "25.0", "25.0"],
        ["1 x ipm", "1", "50.0", "−10.0 (−10.0)", "−5.0 (−5.0)", "·", "·"],
        ["all malfunctions", "2", "50.0", "−20.0 (−30.0)", "−2.5 (−5.0)", "25.0", "25.0"],
    ]


def test_results_without_a_shadow_have_no_such_table(tmp_path: Path) -> None:
    site = shadowed(0.5, 0.6, 0.6)
    site["curves"] = {"merged.accuracy": [0.5, 0.6], "alone.accuracy": [None, None]}
    found = tables_of(tmp_path, [job("lightyear", [0.5], sites=[site])])
    assert not any("shadow" in title for title in found)
