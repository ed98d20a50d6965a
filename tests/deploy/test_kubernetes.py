"""The pod of deploy/kustomize, run by a container engine as a cluster would run it.

Without a cluster, this test mounts configuration, secrets and volumes with the permissions that
Kubernetes sets, runs the containers one after another, and calls the probes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.doc_pages import block
from tests.support.docker_engine import Engine
from tests.support.needs import need_tool
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

ASK = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:" + sys.argv[1], timeout=5).status)
except (OSError, urllib.error.HTTPError) as problem:
    print(problem)
"""

Plain = dict[str, Any]


class Cluster:
    """One pod."""

    def __init__(self, engine: Engine, image: str, objects: dict[str, Plain], folder: Path) -> None:
        self._engine, self._image, self._folder = engine, image, folder
        self._objects = objects
        self._pod = objects["StatefulSet"]["spec"]["template"]["spec"]
        self._group = self._pod["securityContext"]["fsGroup"]

    def make_volumes(self) -> None:
        """Create the volumes; one without a claim is empty in every new pod."""
        claims = self._objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
        kept = [claim["metadata"]["name"] for claim in claims]
        for name in kept:
            self._make(name, 0o2775)
        for volume in self._pod["volumes"]:
            folder = self._folder / volume["name"]
            if "emptyDir" in volume:
                shutil.rmtree(folder, ignore_errors=True)
                self._make(volume["name"], 0o2777)
            elif "configMap" in volume:
                self._fill(self._make(volume["name"], 0o2755), "ConfigMap", volume["configMap"])
            else:
                assert "secret" in volume, f"unsupported kind of volume: {volume}"
                self._fill(self._make(volume["name"], 0o2750), "Secret", volume["secret"])

    def run(self, container: Plain, *options: str) -> str:
        confined = container["securityContext"]
        assert confined == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        user = self._pod["securityContext"]
        command = [
            "--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(self._group),
            "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--memory", container["resources"]["limits"]["memory"].removesuffix("i"), *options,
        ]  # fmt: skip
        for one in container.get("env", []):
            command += ["--env", f"{one['name']}={one['value']}"]
        for mount in container["volumeMounts"]:
            if mount["mountPath"] != "/dev/shm":  # the engine provides its own
                rights = ":ro" if mount.get("readOnly") else ""
                command += ["-v", f"{self._folder / mount['name']}:{mount['mountPath']}{rights}"]
        first, *others = container.get("command", [""])
        entry = ["--entrypoint", first] if first else []
        return self._engine.docker(
            "run", *command, *entry, self._image, *others, *container.get("args", [])
        )

    def start(self) -> None:
        self.make_volumes()
        for container in self._pod["initContainers"]:
            self.run(container, "--rm")
        [node] = self._pod["containers"]
        self.run(node, "-d", "--name", "pod")

    def probe(self, kind: str) -> str:
        """Probe as a cluster does, without a token."""
        [node] = self._pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in node["ports"]}
        asked = node[kind]["httpGet"]
        address = f"{ports[asked['port']]}{asked['path']}"
        return self._engine.docker("exec", "pod", "python3", "-c", ASK, address)

    def _make(self, name: str, mode: int) -> Path:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        os.chown(folder, 0, self._group)
        folder.chmod(mode)
        return folder

    def _fill(self, folder: Path, kind: str, source: Plain) -> None:
        for name, text in self._objects[kind]["data"].items():
            file = folder / name
            file.write_bytes(b64decode(text) if kind == "Secret" else text.encode())
            os.chown(file, 0, self._group)
            file.chmod(source.get("defaultMode", 0o644))


def run_block(script: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def rendered(tmp_path: Path) -> dict[str, Plain]:
    """Return the manifests by kind, after the preparation that the README describes."""
    need_tool("kubectl")
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    written = block("deploy/kustomize/README.md", "site")
    make, look, rest = written.partition("kubectl kustomize")
    run_block(make, tmp_path)
    agree(tmp_path)
    run_block(look + rest.partition("|")[0] + "> all.yaml", tmp_path)
    return {one["kind"]: one for one in yaml.safe_load_all((tmp_path / "all.yaml").read_text())}


def agree(folder: Path) -> None:
    """Create peers.yaml with another hospital, which is not started."""
    run_block("lightyear-node init other --name hospital-b --address b.example:7443", folder)
    ids = [run_block(f"lightyear-node id --home {home}", folder) for home in ("site", "other")]
    agreed = "deploy/kustomize/base/site/peers.yaml"
    (folder / agreed).unlink()
    output = " ".join(f"'{line.strip()}'" for line in ids)
    run_block(f"lightyear-node peers add --peers {agreed} --federation two {output}", folder)


def test_the_pod_runs_and_restarts(
    engine: Engine, image: str, rendered: dict[str, Plain], tmp_path: Path
) -> None:
    volumes = tmp_path / "volumes"
    volumes.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    cluster = Cluster(engine, image, rendered, volumes)
    try:
        for _ in range(2):
            cluster.start()
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                wait_until(lambda kind=kind: cluster.probe(kind) == "200", kind)
            output = engine.docker("exec", "pod", "lightyear-node", "status")
            assert "hospital-a in two" in output
            engine.docker("stop", "--time", "60", "pod")
            assert engine.docker("inspect", "-f", "{{.State.ExitCode}}", "pod") == "0"
            engine.docker("rm", "pod")
    finally:
        print(engine.run("docker", "logs", "pod"))
        engine.docker("rm", "-f", "pod", check=False)
