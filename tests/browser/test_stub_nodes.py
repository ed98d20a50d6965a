"""The dashboard with rare data: no peers, many peers, many rounds, HTML in texts."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.support import stub_node
from tests.support.stub_node import peer, round_of, status
from tests.support.watched_page import OpenPage

HOSTILE = "<script>window.hurt=1</script><img src=x onerror=window.hurt=1>"


def test_a_site_without_peers_is_shown_before_its_first_round(open_page: OpenPage) -> None:
    data = status([], phase="starting", round=0, problems=["the node is starting"])
    with stub_node.serving(data) as address:
        view = open_page(address)
        expect(view.page.get_by_text("There is no other site in peers.yaml yet.")).to_be_visible()
        expect(view.page.get_by_text("the node is starting")).to_be_visible()
        expect(view.page.get_by_text("No round has been completed yet.")).to_be_visible()


def test_one_round_is_drawn(open_page: OpenPage) -> None:
    data = status([peer("site-b")])
    with stub_node.serving(data, [round_of(0, ["site-b"])]) as address:
        view = open_page(address)
        expect(view.page.locator("#agreement .dot")).to_have_count(1)
        expect(view.page.locator("#metric .dot")).to_have_count(2)
        expect(view.page.get_by_text("All is well:")).to_be_visible()


def test_fifty_sites_and_two_thousand_rounds_are_shown(open_page: OpenPage) -> None:
    names = [f"hospital-{number:02d}-{'of-a-very-long-name-' * 2}x" for number in range(50)]
    bad = names[7]
    rounds = [round_of(number, names, [bad]) for number in range(2000)]
    about = "its weights are far from ours"
    rejected: dict[str, Any] = {
        "verdict": "rejected",
        "reason": "too_far",
        "agreement": 0.4,
        "rejected_in_a_row": 2000,
        "reason_about": about,
    }
    data = status([peer(name, **(rejected if name == bad else {})) for name in names], round=2000)
    with stub_node.serving(data, rounds) as address:
        view = open_page(address, width=360)
        expect(view.page.locator(".card")).to_have_count(50)
        # The problem comes first, whatever the order in peers.yaml.
        expect(view.page.locator(".card").first).to_contain_text(bad)
        expect(view.page.locator(".attention")).to_contain_text(f"{bad} was rejected 2000 times")
        assert view.fits_width()
        rows = view.page.locator("#rounds tbody tr")
        before = rows.count()
        for _ in range(4):
            view.page.get_by_role("button", name="Show older rounds").click()
        expect(rows).to_have_count(before + 200)
        expect(rows.last).to_contain_text(str(2000 - before - 200))
        assert view.fits_width()


def test_texts_of_peers_are_never_interpreted_as_html(open_page: OpenPage) -> None:
    hostile = peer(
        HOSTILE,
        state="refused",
        about=HOSTILE,
        verdict="rejected",
        reason=HOSTILE,
        reason_about=HOSTILE,
        differs=HOSTILE,
        opinion=HOSTILE,
        rejected_in_a_row=3,
    )
    data = status([hostile], waiting=HOSTILE, federation=HOSTILE, problems=[HOSTILE])
    event = {"seq": 1, "time": "2030-01-01T00:00:00Z", "level": "warning", "message": HOSTILE}
    with stub_node.serving(data, [round_of(0, [HOSTILE], [HOSTILE])], [event]) as address:
        view = open_page(address)
        expect(view.card(HOSTILE)).to_be_visible()
        expect(view.page.locator("#events")).to_contain_text(HOSTILE)
        expect(view.page.locator(".phase + .about")).to_have_text(HOSTILE)
        view.page.get_by_role("button", name="Why was <script>").click()
        expect(view.page.get_by_text("This cannot be shown")).to_be_visible()
        assert view.page.locator("body script, body img").count() == 0
        assert view.page.evaluate("window.hurt") is None
        view.errors = [text for text in view.errors if "status of 400" not in text]


def test_each_problem_of_a_site_is_marked_on_its_card(open_page: OpenPage) -> None:
    peers = [
        peer("site-b", verdict="missing", reason="blocked", reason_about="it is blocked here"),
        peer("site-c", phase="paused", left_out=3),
        peer("site-d", state="unreachable", about="no route to host"),
        peer("site-e", verdict="rejected", reason_about="it is in quarantine"),
    ]
    data = status(peers, blocked=["site-b"], quarantined=["site-e"], paused=True)
    with stub_node.serving(data) as address:
        view = open_page(address)
        expect(view.card("site-b")).to_contain_text("blocked here")
        expect(view.card("site-c")).to_contain_text("paused by its operator")
        expect(view.card("site-c")).to_contain_text("rounds closed without it: 3")
        expect(view.card("site-d")).to_contain_text("unreachable")
        expect(view.card("site-e")).to_contain_text("in quarantine")
        expect(view.page.locator(".attention")).to_contain_text("our operator has paused this node")
        assert view.unnamed_controls() == []
        assert view.low_contrast_texts() == []
