"""constraints.txt pins every direct and indirect dependency."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[0] != "#"]
    assert all(found), "every line is NAME==VERSION"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def test_direct_dependencies_are_pinned_to_allowed_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = list(project["build-system"]["requires"]) + list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        required += extra
    pinned = pins()
    for requirement in map(Requirement, required):
        name = canonicalize_name(requirement.name)
        if name != "lightyear-node":
            assert name in pinned, f"{name} is not pinned: make pins"
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"


def test_indirect_dependencies_are_pinned() -> None:
    """As far as they are installed here."""
    by_name = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    reached = {"lightyear-node"}
    pending = ["lightyear-node"]
    while pending:
        for text in by_name[pending.pop()].requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and name in by_name and name not in reached:
                reached.add(name)
                pending.append(name)
    assert len(reached) > 20, "too few dependencies found"
    assert not reached - {"lightyear-node", "setuptools"} - pins().keys(), "make pins"
