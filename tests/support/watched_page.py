"""A page in a browser: its requests, its errors, and checks of its accessibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Locator, Page, expect

TIMEOUT_MS = 60_000
"""Generous, so that tests do not fail on slow machines."""

expect.set_options(timeout=TIMEOUT_MS)

OpenPage = Callable[..., "WatchedPage"]

OPEN_PAGES: list[WatchedPage] = []
"""The pages of the running test; closed before the node, or they would report errors."""


@dataclass
class WatchedPage:
    page: Page
    address: str
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def at(cls, browser: Browser, address: str, width: int, scheme: Any) -> WatchedPage:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        view = cls(page, address)
        page.on("request", lambda request: view.requests.append(request.url))
        page.on("requestfailed", view.note_failed)
        page.on("pageerror", lambda problem: view.errors.append(str(problem)))
        page.on("console", view.note_console)
        page.on("dialog", lambda dialog: view.errors.append(f"dialog: {dialog.message}"))
        page.goto(address)
        return view

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.page.context.close()

    def note_failed(self, request: Any) -> None:
        if request.failure == "csp":  # blocked by the policy, never sent
            self.requests.remove(request.url)

    def note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def foreign_requests(self) -> list[str]:
        """Requests to other hosts than the node."""
        ours = urlsplit(self.address).netloc
        return [url for url in self.requests if urlsplit(url).netloc != ours]

    def card(self, name: str) -> Locator:
        heading = self.page.get_by_role("heading", name=name, exact=True)
        return self.page.locator(".card").filter(has=heading)

    def fits_width(self) -> bool:
        """Whether the page has no horizontal scrolling."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def unnamed_controls(self) -> list[str]:
        return list(self.page.evaluate(_UNNAMED))

    def low_contrast_texts(self) -> list[str]:
        """Visible texts with a contrast ratio below 4.5."""
        return list(self.page.evaluate(_LOW_CONTRAST))


_UNNAMED = """() => [...document.querySelectorAll(
    "button, a, select, input, [tabindex='0'], [role=img], svg")]
  .filter((one) => one.checkVisibility() && !one.closest("[aria-hidden=true]"))
  .filter((one) => {
    const by = one.getAttribute("aria-labelledby");
    const names = [one.getAttribute("aria-label"), by && document.getElementById(by).textContent,
      one.closest("label")?.textContent, one.matches("button, a") && one.textContent];
    return !names.some((name) => name && name.trim());
  }).map((one) => one.outerHTML.slice(0, 200))"""

_LOW_CONTRAST = """() => {
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
