"""One hospital in a container, as in docker/README.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.doc_pages import block
from tests.support.docker_engine import Engine
from tests.support.waiting import wait_until

LABELS = ("title", "description", "licenses", "version", "revision")


def test_one_hospital_runs_in_a_container(engine: Engine, image: str, tmp_path: Path) -> None:
    engine.docker("tag", image, "lightyear-node")
    (tmp_path / "xray").mkdir()
    (tmp_path / "xray" / "image").write_text("a patient")
    tmp_path.chmod(0o755)
    written = block("docker/README.md", "one hospital")
    lines = f'"$(ly id)" "{another_hospital(engine, image)}"'
    script = written.replace("'LINE' 'LINE' 'LINE'", lines).replace("/srv", str(tmp_path))
    assert lines in script
    assert script.count(str(tmp_path)) == 1
    setup = script.rpartition("docker exec")[0]
    try:
        done = engine.run("bash", "-O", "expand_aliases", "-ec", setup)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: health(engine) == "healthy", "the container is healthy")
        ended = engine.run("bash", "-ec", script.removeprefix(setup))
        assert "hospital-a in first-steps" in ended.stdout, ended
        data = engine.docker("exec", "lightyear", "cat", "/data/image")
        assert data == "a patient"
        refused = engine.run("docker", "exec", "lightyear", "touch", "/data/new")
        assert "Read-only file system" in refused.stderr
        engine.docker("stop", "lightyear")
        assert engine.docker("inspect", "-f", "{{.State.ExitCode}}", "lightyear") == "0"
    finally:
        engine.docker("rm", "-f", "lightyear", check=False)
        engine.docker("volume", "rm", "lightyear", check=False)


def another_hospital(engine: Engine, image: str) -> str:
    """Return the invite of another hospital, which is not started."""
    init = "lightyear-node init b --name hospital-b --address b.example:7443 >/dev/null"
    script = f"{init} && lightyear-node id --home b"
    return engine.docker("run", "--rm", "--entrypoint", "sh", image, "-ec", script)


def health(engine: Engine) -> str:
    return engine.docker("inspect", "-f", "{{.State.Health.Status}}", "lightyear")


def test_the_image_has_labels_and_a_stop_signal(engine: Engine, image: str) -> None:
    [about] = json.loads(engine.docker("image", "inspect", image))
    settings = about["Config"]
    assert {f"org.opencontainers.image.{name}" for name in LABELS} <= settings["Labels"].keys()
    assert settings["User"] == "10001:10001"
    assert settings["StopSignal"] == "SIGTERM"
    assert settings["Healthcheck"]["Test"] == ["CMD", "lightyear-node", "health"]
    version = engine.docker("run", "--rm", image, "--version").split()[-1]
    assert settings["Labels"]["org.opencontainers.image.version"] == version


def test_torch_has_its_own_image_layer(engine: Engine, image: str) -> None:
    """An upgrade transfers megabytes, not torch."""
    listed = engine.docker(
        "history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image
    )
    copies = [int(line.split()[0]) for line in listed.splitlines() if re.search("COPY dir", line)]
    ours, dependencies, torch = copies
    assert ours < dependencies / 20 < torch / 20
