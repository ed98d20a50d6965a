"""The report: a correct headline, self-contained, and safe in a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.lab import demo_report
from lightyear_node.lab.demo_plot import draw, headline_and_detail
from lightyear_node.lab.demo_results import DemoResults
from lightyear_node.lab.plot_style import DARK
from lightyear_node.types import PeerName
from tests.support.staged_demo import MakeResults, rounds_of

PNG = b"\x89PNG\r\n\x1a\n"


class Outline(HTMLParser):
    """Collects what a page would load; checks that its tags are closed in order."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def history_of(results: DemoResults) -> demo_report.History:
    names = [site.name for site in results.sites]
    return {
        name: rounds_of([other for other in names if other != name], rounds=results.rounds)
        for name in names
    }


def page_of(results: DemoResults) -> str:
    return demo_report.page(results, history_of(results), PNG, PNG)


@pytest.mark.parametrize(
    ("federated", "together"),
    [
        (0.9, "Learning together beats learning alone"),
        (0.8, "Learning together is as good as learning alone"),
        (0.7, "Learning together did worse than learning alone"),
    ],
)
@pytest.mark.parametrize(
    ("bad", "let_in", "about_the_bad"),
    [
        (0, False, ""),
        (1, False, "the malfunctioning site is kept out"),
        (1, True, "the malfunctioning site got in 9 times"),
        (2, False, "the 2 malfunctioning sites are kept out"),
    ],
)
def test_the_headline_matches_the_numbers(
    make_results: MakeResults,
    federated: float,
    together: str,
    bad: int,
    let_in: bool,
    about_the_bad: str,
) -> None:
    results = make_results(alone=0.8, federated=federated, bad=bad, bad_accepted=let_in)
    both_good_or_both_bad = (federated < 0.8) == let_in
    joint = ", and " if both_good_or_both_bad else ", but "
    assert headline_and_detail(results)[0] == together + (joint + about_the_bad if bad else "")


def test_the_line_below_has_the_numbers(make_results: MakeResults) -> None:
    detail = headline_and_detail(make_results(alone=0.8, federated=0.9, averaged=0.3))[1]
    for part in ("0.800 alone", "0.900 federated", "0.300 if everyone", "27 of 27", "0 of 9"):
        assert part in detail


@pytest.mark.parametrize("sites", [2, 4, 12])
def test_the_figure_is_drawn_for_any_number_of_sites(make_results: MakeResults, sites: int) -> None:
    results = make_results(sites=sites)
    light, dark = draw(results), draw(results, DARK)
    assert light.startswith(PNG)
    assert dark.startswith(PNG)
    assert light != dark


def test_the_figure_is_drawn_without_scores(make_results: MakeResults) -> None:
    results = make_results()
    unscored = [replace(one, score=None) for one in results.judgements]
    assert draw(replace(results, judgements=unscored)).startswith(PNG)
    assert draw(replace(results, judgements=[])).startswith(PNG)


def test_three_files_are_written_and_the_numbers_are_the_results(
    make_results: MakeResults,
) -> None:
    results = make_results()
    demo_report.write(results, history_of(results))
    folder = results.report.parent
    assert (folder / "report.png").read_bytes().startswith(PNG)
    assert json.loads((folder / "results.json").read_text()) == results.to_plain()
    assert "<h1>Learning together beats" in results.report.read_text()


def test_the_page_has_no_script_and_no_request(make_results: MakeResults) -> None:
    text = page_of(make_results())
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    assert len(outline.links) == 2
    assert all(link.startswith("data:image/png;base64,") for link in outline.links)
    assert not {"script", "link", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_the_page_shows_every_verdict_and_its_reason(make_results: MakeResults) -> None:
    text = page_of(make_results())
    assert "<td>27</td><td><code>ok</code>" in text
    assert "<td>9</td><td><code>too_far</code>" in text
    assert text.count("✗ 0.50") == 3
    assert text.count("✓ 0.90") == 9
    assert "prefers-color-scheme: dark" in text


def test_updates_that_did_not_arrive_are_counted_separately(make_results: MakeResults) -> None:
    results = make_results()
    first, *others = results.judgements
    gone = replace(first, delivered=False, accepted=False, reason="unreachable", score=None)
    text = page_of(replace(results, judgements=[gone, *others]))
    assert "not judged</td><td>1</td>" in text


def test_a_round_that_a_site_skipped_is_a_dash(make_results: MakeResults) -> None:
    results = make_results()
    history = {name: list(rounds) for name, rounds in history_of(results).items()}
    del history[PeerName("site-b")][1]
    text = demo_report.page(results, history, PNG, PNG)
    assert "<th scope='row'>1</th><td>0.910</td><td>–</td><td>0.910</td>" in text


def test_names_are_escaped(make_results: MakeResults) -> None:
    results = make_results()
    evil = "<script>alert(1)</script>"
    sites = [replace(results.sites[0], name=PeerName(evil)), *results.sites[1:]]
    history = dict(history_of(results)) | {PeerName(evil): []}
    reasons = [replace(one, reason=evil) for one in results.judgements]
    text = demo_report.page(
        replace(results, federation=evil, sites=sites, judgements=reasons), history, PNG, PNG
    )
    assert "<script" not in text


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written there"):
        demo_report.create_folder(tmp_path / "file" / "below")
    demo_report.create_folder(tmp_path / "deep" / "down")
    assert (tmp_path / "deep" / "down").is_dir()
