"""Which pictures an experiment's rows allow, each with its name, its title and a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightyear_node.lab.figures_cost import cost_plot
from lightyear_node.lab.figures_judging import agreement_plot, heat_map, judging_labels, measured
from lightyear_node.lab.figures_scores import box_plot, curves, gamma_plot, noise_plot
from lightyear_node.lab.ink import Paper, plain_text
from lightyear_node.lab.rows import Experiment
from lightyear_node.lab.summary import References, Section, sections

GAMMA_GRID = "gamma"
NOISE_GRID = "noise"


@dataclass(frozen=True, slots=True)
class Drawing:
    name: str
    """Of its files, without the ending."""
    title: str
    sentence: str
    plot: Callable[[Paper], Any]

    def draw(self, paper: Paper) -> Any:
        with plain_text():
            return self.plot(paper)


def drawings(experiment: Experiment) -> list[Drawing]:
    references, parts = References(experiment.rows), sections(experiment.rows)
    found: list[Drawing] = []
    usual = [one for one in parts if one.faults and _grid(one) not in (GAMMA_GRID, NOISE_GRID)]
    if usual:
        found.append(_box(usual, references))
    found += [_curves(section, references) for section in usual]
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
                lambda paper: agreement_plot(tasks, paper),
            )
        )
    gamma = [one for one in parts if _grid(one) == GAMMA_GRID]
    if gamma:
        found.append(
            Drawing(
                "gamma",
                "The pull γ",
                "Final score over γ, at equal steps; whiskers are the spread over clients.",
                lambda paper: gamma_plot(gamma, paper),
            )
        )
    noise = [one for one in parts if _grid(one) == NOISE_GRID and _has_noise(one)]
    if noise:
        found.append(
            Drawing(
                "noise",
                "Sensitivity to the strength of noise",
                "Above the final score over all clients, below the share of noisy updates that"
                " were accepted; strengths stand at equal steps.",
                lambda paper: noise_plot(noise, paper),
            )
        )
    return _named_apart(found + _cost(experiment))


def _named_apart(found: list[Drawing]) -> list[Drawing]:
    """Titles that differ only in their signs must not share a file."""
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
        lambda paper: box_plot(usual, references, paper),
    )


def _curves(section: Section, references: References) -> Drawing:
    return Drawing(
        f"curves-{_slug(section.title)}",
        f"More and more malfunctioning clients: {section.title}",
        "Mean final score over all clients; at 0 nobody malfunctions. A client that diverged is"
        " not in the mean: the tables count them.",
        lambda paper: curves(section, references, paper),
    )


def _heat(section: Section) -> Drawing:
    return Drawing(
        f"acceptance-{_slug(section.title)}",
        f"Who gets in: {section.title}",
        "Shares of all verdicts, over judges, rounds, seeds and numbers of bad clients."
        " A rule that judges nobody accepts all.",
        lambda paper: heat_map(section, paper),
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
            "What a round costs",
            "Arithmetic on the measured size of one uncompressed update: n(n−1) updates peer to"
            " peer, 2n through a server. Markers: the number of clients used here.",
            lambda paper: cost_plot(updates, paper),
        )
    ]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"
