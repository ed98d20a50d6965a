"""Links between the documentation pages: every target exists, including the section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "docker/*.md", "deploy/**/*.md", "tests/**/*.md")
    for page in ROOT.glob(pattern)
)
_CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:|^//")


def links(text: str) -> list[str]:
    """The link targets of a page, without other web sites and without code."""
    found = _LINK.findall(_CODE.sub("", text))
    return [target for target in found if not _EXTERNAL.match(target)]


def sections(page: Path) -> set[str]:
    """The anchors that GitHub creates for the headings of a page."""
    headings = re.findall(r"^#+ +(.+?)\s*$", _without_code_blocks(page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def _without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_links_are_found() -> None:
    text = "[a](b.md) ![p](q.png) [![i](j.svg)](k.md) `[no](x)` [w](https://example.org) [s](#t)\n"
    assert links(text + "```\n[no](y)\n```\n[z](../z.md#part)") == [
        "b.md", "q.png", "k.md", "#t", "../z.md#part"
    ]  # fmt: skip


def test_the_pages_are_found() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {"README.md", "ARCHITECTURE.md", "docs/operators/README.md", "docker/README.md"} <= names
    assert {"deploy/systemd/README.md", "deploy/kustomize/README.md"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_target_exists(page: Path) -> None:
    missing = []
    for link in links(page.read_text()):
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (section and target.suffix == ".md" and section not in sections(target)):
            missing.append(link)
    assert not missing, f"{page.relative_to(ROOT)} has broken links: {missing}"


@pytest.mark.parametrize("folder", ["docs", "docs/operators", "docs/runbooks", "docs/decisions"])
def test_an_index_lists_every_page_of_its_folder(folder: str) -> None:
    listed = set(links((ROOT / folder / "README.md").read_text()))
    assert {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"} <= listed
