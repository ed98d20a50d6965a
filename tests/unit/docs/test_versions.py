"""The version is defined once, in `lightyear_node/__init__.py`; every copy of it is equal."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from lightyear_node import __version__
from tests.support.paths import ROOT

COPIES = {
    "CITATION.cff": r"^version: (\S+)$",
    "docker/Dockerfile": r"^ARG VERSION=(\S+)$",
    "deploy/kustomize/overlays/cpu/kustomization.yaml": r'newTag: "([\d.]+)"',
    "deploy/kustomize/overlays/gpu/kustomization.yaml": r"newTag: ([\d.]+)-cuda",
}


@pytest.mark.parametrize("path", COPIES)
def test_every_copy_of_the_version_is_equal(path: str) -> None:
    found = re.findall(COPIES[path], (ROOT / path).read_text(), re.MULTILINE)
    assert found == [__version__]


def test_the_build_reads_the_version_from_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "lightyear_node/__init__.py"


def test_the_changelog_has_a_section_for_the_version_and_for_what_follows() -> None:
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", __version__]


def test_pre_commit_uses_the_pinned_ruff() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    [ruff] = [hook["rev"] for hook in hooks if hook["repo"].endswith("ruff-pre-commit")]
    assert f"ruff=={ruff.removeprefix('v')}" in (ROOT / "constraints.txt").read_text().split()


def test_the_citation_names_the_paper_of_the_readme() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    readme = " ".join((ROOT / "README.md").read_text().replace("> ", "").split())
    assert citation["title"] in readme
    assert all(author["family-names"] in readme for author in citation["authors"])
