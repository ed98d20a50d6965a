"""Linters and validators accept the deployment files; no cluster is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.needs import need_tool
from tests.support.paths import ROOT

EXPOSURE_MAX = 1.5
OVERLAYS = ("cpu", "gpu", "monitoring")
SCRIPTS = (
    *("docker/make-sites", "docker/pip-install", "deploy/systemd/install.sh"),
    *(".ci/run", ".ci/bare", ".ci/docker-plugins"),
)


def checked(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> Path:
    """Return the path of a tool installed with pip."""
    return Path(sys.executable).parent / name


def test_dockerfile_compose_file_and_scripts_pass_their_linters() -> None:
    checked(tool("hadolint"), "docker/Dockerfile")
    checked(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec",
            "docker/compose.yaml")  # fmt: skip
    checked(tool("shellcheck"), *SCRIPTS)


def test_the_unit_is_sandboxed() -> None:
    need_tool("systemd-analyze")
    unit = "deploy/systemd/lightyear-node.service"
    output = checked("systemd-analyze", "security", "--offline=true", unit)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", output)
    assert found is not None, output
    assert float(found[1]) <= EXPOSURE_MAX
    # systemd knows every setting; the program itself is not installed here.
    verified = subprocess.run(
        ["systemd-analyze", "verify", ROOT / unit], capture_output=True, text=True, check=False
    )
    words = [line for line in verified.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in words if "lightyear-node.service" in line], verified.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_valid_manifests(overlay: str, tmp_path: Path) -> None:
    need_tool("kubectl")
    made = tmp_path / "all.yaml"
    made.write_text(checked("kubectl", "kustomize", f"deploy/kustomize/overlays/{overlay}"))
    objects = {one["kind"]: one for one in yaml.safe_load_all(made.read_text())}
    # It ignores custom kinds with a warning; those are checked here.
    output = checked(tool("kubernetes-validate"), "--strict", made)
    assert output.count("Couldn't find schema") == (overlay == "monitoring")
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    assert objects["StatefulSet"]["spec"]["replicas"] == 1
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in (*pod["containers"], *pod["initContainers"]):
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"] == {"drop": ["ALL"]}
    [node] = pod["containers"]
    assert ("nvidia.com/gpu" in node["resources"]["limits"]) == (overlay == "gpu")
    assert {"Secret", "ConfigMap", "Service", "NetworkPolicy", "Namespace"} <= objects.keys()
    assert ("ServiceMonitor" in objects) == (overlay == "monitoring")
