"""The paper's tables from our rows: a line per rule, a column per number of bad clients.

Tables are records of plain text; `table_formats` writes them as Markdown, LaTeX and HTML.
`long_rows` is the long form for other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lightyear_node.lab import paper_numbers
from lightyear_node.lab.paper_order import compare_order
from lightyear_node.lab.results_reader import CLEAN, NO_FAULT, Experiment, FaultSetting, JobRow
from lightyear_node.lab.summary import (
    Cell,
    Counts,
    Population,
    References,
    Section,
    ShadowCell,
    Stat,
    alone_of,
    counts,
    differences,
    scores,
    sections,
    shadow_cells,
    shown_args,
    stat,
)

MISSING = "·"
DIVERGED = "—"
BAD_CLIENTS = "number of malfunctioning clients"

LONG_COLUMNS = (
    *("task", "grid", "rule_label", "malfunction", "scale", "bad", "population", "seeds"),
    *("mean", "std_clients", "std_seeds", "diverged"),
    *("malfunctioning_accepted", "malfunctioning_judged", "honest_rejected", "honest_judged"),
    *("paper_mean", "paper_std"),
)

POPULATIONS: Mapping[Population, str] = {
    "all": "all clients",
    "honest": "honest clients",
}


@dataclass(frozen=True, slots=True)
class TableEntry:
    text: str
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: Sequence[str]
    lines: Sequence[Sequence[TableEntry]]
    over: str = ""
    """Common heading of the columns."""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chapter:
    title: str
    about: str
    tables: Sequence[Table]


def chapters(experiment: Experiment) -> list[Chapter]:
    references = References(experiment.rows)
    return [_chapter(section, references) for section in sections(experiment.rows)]


def long_rows(experiment: Experiment) -> list[list[str]]:
    """One line per rule, case and population, in percent; empty fields have no value."""
    lines = []
    for section in sections(experiment.rows):
        for cell in section.cells().values():
            judged = counts(cell.rows)
            for population in POPULATIONS:
                found = stat(scores(cell.rows, population))
                # The paper's means are over all clients.
                theirs = paper_numbers.number(cell.rows[0]) if population == "all" else None
                lines.append(
                    [
                        *(section.setting.task, section.grid, cell.label, cell.fault.name),
                        *("" if cell.fault.scale is None else f"{cell.fault.scale:g}",),
                        *(str(cell.bad), population, str(found.seeds)),
                        *map(_decimal, (found.mean, found.std_clients, found.std_seeds)),
                        *(str(found.diverged), str(judged.malfunctioning_accepted)),
                        *(str(judged.malfunctioning_judged), str(judged.honest_rejected)),
                        str(judged.honest_judged),
                        *(("", "") if theirs is None else map(str, theirs)),
                    ]
                )
    return lines


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value + 0.0:.4f}"


def _chapter(section: Section, references: References) -> Chapter:
    tables = [_references(section, references)]
    if section.faults:
        tables.insert(0, _overview(section, references))
    for fault in section.faults:
        tables += [_scores(section, fault, population) for population in POPULATIONS]
        tables += filter(None, [_paper_comparison(section, fault)])
        tables += [
            _differences(section, fault, "local-only training", references.alone),
            _differences(section, fault, "the same rule without malfunction", references.clean),
        ]
    tables += filter(None, [_with_shadow(section), _acceptance(section)])
    setting, seeds = section.setting, section.seeds
    about = (
        f"{setting.clients} clients, {setting.rounds} rounds,"
        f" {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))};"
        f" {section.metric} in percent"
    )
    if shown_args(setting):
        about += f"; task arguments {shown_args(setting)}"
    if setting.partition:
        about += f"; partition {setting.partition}"
    if setting.participation < 1:
        about += f"; participation {setting.participation:g}"
    return Chapter(section.title, about + ".", [table for table in tables if table.lines])


def _references(section: Section, references: References) -> Table:
    """Scores of each rule without malfunction, and of local-only training."""
    cells = section.cells()
    runs = {"local only": alone_of(section, references)}
    for label in section.labels:
        cell = cells.get((label, NO_FAULT, 0))
        if cell is not None:
            runs[label] = list(cell.rows)
    stats = {label: stat(scores(rows, "all")) for label, rows in runs.items() if rows}
    best = _best(stats.values())
    lines = [[TableEntry(label), _entry(found, section, best)] for label, found in stats.items()]
    return Table(
        f"{section.title}: no malfunction",
        ["rule", section.metric],
        lines,
        notes=_notes(stats.values(), section),
    )


def _scores(section: Section, fault: FaultSetting, population: Population) -> Table:
    return _by_bad(
        section,
        fault,
        f"{section.title}: {fault.text}, {POPULATIONS[population]}",
        lambda cell: stat(scores(cell.rows, population)),
    )


def _differences(
    section: Section, fault: FaultSetting, what: str, reference: Callable[[JobRow], JobRow | None]
) -> Table:
    return _by_bad(
        section,
        fault,
        f"{section.title}: {fault.text}, honest clients minus {what}, percentage points",
        lambda cell: stat(differences(cell.rows, reference)),
        signed=True,
    )


def _by_bad(
    section: Section,
    fault: FaultSetting,
    title: str,
    measure: Callable[[Cell], Stat],
    *,
    signed: bool = False,
) -> Table:
    cells, bads = section.cells(), section.bads(fault)
    stats = {
        (label, bad): measure(cells[label, fault, bad])
        for label in section.labels
        for bad in bads
        if (label, fault, bad) in cells
    }
    best = {bad: _best(stats[at] for at in stats if at[1] == bad) for bad in bads}
    lines = [
        [TableEntry(label)]
        + [_entry(stats.get((label, bad)), section, best[bad], signed=signed) for bad in bads]
        for label in section.labels
        if any((label, bad) in stats for bad in bads)
    ]
    measured = any(found.seeds for found in stats.values())
    return Table(
        title,
        ["rule", *map(str, bads)],
        lines if measured else [],
        over=BAD_CLIENTS,
        notes=_notes(stats.values(), section),
    )


def _paper_comparison(section: Section, fault: FaultSetting) -> Table | None:
    cells, bads = section.cells(), section.bads(fault)
    lines, known = [], False
    for label in section.labels:
        line = [TableEntry(label)]
        for bad in bads:
            cell = cells.get((label, fault, bad))
            if cell is None:
                line.append(TableEntry(MISSING))
                continue
            ours, theirs = stat(scores(cell.rows, "all")), paper_numbers.number(cell.rows[0])
            known = known or theirs is not None
            line.append(
                TableEntry(
                    f"{_plain(ours.mean)} / {MISSING if theirs is None else _plain(theirs[0])}"
                )
            )
        lines.append(line)
    if not known:
        return None
    return Table(
        f"{section.title}: {fault.text},"
        f" ours / the paper's ({paper_numbers.SETS[section.setting.task]})",
        ["rule", *map(str, bads)],
        lines,
        over=BAD_CLIENTS,
        notes=[
            *_order(section, fault),
            paper_numbers.CAVEAT,
            f"Source of the second numbers: {paper_numbers.source()}.",
        ],
    )


def _order(section: Section, fault: FaultSetting) -> list[str]:
    compared = [one for one in compare_order(section, fault) if one.correlation is not None]
    if not compared:
        return []
    texts = (f"{_two_digits(one.correlation)} ({one.bad}; {one.rules} rules)" for one in compared)
    return [
        "Rank correlation (Spearman's ρ) of the order of the rules, ours with the paper's, by"
        f" number of malfunctioning clients: {', '.join(texts)}."
    ]


def _overview(section: Section, references: References) -> Table:
    """One line per rule: honest clients, over all malfunctions and numbers of bad clients."""
    lines = []
    for label in section.labels:
        cells = [
            cell
            for cell in section.cells().values()
            if cell.label == label and cell.fault != NO_FAULT
        ]
        if not cells:
            continue
        found = [stat(scores(cell.rows, "honest")) for cell in cells]
        means = [one.mean for one in found if one.mean is not None]
        gains = [stat(differences(cell.rows, references.alone)).mean for cell in cells]
        known = [gain for gain in gains if gain is not None]
        judged = counts(row for cell in cells for row in cell.rows)
        lines.append(
            [
                TableEntry(label),
                TableEntry(_plain(sum(means) / len(means) if means else None)),
                TableEntry(_plain(min(means, default=None))),
                TableEntry(_signed(sum(known) / len(known)) if known else MISSING),
                TableEntry(_signed(min(known)) if known else MISSING),
                TableEntry(_of(judged.malfunctioning_accepted, judged.malfunctioning_judged)),
                TableEntry(_of(judged.honest_rejected, judged.honest_judged)),
                TableEntry(
                    f"{sum(one.diverged for one in found)} of {sum(o.clients for o in found)}"
                ),
                TableEntry(str(len(cells))),
            ]
        )
    return Table(
        f"{section.title}: honest clients, over all malfunctions",
        [
            *("rule", "mean", "worst case", "minus local, mean", "minus local, worst case"),
            *("malfunctioning accepted", "honest rejected", "diverged", "cases"),
        ],
        lines,
        notes=[
            "A case is a malfunction with a number of bad clients; means of cases weigh alike."
            " Rules can be compared where they have the same cases."
        ],
    )


def _with_shadow(section: Section) -> Table | None:
    """One line per case: what honest clients with a shadow gain over training alone."""
    cells = shadow_cells(section)
    if not cells:
        return None
    labels = {cell.label for cell in cells}
    lines = []
    for label in sorted(labels):
        prefix = f"{label}: " if len(labels) > 1 else ""
        cases = [cell for cell in cells if cell.label == label]
        faulty = [cell for cell in cases if cell.bad]
        for cell in cases:
            text = f"{cell.bad} x {cell.fault.text}" if cell.bad else cell.fault.text
            lines.append(_shadow_line(prefix + text, [cell]))
        if len(faulty) > 1:
            lines.append(_shadow_line(f"{prefix}all malfunctions", faulty))
    return Table(
        f"{section.title}: with a shadow, honest clients",
        [
            *("case", "clients", "alone", "federated minus alone", "served minus alone"),
            *("attack's success alone", "attack's success served"),
        ],
        lines,
        notes=["Mean (worst client of all seeds) after the last round."],
    )


def _shadow_line(case: str, cells: Sequence[ShadowCell]) -> list[TableEntry]:
    alone = [value for cell in cells for value in cell.alone]
    texts = [case, str(len(alone)), _plain(fmean(alone))]
    for gains in ([cell.federated for cell in cells], [cell.served for cell in cells]):
        values = [value for one in gains for value in one]
        texts.append(f"{_signed(fmean(values))} ({_signed(min(values))})")
    for shares in ([c.success_alone for c in cells], [c.success_served for c in cells]):
        values = [value for one in shares for value in one]
        texts.append(_plain(fmean(values)) if values else MISSING)
    return [TableEntry(text) for text in texts]


def _acceptance(section: Section) -> Table | None:
    faults = [NO_FAULT, *section.faults]
    lines = []
    for label in section.labels:
        line = [TableEntry(label)]
        for fault in faults:
            judged = counts(row for row in section.rows if (row.label, row.fault) == (label, fault))
            if fault.kind != CLEAN:
                line.append(
                    TableEntry(_of(judged.malfunctioning_accepted, judged.malfunctioning_judged))
                )
            line.append(TableEntry(_of(judged.honest_rejected, judged.honest_judged)))
        if any(entry.text != MISSING for entry in line[1:]):
            lines.append(line)
    if not lines:
        return None
    return Table(
        f"{section.title}: verdicts",
        [
            *("rule", "no malfunction: honest rejected"),
            *(
                f"{fault.text}: {what}"
                for fault in section.faults
                for what in ("malfunctioning accepted", "honest rejected")
            ),
        ],
        lines,
        notes=["Counted over all judges, rounds, seeds and numbers of bad clients."],
    )


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def accepted_share(judged: Counts) -> float | None:
    return share(judged.malfunctioning_accepted, judged.malfunctioning_judged)


def rejected_share(judged: Counts) -> float | None:
    return share(judged.honest_rejected, judged.honest_judged)


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else MISSING


def _plain(value: float | None) -> str:
    return DIVERGED if value is None else f"{round(value, 1) + 0.0:.1f}"


def _two_digits(value: float | None) -> str:
    return MISSING if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}".replace("-", "−")


def _best(stats: Iterable[Stat]) -> str | None:
    """The best mean as it is shown, so that equal numbers are marked alike.

    A rule with diverged clients is never the best: its mean leaves them out.
    """
    shown = [one.mean for one in stats if one.mean is not None and not one.diverged]
    return _plain(max(shown)) if len(shown) > 1 else None


def _entry(
    found: Stat | None, section: Section, best: str | None, *, signed: bool = False
) -> TableEntry:
    if found is None or found.seeds == 0:
        return TableEntry(MISSING)
    text = DIVERGED
    if found.mean is not None:
        text = _signed(found.mean) if signed else _plain(found.mean)
        if found.std_clients is not None:
            text += f" ± {found.std_clients:.1f}"
        if found.std_seeds is not None:
            text += f" (± {found.std_seeds:.1f})"
    if found.diverged:
        text += f" †{found.diverged}"
    if found.seeds < len(section.seeds):
        text += f" ‡{found.seeds}"
    return TableEntry(text, bold=not found.diverged and _plain(found.mean) == best)


def _notes(stats: Iterable[Stat], section: Section) -> list[str]:
    """Explanations of the marks that occur in a table."""
    all_stats = list(stats)
    notes = ["Mean ± standard deviation over clients."]
    if any(one.std_seeds is not None for one in all_stats):
        notes = [
            "Mean ± standard deviation over clients (± standard deviation over seeds of the"
            " clients' mean)."
        ]
    diverged = sum(one.diverged for one in all_stats)
    if diverged:
        notes.append(
            f"†n: n clients have diverged (no finite score) and are left out of the mean;"
            f" {diverged} of {sum(one.clients for one in all_stats)} in this table."
            f" {DIVERGED}: all of them."
        )
    if any(0 < one.seeds < len(section.seeds) for one in all_stats):
        notes.append(f"‡n: only n of {len(section.seeds)} seeds are there.")
    return notes
