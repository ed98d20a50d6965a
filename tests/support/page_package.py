"""Installs the package that a documentation page describes, and runs commands with it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from lightyear_node.lab.federation import package_environment
from tests.support.installed_package import write_metadata
from tests.support.page_commands import PROGRAM


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def documented_commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "bash")).splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"{PROGRAM} ")]


def write_modules(page: Path, folder: Path) -> None:
    """Write the Python files of a page; blocks with the same file name follow each other."""
    files: dict[str, str] = {}
    for source in blocks(page, "python"):
        if named := re.match(r"# (\w+\.py)\n", source):
            files[named[1]] = files.get(named[1], "") + source
    for name, source in files.items():
        (folder / name).write_text(source)


def installed(page: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a shell after the page's `pip install` into `folder`.

    The module and its metadata are on the path; pip itself would download its build tools.
    """
    project = tomllib.loads(blocks(page, "toml")[0])["project"]
    [(group, points)] = project["entry-points"].items()
    write_metadata(folder, points, package=project["name"], version=project["version"], group=group)
    write_modules(page, folder)
    return environment(folder)


def environment(folder: Path) -> dict[str, str]:
    """Our environment with the modules in `folder`."""
    outer = package_environment()
    path = os.pathsep.join(part for part in (str(folder), outer.get("PYTHONPATH")) if part)
    return {**outer, "PYTHONPATH": path, "COLUMNS": "100", "NO_COLOR": "1"}


def run(*words: str, cwd: Path, environment: dict[str, str], code: int = 0) -> str:
    """Run the program; return its standard output, or for an error both outputs."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout if code == 0 else ended.stdout + ended.stderr
