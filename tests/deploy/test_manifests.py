"""What is deployed is well formed, as far as its own checkers can tell without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from engine import ROOT
from needs import need

EXPOSURE_MAX = 1.5
OVERLAYS = ("cpu", "gpu", "monitoring")
SCRIPTS = (
    *("docker/make-sites", "docker/pip-install", "deploy/systemd/install.sh"),
    *(".ci/run", ".ci/docker-plugins"),
)


def checked(*command: str | Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> Path:
    """One that pip has installed beside Python."""
    return Path(sys.executable).parent / name


def test_dockerfile_compose_file_and_scripts() -> None:
    checked(tool("hadolint"), "docker/Dockerfile")
    checked(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec",
            "docker/compose.yaml")  # fmt: skip
    checked(tool("shellcheck"), *SCRIPTS)


def test_the_unit_exposes_little() -> None:
    need(None if shutil.which("systemd-analyze") else "there is no systemd-analyze")
    unit = "deploy/systemd/lightyear-node.service"
    said = checked("systemd-analyze", "security", "--offline=true", unit)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) <= EXPOSURE_MAX
    # Nothing in it is unknown to systemd; the program itself is not installed here.
    verified = subprocess.run(
        ["systemd-analyze", "verify", ROOT / unit], capture_output=True, text=True, check=False
    )
    words = [line for line in verified.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in words if "lightyear-node.service" in line], verified.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize(overlay: str, tmp_path: Path) -> None:
    need(None if shutil.which("kubectl") else "there is no kubectl")
    made = tmp_path / "all.yaml"
    made.write_text(checked("kubectl", "kustomize", f"deploy/kustomize/overlays/{overlay}"))
    objects = {one["kind"]: one for one in yaml.safe_load_all(made.read_text())}
    # It knows no foreign kinds, and says so without failing: those are ours to look at.
    said = checked(tool("kubernetes-validate"), "--strict", made)
    assert said.count("Couldn't find schema") == (overlay == "monitoring")
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
