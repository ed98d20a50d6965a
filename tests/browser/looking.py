"""A page that is being looked at: what it asked for, what it complained about, how it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, expect

PATIENCE_MS = 60_000
"""Generous: a slow machine makes these tests slow, not red."""

expect.set_options(timeout=PATIENCE_MS)

Visit = Callable[..., "Look"]

OPEN: list[Look] = []
"""The pages of the running test: they go before the node does, or would rightly complain."""


@dataclass
class Look:
    page: Page
    address: str
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def at(cls, browser: Browser, address: str, width: int, scheme: Any) -> Look:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        look = cls(page, address)
        page.on("request", lambda request: look.asked.append(request.url))
        page.on("requestfailed", look._failed)
        page.on("pageerror", lambda problem: look.complaints.append(str(problem)))
        page.on("console", look._console)
        page.on("dialog", lambda dialog: look.complaints.append(f"a dialog: {dialog.message}"))
        page.goto(address)
        return look

    def leave(self) -> None:
        if not self.closed:
            self.closed = True
            self.page.context.close()

    def _failed(self, request: Any) -> None:
        if request.failure == "csp":  # wanted, but never sent
            self.asked.remove(request.url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def strangers(self) -> list[str]:
        """What was asked of anybody but the node."""
        ours = urlsplit(self.address).netloc
        return [url for url in self.asked if urlsplit(url).netloc != ours]

    def card(self, name: str) -> Locator:
        heading = self.page.get_by_role("heading", name=name, exact=True)
        return self.page.locator(".card").filter(has=heading)

    def fits(self) -> bool:
        """Whether nothing makes the reader scroll sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def nameless_controls(self) -> list[str]:
        return list(self.page.evaluate(_NAMELESS))

    def faint_texts(self) -> list[str]:
        """Visible texts whose contrast with what is behind them is below 4.5."""
        return list(self.page.evaluate(_FAINT))


_NAMELESS = """() => [...document.querySelectorAll(
    "button, a, select, input, [tabindex='0'], [role=img], svg")]
  .filter((one) => one.checkVisibility() && !one.closest("[aria-hidden=true]"))
  .filter((one) => {
    const by = one.getAttribute("aria-labelledby");
    const names = [one.getAttribute("aria-label"), by && document.getElementById(by).textContent,
      one.closest("label")?.textContent, one.matches("button, a") && one.textContent];
    return !names.some((name) => name && name.trim());
  }).map((one) => one.outerHTML.slice(0, 200))"""

_FAINT = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const ownText = (one) =>
    [...one.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  return [...document.querySelectorAll("body *")]
    .filter((one) => one.checkVisibility() && ownText(one) && !one.closest(".unseen, .skip, svg"))
    .map((one) => {
      const front = numbers(getComputedStyle(one).color);
      const [a, b] = [light(front), light(behind(one))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), one];
    })
    .filter(([ratio]) => ratio < 4.5)
    .map(([ratio, one]) => `${ratio.toFixed(2)}: ${one.outerHTML.slice(0, 120)}`);
}"""
