"""Takes the screenshots of docs/page.md: python tests/browser/screenshots.py [docs/images]

Five real sites run twelve rounds; the last site sends flipped signs.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from lightyear_node.lab.demo_page import serving
from lightyear_node.lab.federation import Federation, Statuses, lay_out, site_names
from lightyear_node.lab.malfunctions import MalfunctionConfig

ROUNDS = 12
DEADLINE_S = 300.0
BYTES_MAX = 250_000
WIDE, PHONE = (1280, 900), (360, 740)


def main(out: Path) -> None:
    names = site_names(5)
    bad = {names[-1]: MalfunctionConfig(kind="sfa")}
    with tempfile.TemporaryDirectory() as folder:
        homes = lay_out(Path(folder), names, seed=7, rounds=ROUNDS, malfunctions=bad)
        with Federation(homes) as sites, sync_playwright() as playwright:
            sites.wait_until(_all_finished, DEADLINE_S)
            chromium = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            node = f"http://{homes[0].http_address}/"
            take(chromium, node, out / "page-light.png", WIDE, "light")
            take(chromium, node, out / "page-dark.png", WIDE, "dark", explained=True)
            take(chromium, node, out / "page-phone.png", PHONE, "light", whole=False)
            with serving(homes, {names[-1]: "sfa"}) as page:
                take(chromium, page, out / "demo-matrix.png", WIDE, "light", whole=False)
            chromium.close()


def _all_finished(statuses: Statuses) -> bool:
    return all(status is not None and status["finished"] for status in statuses.values())


def take(
    browser: Browser,
    address: str,
    path: Path,
    size: tuple[int, int],
    scheme: Any,
    *,
    explained: bool = False,
    whole: bool = True,
) -> None:
    """Save the whole page or its first screen; with the drawer open if `explained`."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme=scheme,
        reduced_motion="reduce",
        device_scale_factor=1 if size[0] > PHONE[0] else 2,
    )
    page = context.new_page()
    page.goto(address)
    page.locator("#rounds tbody tr").nth(ROUNDS - 1).wait_for()
    if explained:
        page.locator(".card.bad button").click()
        page.get_by_text("In the journal").wait_for()
    picture = Image.open(io.BytesIO(page.screenshot(full_page=whole and not explained)))
    context.close()
    # The few pixels of the lines must keep their colours.
    picture.convert("RGB").quantize(256, kmeans=4).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size} bytes")
    if path.stat().st_size > BYTES_MAX:
        sys.exit(f"{path} is larger than {BYTES_MAX} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
