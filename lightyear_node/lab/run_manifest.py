"""The manifest of a run: suite, versions and data, so that it can be repeated.

Contains no absolute path and no host name, because result folders are shared.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab.process_pool import THREADS
from lightyear_node.lab.results_reader import SCHEMA_VERSION
from lightyear_node.lab.suite import Suite
from lightyear_node.lab.tasks import BUILT_IN, DATA_VARIABLE

PACKAGES = ("lightyear-node", "torch", "numpy")
DEVICE = "cpu"
"""Simulated sites train on the CPU: equal seeds give equal results on one machine."""


def describe(
    suite: Suite, text: str, *, jobs: int, acceptance: int, data: Path | None, cores: int
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite.name,
        "about": suite.about,
        "suite_text": text,
        "suite_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "jobs": jobs,
        "acceptance_jobs": acceptance,
        "seeds": suite.seeds,
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            "os": platform.system(),
            "arch": platform.machine(),
        },
        "commit": _commit(),
        "device": DEVICE,
        "cores": cores,
        "threads_per_job": int(THREADS["OMP_NUM_THREADS"]),
        "data": _digests(suite, data),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_data(suite: Suite, data: Path | None) -> None:
    """Raise if a data file is missing, before the first job."""
    for file, task in _files(suite).items():
        if data is None:
            raise ConfigError(
                f"task {task} reads prepared data",
                hint=f"name its directory: --data DIR, or {DATA_VARIABLE}",
            )
        if not (data / file).is_file():
            raise ConfigError(
                f"{data}: there is no {file}, which task {task} reads",
                hint="name the directory of the prepared data with --data DIR",
            )


def _files(suite: Suite) -> dict[str, str]:
    """The files that the suite's built-in tasks read, with the task of each."""
    blocks = [block for block in (*suite.grids, *suite.acceptance) if block.task in BUILT_IN]
    return {file: block.task for block in blocks for file in BUILT_IN[block.task].reads(block.args)}


def _digests(suite: Suite, data: Path | None) -> dict[str, str]:
    """SHA-256 of the data files, by path below the data directory."""
    found = {}
    for name in sorted(_files(suite)):
        if data is not None and (data / name).is_file():
            with (data / name).open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _commit() -> str | None:
    """The commit of the package's source, with `+` if files differ; None if it is installed."""
    source = Path(__file__).parents[2]
    git = shutil.which("git")
    if git is None or not (source / ".git").exists():
        return None
    try:
        commit = _output(git, source, "rev-parse", "HEAD")
        changed = _output(git, source, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changed else commit


def _output(git: str, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [git, "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    if package == "lightyear-node":
        from lightyear_node import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
