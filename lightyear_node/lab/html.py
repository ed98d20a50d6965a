"""HTML of the reports: one file without scripts or requests.

Texts are escaped here, unless a function states that it takes HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

POLICY = (
    "<meta http-equiv='Content-Security-Policy'"
    " content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
)
STYLE = """
:root { --ground: #fff; --ink: #1f2328; --faint: #656d76; --line: #e4e7eb; --bad: #b54a00;
  --yes: #0b5c8f; --no: #b54a00; --yes-ground: #d3e6f5; --no-ground: #fbdcc8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171c; --ink: #e6e8eb; --faint: #9ba3ae; --line: #2b3038; --bad: #ff9a57;
    --yes: #9bd2f5; --no: #ffb98c; --yes-ground: #17405e; --no-ground: #6b3008; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
.over { margin: 0; color: var(--faint); font-size: .9rem; }
h1 { margin: .2rem 0 .4rem; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 .2rem; font-size: 1.15rem; }
.lead { margin: 0 0 1.5rem; color: var(--faint); font-size: 1.05rem; max-width: 60rem; }
.note { margin: 0 0 .8rem; color: var(--faint); font-size: .92rem; max-width: 48rem; }
img { display: block; width: 100%; height: auto; }
section { margin-top: 2.6rem; padding-top: 1.6rem; border-top: 1px solid var(--line); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { padding: .38rem 1.1rem .38rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--faint); font-weight: 500; font-size: .88rem; }
tbody th, tfoot th { font-weight: 500; white-space: nowrap; }
tfoot th, tfoot td { border-bottom: 0; color: var(--faint); }
.numbers td, .numbers thead th:not(:first-child) { text-align: right; }
.matrix th, .matrix td { border-bottom: 0; padding: .15rem .3rem; text-align: center; }
.matrix tbody th { text-align: left; padding-right: 1rem; }
.yes, .no, .none { display: inline-block; padding: .1rem .55rem; border-radius: .35rem;
  white-space: nowrap; }
.yes { background: var(--yes-ground); color: var(--yes); }
.no { background: var(--no-ground); color: var(--no); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.bad::after { content: " (malfunctioning)"; font-weight: 400; font-size: .85em; }
.matrix .bad::after, thead .bad::after { content: " ✗"; }
.none { color: var(--faint); }
code { font-size: .88em; color: var(--faint); margin-right: .3rem; }
@media print { section { break-inside: avoid; } }
"""


def section(title: str, note: str, content: str) -> str:
    about = f"<p class='note'>{escape(note)}</p>" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{about}\n{content}\n</section>"


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    last: Sequence[str] | None = None,
    kind: str = "numbers",
) -> str:
    """A table; its cells are HTML."""

    def row(cells: Sequence[str], tag: str = "td") -> str:
        first, *others = cells
        return f"<tr><th scope='row'>{first}</th>" + "".join(
            f"<{tag}>{cell}</{tag}>" for cell in others
        )

    body = "".join(row(cells) + "</tr>" for cells in rows)
    top = f"<thead>{row(head, 'th')}</tr></thead>" if head else ""
    foot = f"<tfoot>{row(last)}</tr></tfoot>" if last else ""
    return f"<div class='wide'><table class='{kind}'>{top}<tbody>{body}</tbody>{foot}</table></div>"


def picture(light: bytes, dark: bytes, about: str) -> str:
    on_light, on_dark = (
        "data:image/png;base64," + base64.b64encode(png).decode() for png in (light, dark)
    )
    return (
        "<picture>"
        f"<source media='(prefers-color-scheme: dark)' srcset='{on_dark}'>"
        f"<img src='{on_light}' alt='{escape(about)}'></picture>"
    )
