"""The page of real nodes, of which one malfunctions: what is seen, by whom, and when."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asking import DEADLINE_S, PATIENT, SEED, A, B, C
from looking import Look, Visit
from playwright.sync_api import expect

from lightyear_node.config.site import Malfunction
from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.federation import Federation, Statuses, lay_out

ENDLESS = 5000


@pytest.fixture(scope="module")
def federation(browser: object, folder: Callable[[], Path]) -> Iterator[Federation]:
    """Site-c sends its weights with flipped signs, and nobody ever finishes."""
    homes = lay_out(
        folder(),
        [A, B, C],
        seed=SEED,
        rounds=ENDLESS,
        barrier=PATIENT,
        malfunctions={C: Malfunction(kind="sfa")},
    )
    with Federation(homes) as sites:
        sites.wait_until(_some_rounds_are_done, DEADLINE_S)
        yield sites


def _some_rounds_are_done(statuses: Statuses) -> bool:
    return all(status is not None and status["round"] >= 3 for status in statuses.values())


@pytest.fixture
def address(federation: Federation) -> str:
    return f"http://{federation.homes[A].http_address}/"


def test_the_bad_site_is_seen_at_once_with_its_reason(address: str, visit: Visit) -> None:
    look = visit(address)
    bad = look.card(C)
    expect(bad).to_contain_text("✗ rejected")
    expect(bad).to_contain_text("its weights are farther from ours")
    expect(bad).to_contain_text("in a row")
    expect(look.page.locator(".card").first).to_contain_text(C)
    expect(look.page.locator(".attention")).to_contain_text(f"{C} was rejected")
    needle = bad.get_by_role("img").get_attribute("aria-label")
    assert needle is not None
    assert re.fullmatch(r"Agreement 0\.\d\d; at least 0\.60 is needed", needle)
    expect(look.card(B)).to_contain_text("✓ accepted")


def test_the_drawer_explains_and_is_reached_by_keyboard(address: str, visit: Visit) -> None:
    look = visit(address)
    expect(look.card(C)).to_be_visible()
    question = f"Why was {C} rejected?"
    _tab_to(look, question)
    look.page.keyboard.press("Enter")
    drawer = look.page.get_by_role("dialog", name=question)
    expect(drawer).to_contain_text("Distance of its weights from ours")
    expect(drawer).to_contain_text("✗ above the limit")
    expect(drawer).to_contain_text("at most 0.500 is allowed")
    expect(drawer).to_contain_text(f"--peer {C}")
    assert look.page.evaluate("document.activeElement.closest('dialog') !== null")
    # Tab goes round within the drawer, to the round's verdicts and back.
    _tab_to(look, "All verdicts of round")
    look.page.keyboard.press("Enter")
    expect(drawer.get_by_text("Our update")).to_be_hidden()
    rounds = look.page.get_by_role("dialog")
    expect(rounds.locator(".verdicts code")).to_have_count(2)
    assert len(rounds.locator(".verdicts code").first.inner_text()) == 64
    look.page.keyboard.press("Escape")
    expect(rounds).to_be_hidden()
    assert look.page.evaluate("document.activeElement.getAttribute('aria-label')") == question


def _tab_to(look: Look, name: str) -> None:
    said = "[document.activeElement.getAttribute('aria-label'), document.activeElement.textContent]"
    for _ in range(100):
        look.page.keyboard.press("Tab")
        label, text = look.page.evaluate(said)
        if (label or text).startswith(name):
            return
    pytest.fail(f"no control `{name}` is reached with the Tab key")


def test_the_history_grows_by_itself(address: str, visit: Visit) -> None:
    look = visit(address)
    newest = look.page.locator("#rounds tbody tr button").first
    before = int(newest.inner_text())
    expect(newest).not_to_have_text(str(before))
    assert int(newest.inner_text()) > before
    expect(look.page.locator("#news")).to_contain_text("is completed")
    assert look.page.locator("#agreement .cross").count() > 0
    newest.focus()
    look.page.keyboard.press("Enter")
    expect(look.page.get_by_role("dialog", name="Round ")).to_contain_text("Our update")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_and_has_a_name(address: str, visit: Visit, scheme: str) -> None:
    look = visit(address, scheme=scheme)
    look.card(C).get_by_role("button").wait_for()
    assert look.nameless_controls() == []
    assert look.faint_texts() == []
    look.card(C).get_by_role("button").click()
    expect(look.page.get_by_role("dialog")).to_contain_text("What was measured")
    assert look.nameless_controls() == []
    assert look.faint_texts() == []


def test_dark_and_light_follow_the_reader(address: str, visit: Visit) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    shown = {
        scheme: visit(address, scheme=scheme).page.evaluate(ground) for scheme in ("light", "dark")
    }
    assert shown["light"] != shown["dark"]


def test_nothing_scrolls_sideways_on_a_phone(address: str, visit: Visit) -> None:
    look = visit(address, width=360)
    look.card(C).get_by_role("button").click()
    expect(look.page.get_by_role("dialog")).to_contain_text("In the record")
    assert look.fits()
    drawer = look.page.get_by_role("dialog")
    assert drawer.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    look.page.keyboard.press("Escape")
    assert look.fits()


def test_the_policy_lets_nothing_foreign_run(address: str, visit: Visit) -> None:
    look = visit(address)
    look.card(C).wait_for()
    refused = look.page.evaluate(
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
    assert look.page.evaluate("window.hurt") is None
    expect(look.card(C)).to_be_visible()
    assert look.strangers() == []
    look.complaints.clear()


def test_a_node_that_is_gone_is_said_so_until_it_is_back(
    federation: Federation, address: str, visit: Visit
) -> None:
    look = visit(address)
    look.card(C).wait_for()
    banner = look.page.get_by_role("alert")
    expect(banner).to_be_hidden()
    federation.kill(A)
    federation.wait_for_exit(A)
    expect(banner).to_contain_text("No answer from site-a since")
    expect(look.page.locator("body")).to_have_class("stale")
    expect(look.card(C)).to_be_visible()
    federation.start(A)
    expect(banner).to_be_hidden(timeout=DEADLINE_S * 1000)
    expect(look.page.locator("body")).not_to_have_class("stale")
    # Chromium itself complains of every request that nobody answers.
    look.complaints = [text for text in look.complaints if "ERR_" not in text]


def test_all_sites_on_one_page(federation: Federation, visit: Visit) -> None:
    homes = list(federation.homes.values())
    with serving(homes, {C: "sfa"}) as address:
        look = visit(address)
        matrix = look.page.get_by_role("region", name="Who accepts whom")
        expect(matrix.locator("td.rejected")).not_to_have_count(0)
        rows = matrix.locator("tbody tr")
        expect(rows.nth(0).locator("td").last).to_contain_text("✗")
        expect(rows.nth(0).locator("td").nth(1)).to_contain_text("✓")
        expect(rows.nth(2)).to_contain_text("sends flipped signs")
        look.page.get_by_label("Which site's view").get_by_role("button", name=B).click()
        expect(look.page.get_by_role("heading", level=1)).to_have_text(B)
        expect(look.card(A)).to_be_visible()
        assert look.nameless_controls() == []
        look.page.set_viewport_size({"width": 360, "height": 800})
        assert look.fits()
