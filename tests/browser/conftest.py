"""The dashboard in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.needs import need_tool
from tests.support.watched_page import OPEN_PAGES, OpenPage, WatchedPage


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Per module: Playwright's event loop in this thread would disturb other tests.
    need_tool("chromium")
    chromium = shutil.which("chromium")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work as root.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages; fails if one of them reported errors or sent requests to other hosts."""
    pages = OPEN_PAGES
    pages.clear()

    def open_one(address: str, *, width: int = 1280, scheme: str = "light") -> WatchedPage:
        view = WatchedPage.at(browser, address, width, scheme)
        pages.append(view)
        return view

    yield open_one
    for view in pages:
        view.close()
    for view in pages:
        assert view.foreign_requests() == []
        assert view.errors == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    return lambda: tmp_path_factory.mktemp("sites")
