"""Figures: each is drawn if it has rows, and shows their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightyear_node.lab.figures import drawings
from lightyear_node.lab.figures_cost import RoundTraffic, traffic
from lightyear_node.lab.plot_style import DARK, LIGHT, as_png, as_svg
from lightyear_node.lab.results_reader import read
from tests.support.invented_results import Line, job, verdict, write

VERDICTS = {"honest": {"ok": 3, "too_far": 1}, "malfunctioning": {"ok": 1, "too_far": 1}}


def figures_of(folder: Path, lines: list[Line], acceptance: list[Line] | None = None) -> Any:
    write(folder, lines)
    if acceptance:
        write(folder, acceptance, "acceptance.jsonl")
    return {one.name: one.draw(LIGHT) for one in drawings(read(folder))}


def grid(**more: Any) -> list[Line]:
    return [
        job("local", [0.4] * 4, **more),
        job("fedavg", [0.6] * 4, **more),
        *(
            job(rule, [0.6 - 0.1 * bad] * 4, malfunction=kind, bad=bad, verdicts=VERDICTS, **more)
            for rule in ("fedavg", "krum", "lightyear")
            for kind in ("sfa", "random")
            for bad in (1, 2, 3)
        ),
    ]


def lines_of(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {
        line.get_label(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def texts_of(figure: Any) -> str:
    import matplotlib.text

    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def test_only_figures_with_rows_are_drawn(tmp_path: Path) -> None:
    clean = job("krum", [0.5] * 3, update_bytes=None)
    assert list(figures_of(tmp_path / "a", [clean])) == []
    names = ["box", "curves-femnist-main", "acceptance-femnist-main", "communication"]
    assert list(figures_of(tmp_path / "b", grid())) == names


def test_curves_have_a_line_for_each_rule_and_both_references(tmp_path: Path) -> None:
    figure = figures_of(tmp_path, grid())["curves-femnist-main"]
    first, second = figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == [
        "flipped signs (SFA)",
        "random weights",
    ]
    lines = lines_of(first)
    assert set(lines) == {
        *("FedAvg", "Krum", "LIGHTYEAR + guard", "local only", "FedAvg, no malfunction"),
    }
    assert lines["Krum"] == [(1, pytest.approx(50)), (2, pytest.approx(40)), (3, pytest.approx(30))]
    assert lines["FedAvg"][0] == (0, pytest.approx(60))  # without any malfunctioning client
    assert [y for _, y in lines["local only"]] == [pytest.approx(40)] * 2
    widths = {line.get_label(): line.get_linewidth() for line in first.get_lines()}
    assert widths["LIGHTYEAR + guard"] > 2 * widths["Krum"]


def test_three_malfunctions_leave_the_fourth_panel_empty(tmp_path: Path) -> None:
    more = [job("krum", [0.5] * 4, malfunction="ana", bad=1)]
    figure = figures_of(tmp_path, [*grid(), *more])["curves-femnist-main"]
    assert [axes.get_visible() for axes in figure.axes] == [True, True, True, False]


def test_the_box_plot_has_a_panel_for_each_task_and_a_box_for_each_case(tmp_path: Path) -> None:
    from matplotlib.patches import PathPatch

    lines = grid() + grid(task="heart")
    lines.append(job("afa", [None, None, 0.5, 0.5], malfunction="sfa", bad=1, task="heart"))
    figure = figures_of(tmp_path, lines)["box"]
    femnist, heart = figure.axes
    boxes = [patch for patch in femnist.patches if isinstance(patch, PathPatch)]
    assert len(boxes) == 3 * 2
    assert len([patch for patch in heart.patches if isinstance(patch, PathPatch)]) == 3 * 2 + 1
    assert "AFA\n(2 diverged)" in [label.get_text() for label in heart.get_xticklabels()]


def test_agreement_and_distance_are_drawn_from_measured_verdicts(tmp_path: Path) -> None:
    acceptance = [
        *(verdict("none", 0.9 + index / 100, 0.25) for index in range(4)),
        *(verdict("sfa", agreement, 1.0) for agreement in (0.5, 0.55, 0.65, None)),
        verdict("sfa", float("nan"), None),
    ]
    figure = figures_of(tmp_path, [job("krum", [0.5] * 3)], acceptance)["agreement"]
    agreement, distance = figure.axes
    assert [label.get_text() for label in agreement.get_yticklabels()] == [
        "honest",
        "flipped signs (SFA)",
    ]
    shares = [text.get_text() for text in agreement.texts]
    assert shares == ["100 % above τ, n = 4", "33 % above τ, n = 3"]
    # The limit is 0.5: honest updates are at half of it, the others at twice.
    assert [text.get_text() for text in distance.texts] == [
        "100 % within, n = 4",
        "0 % within, n = 4",
    ]
    dashed = [line for line in agreement.get_lines() if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashed] == [0.6]


def test_without_measured_verdicts_the_scores_of_runs_are_drawn(tmp_path: Path) -> None:
    scores = {"honest": [0.9, 0.8], "malfunctioning": [0.3]}
    line = job("lightyear", [0.5] * 3, malfunction="sfa", bad=1, scores=scores)
    figure = figures_of(tmp_path, [line])["agreement"]
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == [
        "100 % above τ, n = 2",
        "0 % above τ, n = 1",
    ]
    assert "From whole runs" in next(
        one.sentence for one in drawings(read(tmp_path)) if one.name == "agreement"
    )


def test_gamma_is_drawn_over_its_values(tmp_path: Path) -> None:
    lines = [
        job("lightyear", [final] * 3, grid="gamma", label=f"γ {gamma}", terms={"gamma": gamma})
        for gamma, final in ((1.0, 0.7), (0.5, 0.0), (0.95, 0.6))
    ]
    (axes,) = figures_of(tmp_path, lines)["gamma"].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "0.95", "1"]
    assert [pytest.approx(y) for y in axes.get_lines()[0].get_ydata()] == [0, 60, 70]


def test_noise_shows_the_score_and_the_share_accepted(tmp_path: Path) -> None:
    lines = [
        job(
            "krum", [final] * 3, grid="noise", malfunction="ana", scale=scale, bad=1,
            verdicts={"malfunctioning": {"ok": accepted, "too_far": 4 - accepted}},
        )
        for scale, final, accepted in ((120.5, 0.5, 0), (1.5, 0.7, 4), (50.0, 0.6, 1))
    ]  # fmt: skip
    above, below = figures_of(tmp_path, lines)["noise"].axes
    assert [y for _, y in lines_of(above)["Krum"]] == [pytest.approx(v) for v in (70, 60, 50)]
    assert [y for _, y in lines_of(below)["Krum"]] == [100, 25, 0]


def test_federated_and_served_models_are_drawn_against_training_alone(tmp_path: Path) -> None:
    def site(alone: float, federated: float, served: float) -> Line:
        values = {"alone": alone, "merged": federated, "served": served}
        curves = {f"{kind}.accuracy": [value] for kind, value in values.items()}
        return {"name": "a", "malfunctioning": False, "final": served, "curves": curves}

    sites = [site(0.5, 0.25, 0.5), site(0.5, 0.75, 0.625)]
    figure = figures_of(tmp_path, [job("lightyear", [0.5], malfunction="ipm", bad=1, sites=sites)])[
        "shadow"
    ]
    [axes] = figure.axes
    drawn = [list(line.get_xdata()) for line in axes.get_lines()]
    # A line from the worst to the best client, then their mean: federated, served; then zero.
    assert drawn == [[-25.0, 25.0], [0.0], [0.0, 12.5], [6.25], [0, 0]]
    assert {"ipm", "main", "federated", "served"} <= set(texts_of(figure).split("\n"))


def test_the_heat_map_shows_shares_of_verdicts(tmp_path: Path) -> None:
    figure = figures_of(tmp_path, grid())["acceptance-femnist-main"]
    accepted, rejected = figure.axes
    assert [text.get_text() for text in accepted.texts] == ["50 %"] * 6
    # Rules by columns none, sfa, random; the clean runs have no verdicts.
    assert [text.get_text() for text in rejected.texts] == ["·", "25 %", "25 %"] * 3


def test_the_traffic_equals_the_formulas(tmp_path: Path) -> None:
    assert traffic(4, 10) == RoundTraffic(
        mesh=120, mesh_site=60, server_based=80, server=80, server_client=20
    )
    left, right = figures_of(tmp_path, grid())["communication"].axes
    mesh, server = left.get_lines()
    assert list(mesh.get_xdata()) == list(range(2, 17))
    assert mesh.get_ydata()[-1] == 16 * 15 * 1_000_000
    assert server.get_ydata()[-1] == 32 * 1_000_000
    assert len(right.get_lines()) == 3


def test_labels_are_no_formulas_and_file_names_are_unique(tmp_path: Path) -> None:
    hostile = r"$\frac{<script>"
    lines = [
        *(job("krum", [0.5] * 3, label=hostile, malfunction="sfa", bad=bad) for bad in (1, 2)),
        job("krum", [0.5] * 3, malfunction="sfa", bad=1, grid="a/b"),
        job("krum", [0.5] * 3, malfunction="sfa", bad=1, grid="a b"),
        job("krum", [0.5] * 3, malfunction="sfa", bad=1, grid="../../x"),
    ]
    figures = figures_of(tmp_path, lines)
    assert {"curves-femnist-a-b", "curves-femnist-a-b-2", "curves-femnist-x"} <= set(figures)
    assert hostile in texts_of(figures["curves-femnist-main"])
    assert b"<svg" in as_svg(figures["curves-femnist-main"])


def test_figures_are_deterministic_and_dark_ones_differ(tmp_path: Path) -> None:
    write(tmp_path, grid())
    one = next(one for one in drawings(read(tmp_path)) if one.name == "curves-femnist-main")
    first, again, dark = one.draw(LIGHT), one.draw(LIGHT), one.draw(DARK)
    assert as_svg(first) == as_svg(again) != as_svg(dark)
    png = as_png(first)
    assert png == as_png(again)
    assert png.startswith(b"\x89PNG")
