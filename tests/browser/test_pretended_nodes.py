"""What a real node rarely or never tells: nobody, everybody, very much, and text that is markup."""

from __future__ import annotations

from typing import Any

import pretended_node
from looking import Visit
from playwright.sync_api import expect
from pretended_node import peer, round_of, status

HOSTILE = "<script>window.hurt=1</script><img src=x onerror=window.hurt=1>"


def test_a_site_alone_before_its_first_round(visit: Visit) -> None:
    told = status([], phase="starting", round=0, problems=["the node is starting"])
    with pretended_node.serving(told) as address:
        look = visit(address)
        expect(look.page.get_by_text("There is no other site in peers.yaml yet.")).to_be_visible()
        expect(look.page.get_by_text("the node is starting")).to_be_visible()
        expect(look.page.get_by_text("No round has been completed yet.")).to_be_visible()


def test_one_round_is_drawn(visit: Visit) -> None:
    told = status([peer("site-b")])
    with pretended_node.serving(told, [round_of(0, ["site-b"])]) as address:
        look = visit(address)
        expect(look.page.locator("#agreement .dot")).to_have_count(1)
        expect(look.page.locator("#metric .dot")).to_have_count(2)
        expect(look.page.get_by_text("All is well:")).to_be_visible()


def test_fifty_sites_and_two_thousand_rounds(visit: Visit) -> None:
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
    told = status([peer(name, **(rejected if name == bad else {})) for name in names], round=2000)
    with pretended_node.serving(told, rounds) as address:
        look = visit(address, width=360)
        expect(look.page.locator(".card")).to_have_count(50)
        # The problem comes first, wherever it stands in peers.yaml.
        expect(look.page.locator(".card").first).to_contain_text(bad)
        expect(look.page.locator(".attention")).to_contain_text(f"{bad} was rejected 2000 times")
        assert look.fits()
        rows = look.page.locator("#rounds tbody tr")
        before = rows.count()
        for _ in range(4):
            look.page.get_by_role("button", name="Show older rounds").click()
        expect(rows).to_have_count(before + 200)
        expect(rows.last).to_contain_text(str(2000 - before - 200))
        assert look.fits()


def test_what_others_say_is_text_and_never_markup(visit: Visit) -> None:
    nasty = peer(
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
    told = status([nasty], waiting=HOSTILE, federation=HOSTILE, problems=[HOSTILE])
    event = {"seq": 1, "time": "2030-01-01T00:00:00Z", "level": "warning", "message": HOSTILE}
    with pretended_node.serving(told, [round_of(0, [HOSTILE], [HOSTILE])], [event]) as address:
        look = visit(address)
        expect(look.card(HOSTILE)).to_be_visible()
        expect(look.page.locator("#events")).to_contain_text(HOSTILE)
        expect(look.page.locator(".phase + .about")).to_have_text(HOSTILE)
        look.page.get_by_role("button", name="Why was <script>").click()
        expect(look.page.get_by_text("This cannot be shown")).to_be_visible()
        assert look.page.locator("body script, body img").count() == 0
        assert look.page.evaluate("window.hurt") is None
        look.complaints = [text for text in look.complaints if "status of 400" not in text]


def test_marks_besides_the_verdict(visit: Visit) -> None:
    peers = [
        peer("site-b", verdict="missing", reason="blocked", reason_about="it is blocked here"),
        peer("site-c", phase="paused", left_out=3),
        peer("site-d", state="unreachable", about="no route to host"),
        peer("site-e", verdict="rejected", reason_about="it is in quarantine"),
    ]
    told = status(peers, blocked=["site-b"], quarantined=["site-e"], paused=True)
    with pretended_node.serving(told) as address:
        look = visit(address)
        expect(look.card("site-b")).to_contain_text("blocked here")
        expect(look.card("site-c")).to_contain_text("paused by its operator")
        expect(look.card("site-c")).to_contain_text("rounds closed without it: 3")
        expect(look.card("site-d")).to_contain_text("unreachable")
        expect(look.card("site-e")).to_contain_text("in quarantine")
        expect(look.page.locator(".attention")).to_contain_text("our operator has paused this node")
        assert look.nameless_controls() == []
        assert look.faint_texts() == []
