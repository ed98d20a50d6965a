"""A Docker engine for tests: the running one, or one that is started for them.

Without a registry, the base image is built from Debian packages with debootstrap.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from tests.support.paths import ROOT

BASE_IMAGE = "lightyear-base:bookworm"
IMAGE = "lightyear-node:test"
START_S = 60.0


class NoEngine(Exception):
    """No Docker engine is available; the text says why."""


class Engine:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemon: subprocess.Popen[bytes] | None = None
        self.environment = dict(os.environ)
        if not self._answers():
            self._start()
        self.base_image = os.environ.get("BASE_IMAGE") or self._base_image()

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.terminate()
            self._daemon.wait(60)

    def docker(self, *arguments: str, check: bool = True) -> str:
        done = self.run("docker", *arguments)
        assert not check or done.returncode == 0, f"docker {arguments}: {done.stderr}"
        return done.stdout.strip()

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def has_image(self, name: str) -> bool:
        return self.run("docker", "image", "inspect", name).returncode == 0

    def _answers(self) -> bool:
        if shutil.which("docker") is None:
            return False
        return self.run("docker", "info").returncode == 0

    def _start(self) -> None:
        for tool in ("docker", "dockerd", "docker-compose"):
            if shutil.which(tool) is None:
                raise NoEngine(f"no Docker engine runs here, and there is no `{tool}` to start one")
        if os.geteuid() != 0:
            raise NoEngine("no Docker engine runs here, and only root could start one")
        self._folder.mkdir(parents=True, exist_ok=True)
        socket = f"unix://{self._folder}/docker.sock"
        log = self._folder / "dockerd.log"
        self._daemon = subprocess.Popen(
            [
                "dockerd", "--host", socket, "--data-root", self._folder / "data",
                "--exec-root", self._folder / "exec", "--pidfile", self._folder / "pid",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.environment["DOCKER_HOST"] = socket
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise NoEngine("dockerd does not start: " + log.read_text()[-500:])
            time.sleep(0.5)

    def _base_image(self) -> str:
        if not self.has_image(BASE_IMAGE):
            if shutil.which("debootstrap") is None:
                raise NoEngine("there is no base image, and no `debootstrap` to make one")
            tree = self._folder / "base"
            shutil.rmtree(tree, ignore_errors=True)
            packages = "python3,python3-venv,ca-certificates"
            made = self.run(
                "debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(tree)
            )
            assert made.returncode == 0, made.stdout[-2000:] + made.stderr
            packed = f"tar -C {tree} -c . | docker import - {BASE_IMAGE}"
            imported = self.run("sh", "-c", packed)
            assert imported.returncode == 0, imported.stderr
            shutil.rmtree(tree)
        return BASE_IMAGE
