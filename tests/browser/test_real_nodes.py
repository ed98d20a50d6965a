"""The dashboard of real nodes, one of which malfunctions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.federation import Federation, Statuses, lay_out
from lightyear_node.lab.malfunctions import MalfunctionConfig
from tests.support.site_queries import DEADLINE_S, PATIENT, SEED, A, B, C
from tests.support.watched_page import OpenPage, WatchedPage

ENDLESS = 5000


@pytest.fixture(scope="module")
def federation(browser: object, folder: Callable[[], Path]) -> Iterator[Federation]:
    """Site-c sends its weights with flipped signs; the rounds do not end during the tests."""
    homes = lay_out(
        folder(),
        [A, B, C],
        seed=SEED,
        rounds=ENDLESS,
        barrier=PATIENT,
        malfunctions={C: MalfunctionConfig(kind="sfa")},
    )
    with Federation(homes) as sites:
        sites.wait_until(_some_rounds_are_done, DEADLINE_S)
        yield sites


def _some_rounds_are_done(statuses: Statuses) -> bool:
    return all(status is not None and status["round"] >= 3 for status in statuses.values())


@pytest.fixture
def address(federation: Federation) -> str:
    return f"http://{federation.homes[A].http_address}/"


def test_a_rejected_site_is_shown_first_with_its_reason(address: str, open_page: OpenPage) -> None:
    view = open_page(address)
    bad = view.card(C)
    expect(bad).to_contain_text("✗ rejected")
    expect(bad).to_contain_text("is farther from ours than a round of training explains")
    expect(bad).to_contain_text("in a row")
    expect(view.page.locator(".card").first).to_contain_text(C)
    expect(view.page.locator(".attention")).to_contain_text(f"{C} was rejected")
    gauge = bad.get_by_role("img").get_attribute("aria-label")
    assert gauge is not None
    assert re.fullmatch(r"Agreement 0\.\d\d; at least 0\.60 is needed", gauge)
    expect(view.card(B)).to_contain_text("✓ accepted")


def test_the_drawer_works_with_the_keyboard(address: str, open_page: OpenPage) -> None:
    view = open_page(address)
    expect(view.card(C)).to_be_visible()
    question = f"Why was {C} rejected?"
    _tab_to(view, question)
    view.page.keyboard.press("Enter")
    drawer = view.page.get_by_role("dialog", name=question)
    expect(drawer).to_contain_text("Distance of its weights from ours")
    expect(drawer).to_contain_text("✗ above the limit")
    expect(drawer).to_contain_text("at most 0.500 is allowed")
    expect(drawer).to_contain_text(f"--peer {C}")
    assert view.page.evaluate("document.activeElement.closest('dialog') !== null")
    # The Tab key stays within the drawer.
    _tab_to(view, "All verdicts of round")
    view.page.keyboard.press("Enter")
    expect(drawer.get_by_text("Our update")).to_be_hidden()
    rounds = view.page.get_by_role("dialog")
    expect(rounds.locator(".verdicts code")).to_have_count(2)
    assert len(rounds.locator(".verdicts code").first.inner_text()) == 64
    view.page.keyboard.press("Escape")
    expect(rounds).to_be_hidden()
    # The hidden drawer has a button of this name, too.
    expect(view.page.locator("main").get_by_label(question, exact=True).first).to_be_focused()


def _tab_to(view: WatchedPage, name: str) -> None:
    script = (
        "[document.activeElement.getAttribute('aria-label'), document.activeElement.textContent]"
    )
    for _ in range(100):
        view.page.keyboard.press("Tab")
        label, text = view.page.evaluate(script)
        if (label or text).startswith(name):
            return
    pytest.fail(f"the Tab key does not reach `{name}`")


def test_new_rounds_appear_automatically(address: str, open_page: OpenPage) -> None:
    view = open_page(address)
    newest = view.page.locator("#rounds tbody tr button").first
    before = int(newest.inner_text())
    expect(newest).not_to_have_text(str(before))
    assert int(newest.inner_text()) > before
    expect(view.page.locator("#news")).to_contain_text("is completed")
    assert view.page.locator("#agreement .cross").count() > 0
    newest.focus()
    view.page.keyboard.press("Enter")
    expect(view.page.get_by_role("dialog", name="Round ")).to_contain_text("Our update")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_and_controls_have_names(
    address: str, open_page: OpenPage, scheme: str
) -> None:
    view = open_page(address, scheme=scheme)
    view.card(C).get_by_role("button").wait_for()
    assert view.unnamed_controls() == []
    assert view.low_contrast_texts() == []
    view.card(C).get_by_role("button").click()
    expect(view.page.get_by_role("dialog")).to_contain_text("Measurements")
    assert view.unnamed_controls() == []
    assert view.low_contrast_texts() == []


def test_the_colour_scheme_follows_the_browser(address: str, open_page: OpenPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    shown = {
        scheme: open_page(address, scheme=scheme).page.evaluate(background)
        for scheme in ("light", "dark")
    }
    assert shown["light"] != shown["dark"]


def test_a_phone_needs_no_horizontal_scrolling(address: str, open_page: OpenPage) -> None:
    view = open_page(address, width=360)
    view.card(C).get_by_role("button").click()
    expect(view.page.get_by_role("dialog")).to_contain_text("In the journal")
    assert view.fits_width()
    drawer = view.page.get_by_role("dialog")
    assert drawer.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    view.page.keyboard.press("Escape")
    assert view.fits_width()


def test_the_content_security_policy_blocks_foreign_code(address: str, open_page: OpenPage) -> None:
    view = open_page(address)
    view.card(C).wait_for()
    refused = view.page.evaluate(
        """async () => {
          const refused = [];
          document.addEventListener("securitypolicyviolation",
            (event) => refused.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.hurt = 1";
          document.body.append(script);
          const sheet = document.createElement("style");
          sheet.textContent = "body { display: none }";
          document.body.append(sheet);
          await fetch("http://192.0.2.1/").catch(() => {});
          const image = document.createElement("img");
          await new Promise((done) => {
            image.onerror = done;
            image.src = "http://192.0.2.1/x.png";
          });
          return refused;
        }"""
    )
    assert {"script-src-elem", "style-src-elem", "connect-src", "img-src"} <= set(refused)
    assert view.page.evaluate("window.hurt") is None
    expect(view.card(C)).to_be_visible()
    assert view.foreign_requests() == []
    view.errors.clear()


def test_a_stopped_node_is_reported_until_it_is_back(
    federation: Federation, address: str, open_page: OpenPage
) -> None:
    view = open_page(address)
    view.card(C).wait_for()
    banner = view.page.get_by_role("alert")
    expect(banner).to_be_hidden()
    federation.kill(A)
    federation.wait_for_exit(A)
    expect(banner).to_contain_text("No answer from site-a since")
    expect(view.page.locator("body")).to_have_class("stale")
    expect(view.card(C)).to_be_visible()
    federation.start(A)
    expect(banner).to_be_hidden(timeout=DEADLINE_S * 1000)
    expect(view.page.locator("body")).not_to_have_class("stale")
    # Chromium logs every failed request as an error.
    view.errors = [text for text in view.errors if "ERR_" not in text]


def test_one_page_shows_all_sites(federation: Federation, open_page: OpenPage) -> None:
    homes = list(federation.homes.values())
    with serving(homes, {C: "sfa"}) as address:
        view = open_page(address)
        matrix = view.page.get_by_role("region", name="Who accepts whom")
        expect(matrix.locator("td.rejected")).not_to_have_count(0)
        rows = matrix.locator("tbody tr")
        expect(rows.nth(0).locator("td").last).to_contain_text("✗")
        expect(rows.nth(0).locator("td").nth(1)).to_contain_text("✓")
        expect(rows.nth(2)).to_contain_text("sends flipped signs")
        view.page.get_by_label("Which site's view").get_by_role("button", name=B).click()
        expect(view.page.get_by_role("heading", level=1)).to_have_text(B)
        expect(view.card(A)).to_be_visible()
        assert view.unnamed_controls() == []
        view.page.set_viewport_size({"width": 360, "height": 800})
        assert view.fits_width()
