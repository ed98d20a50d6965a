"""The figures that an experiment's rows allow, each with name, title and caption."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightyear_node.lab.figures_cost import cost_plot
from lightyear_node.lab.figures_judging import agreement_plot, heat_map, judging_labels, measured
from lightyear_node.lab.figures_scores import box_plot, curves, gamma_plot, noise_plot
from lightyear_node.lab.figures_shadow import shadow_plot
from lightyear_node.lab.plot_style import PlotTheme, without_math_text
from lightyear_node.lab.results_reader import Experiment
from lightyear_node.lab.summary import References, Section, sections, shadow_cells

GAMMA_GRID = "gamma"
NOISE_GRID = "noise"


@dataclass(frozen=True, slots=True)
class Drawing:
    name: str
    """File name without suffix."""
    title: str
    sentence: str
    plot: Callable[[PlotTheme], Any]

    def draw(self, theme: PlotTheme) -> Any:
        with without_math_text():
            return self.plot(theme)


def drawings(experiment: Experiment) -> list[Drawing]:
    references, parts = References(experiment.rows), sections(experiment.rows)
    found: list[Drawing] = []
    usual = [one for one in parts if one.faults and _grid(one) not in (GAMMA_GRID, NOISE_GRID)]
    if usual:
        found.append(_box(usual, references))
    found += [_curves(section, references) for section in usual]
    found += _shadow(parts)
    found += [_heat(section) for section in usual if judging_labels(section)]
    tasks = measured(experiment)
    if tasks:
        loops = any(task.loops for task in tasks.values())
        found.append(
            Drawing(
                "agreement",
                "Agreement and distance of honest and malfunctioning updates",
                "Left of τ the agreement rejects; right of the limit the distance does."
                " Boxes are quartiles, whiskers reach from 5 % to 95 %."
                + (" From whole runs: what was accepted changed what came next." if loops else ""),
                lambda theme: agreement_plot(tasks, theme),
            )
        )
    gamma = [one for one in parts if _grid(one) == GAMMA_GRID]
    if gamma:
        found.append(
            Drawing(
                "gamma",
                "The pull γ",
                "Final score over γ, at equal steps; whiskers are the spread over clients.",
                lambda theme: gamma_plot(gamma, theme),
            )
        )
    noise = [one for one in parts if _grid(one) == NOISE_GRID and _has_noise(one)]
    if noise:
        found.append(
            Drawing(
                "noise",
                "Sensitivity to the strength of noise",
                "Above: final score over all clients. Below: share of noisy updates accepted."
                " Strengths are at equal steps.",
                lambda theme: noise_plot(noise, theme),
            )
        )
    return _with_unique_names(found + _cost(experiment))


def _with_unique_names(found: list[Drawing]) -> list[Drawing]:
    """Number the names of figures whose titles give the same file name."""
    seen: Counter[str] = Counter()
    result = []
    for one in found:
        seen[one.name] += 1
        again = seen[one.name]
        result.append(replace(one, name=f"{one.name}-{again}") if again > 1 else one)
    return result


def _grid(section: Section) -> str:
    return section.rows[0].grid


def _has_noise(section: Section) -> bool:
    return any(fault.kind == "ana" and fault.scale for fault in section.faults)


def _box(usual: list[Section], references: References) -> Drawing:
    return Drawing(
        "box",
        "Final scores by malfunction",
        "Each box has all clients, numbers of bad clients and seeds of one rule and malfunction;"
        " whiskers reach from 5 % to 95 %. The dashed line is the mean of local-only training.",
        lambda theme: box_plot(usual, references, theme),
    )


def _curves(section: Section, references: References) -> Drawing:
    return Drawing(
        f"curves-{_slug(section.title)}",
        f"Scores by number of malfunctioning clients: {section.title}",
        "Mean final score over all clients; at 0 no client malfunctions. Diverged clients are"
        " not in the mean; the tables count them.",
        lambda theme: curves(section, references, theme),
    )


def _shadow(parts: list[Section]) -> list[Drawing]:
    with_shadow = [section for section in parts if section.faults and shadow_cells(section)]
    if not with_shadow:
        return []
    return [
        Drawing(
            "shadow",
            "Honest clients with a shadow, against training alone",
            "Points above or below the model trained alone, after the last round: means, and lines"
            " from the worst to the best client of all seeds.",
            lambda theme: shadow_plot(with_shadow, theme),
        )
    ]


def _heat(section: Section) -> Drawing:
    return Drawing(
        f"acceptance-{_slug(section.title)}",
        f"Accepted and rejected updates: {section.title}",
        "Shares of all verdicts, over judges, rounds, seeds and numbers of bad clients."
        " Rules without verdicts accept all updates.",
        lambda theme: heat_map(section, theme),
    )


def _cost(experiment: Experiment) -> list[Drawing]:
    updates = {
        row.setting.task: (row.update_bytes, row.setting.clients)
        for row in experiment.rows
        if row.update_bytes
    }
    if not updates:
        return []
    return [
        Drawing(
            "communication",
            "Traffic of one round",
            "Arithmetic on the measured size of one uncompressed update: n(n−1) updates peer to"
            " peer, 2n through a server. Markers: the number of clients used here.",
            lambda theme: cost_plot(updates, theme),
        )
    ]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"
