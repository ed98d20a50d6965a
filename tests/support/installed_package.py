"""Installs a package as pip does: a module and its metadata in a directory for the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightyear_node.learning.rules.plugins import GROUP


def install_package(
    folder: Path,
    module: str,
    source: str,
    points: Mapping[str, str],
    *,
    package: str = "our-rules",
    version: str = "0.1",
    group: str = GROUP,
) -> None:
    """Write the module and its entry points into a folder; the caller adds that to the path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    write_metadata(folder, points, package=package, version=version, group=group)


def write_metadata(
    folder: Path, points: Mapping[str, str], *, package: str, version: str, group: str
) -> None:
    """Write what pip records of a package: its name, version and entry points."""
    metadata = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    )
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
