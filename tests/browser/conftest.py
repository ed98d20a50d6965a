"""The node's page in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

from looking import OPEN, Look, Visit
from needs import need


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Of one module only: while it is there, the thread has an event loop that others would meet.
    chromium = shutil.which("chromium")
    need(None if chromium else "there is no chromium (Debian's package `chromium`)")
    with sync_playwright() as playwright:
        # Tests may run as root, where chromium's own sandbox does not work.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages, and in the end no page may have complained or asked anybody but its node."""
    looks = OPEN
    looks.clear()

    def open_page(address: str, *, width: int = 1280, scheme: str = "light") -> Look:
        look = Look.at(browser, address, width, scheme)
        looks.append(look)
        return look

    yield open_page
    for look in looks:
        look.leave()
    for look in looks:
        assert look.strangers() == []
        assert look.complaints == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("sites")
