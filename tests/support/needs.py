"""Skips tests that need an external tool that is missing; in CI they fail instead."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "docker": "docker.io",
    "ip": "iproute2",
    "kubectl": "kubernetes-client",
    "promtool": "prometheus",
    "sha256sum": "coreutils",
    "ss": "iproute2",
    "systemd-analyze": "systemd",
    "tc": "iproute2",
    "umount": "mount",
}
"""Debian packages whose name differs from the tool's."""


def need(missing: str | None) -> None:
    """Skip the test if `missing` gives a reason.  In .ci/run, which sets CI, fail it instead."""
    if missing is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI may not skip tests: {missing}")
    pytest.skip(missing)


def missing_tool(*tools: str) -> str | None:
    """Name the first of these programs that is not on PATH, and its package."""
    for tool in tools:
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed (apt install {PACKAGES.get(tool, tool)})"
    return None


def need_tool(*tools: str) -> None:
    need(missing_tool(*tools))
