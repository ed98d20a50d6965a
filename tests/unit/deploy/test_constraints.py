"""constraints.txt names one tested version of everything that is ever installed."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line[0] != "#"]
    assert all(found), "every line is NAME==VERSION"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def test_all_we_ask_for_is_pinned_to_what_we_allow() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = list(project["build-system"]["requires"]) + list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    pinned = pins()
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name != "lightyear-node":
            assert name in pinned, f"{name} is not pinned: make pins"
            assert requirement.specifier.contains(pinned[name]), f"{requirement}: {pinned[name]}"


def test_what_others_ask_for_is_pinned_as_well() -> None:
    """Of what our dependencies bring along, as far as it is installed here."""
    by_name = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    reached = {"lightyear-node"}
    ahead = ["lightyear-node"]
    while ahead:
        for text in by_name[ahead.pop()].requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name in by_name and name not in reached:
                reached.add(name)
                ahead.append(name)
    assert len(reached) > 20, "the walk has come somewhere"
    assert not reached - {"lightyear-node", "setuptools"} - pins().keys(), "make pins"
