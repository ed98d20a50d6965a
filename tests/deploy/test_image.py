"""One hospital in a container, as docker/README.md says it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from engine import Engine
from pages import block
from waiting import wait_until

LABELS = ("title", "description", "licenses", "version", "revision")


def test_one_hospital_in_a_container(engine: Engine, image: str, tmp_path: Path) -> None:
    engine.docker("tag", image, "lightyear-node")
    (tmp_path / "xray").mkdir()
    (tmp_path / "xray" / "image").write_text("a patient")
    tmp_path.chmod(0o755)
    written = block("docker/README.md", "one hospital")
    lines = f'"$(ly id)" "{another_hospital(engine, image)}"'
    script = written.replace("'LINE' 'LINE' 'LINE'", lines).replace("/srv", str(tmp_path))
    assert lines in script
    assert script.count(str(tmp_path)) == 1
    typed = script.rpartition("docker exec")[0]
    try:
        done = engine.run("bash", "-O", "expand_aliases", "-ec", typed)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: health(engine) == "healthy", "the container is healthy")
        said = engine.run("bash", "-ec", script.removeprefix(typed))
        assert "hospital-a in first-steps" in said.stdout, said
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
    """Its line; it has no more to do here."""
    init = "lightyear-node init b --name hospital-b --address b.example:7443 >/dev/null"
    script = f"{init} && lightyear-node id --home b"
    return engine.docker("run", "--rm", "--entrypoint", "sh", image, "-ec", script)


def health(engine: Engine) -> str:
    return engine.docker("inspect", "-f", "{{.State.Health.Status}}", "lightyear")


def test_the_image_says_what_it_is_and_how_it_ends(engine: Engine, image: str) -> None:
    [about] = json.loads(engine.docker("image", "inspect", image))
    settings = about["Config"]
    assert {f"org.opencontainers.image.{name}" for name in LABELS} <= settings["Labels"].keys()
    assert settings["User"] == "10001:10001"
    assert settings["StopSignal"] == "SIGTERM"
    assert settings["Healthcheck"]["Test"] == ["CMD", "lightyear-node", "health"]
    version = engine.docker("run", "--rm", image, "--version").split()[-1]
    assert settings["Labels"]["org.opencontainers.image.version"] == version


def test_torch_has_a_layer_of_its_own_and_ours_is_small(engine: Engine, image: str) -> None:
    """So that an upgrade moves megabytes, and not torch."""
    listed = engine.docker(
        "history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image
    )
    copies = [int(line.split()[0]) for line in listed.splitlines() if re.search("COPY dir", line)]
    ours, dependencies, torch = copies
    assert ours < dependencies / 20 < torch / 20
