"""Writes tables as Markdown, LaTeX (booktabs), CSV and HTML.  All texts are escaped."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from html import escape

from lightyear_node.lab import html as markup
from lightyear_node.lab.tables import Chapter, Table, TableEntry

WIDE_COLUMNS = 5
"""A table with more columns is scaled to the width of the page."""

_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "−": "$-$",
    "·": r"$\cdot$",
    "—": "---",
    "–": "--",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "γ": r"$\gamma$",
    "τ": r"$\tau$",
    "κ": r"$\kappa$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "\n": " ",
}
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#&~$])")


def markdown(chapters: Iterable[Chapter], note: str = "") -> str:
    parts = ["# Results\n", *([f"**{_md(note)}**\n"] if note else [])]
    for chapter in chapters:
        parts.append(f"## {_md(chapter.title)}\n\n{_md(chapter.about)}\n")
        parts += [_markdown_table(table) for table in chapter.tables]
    return "\n".join(parts)


def latex(chapters: Iterable[Chapter], note: str = "") -> str:
    parts = ["% needs \\usepackage{booktabs} and \\usepackage{graphicx}"]
    parts += [f"% {note}"] if note else []
    number = 0
    for chapter in chapters:
        parts.append(f"% {' '.join(chapter.title.split())}")
        for table in chapter.tables:
            number += 1
            parts.append(_latex_table(table, f"tab:lightyear-{number}"))
    return "\n".join(parts) + "\n"


def comma_separated(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return buffer.getvalue()


def html(table: Table) -> str:
    head = [escape(column) for column in table.columns]
    lines = [[_html_entry(entry) for entry in line] for line in table.lines]
    over = f"<p class='note'>Columns: {escape(table.over)}.</p>" if table.over else ""
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    return f"<h3>{escape(table.title)}</h3>{over}{markup.table(head, lines)}{notes}"


def tex_escape(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


def _md(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _markdown_table(table: Table) -> str:
    head = [table.columns[0], *table.columns[1:]]
    rows = [
        "| " + " | ".join(map(_md, head)) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
        *("| " + " | ".join(map(_md_entry, line)) + " |" for line in table.lines),
    ]
    over = f"Columns: {_md(table.over)}.\n\n" if table.over else ""
    notes = "".join(f"\n{_md(note)}\n" for note in table.notes)
    return f"### {_md(table.title)}\n\n{over}" + "\n".join(rows) + f"\n{notes}"


def _md_entry(entry: TableEntry) -> str:
    return f"**{_md(entry.text)}**" if entry.bold else _md(entry.text)


def _html_entry(entry: TableEntry) -> str:
    return f"<b>{escape(entry.text)}</b>" if entry.bold else escape(entry.text)


def _latex_table(table: Table, label: str) -> str:
    width = len(table.columns)
    head = " & ".join(rf"\textbf{{{tex_escape(column)}}}" for column in table.columns)
    over = ""
    if table.over:
        over = (
            rf" & \multicolumn{{{width - 1}}}{{c}}{{\textbf{{{tex_escape(table.over)}}}}} \\"
            f"\n\\cmidrule(lr){{2-{width}}}\n"
        )
    lines = "\n".join(" & ".join(map(_latex_entry, line)) + r" \\" for line in table.lines)
    body = (
        f"\\begin{{tabular}}{{l{'c' * (width - 1)}}}\n\\toprule\n{over}{head} \\\\\n\\midrule\n"
        f"{lines}\n\\bottomrule\n\\end{{tabular}}"
    )
    if width > WIDE_COLUMNS:
        body = f"\\resizebox{{\\textwidth}}{{!}}{{%\n{body}}}"
    caption = " ".join([table.title + ".", *table.notes])
    return (
        f"\\begin{{table*}}[ht]\n\\centering\n\\caption{{{tex_escape(caption)}}}\n"
        f"\\label{{{label}}}\n{body}\n\\end{{table*}}\n"
    )


def _latex_entry(entry: TableEntry) -> str:
    text = tex_escape(entry.text)
    return rf"\textbf{{{text}}}" if entry.bold else text
