"""The wheel and the source archive work without internet access."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.doc_pages import block
from tests.support.paths import ROOT

IMPORTS = """
import google.protobuf
from lightyear_node.v1 import exchange_pb2, exchange_pb2_grpc
message = exchange_pb2.Greeting(boot_id="x")
assert exchange_pb2.Greeting.FromString(message.SerializeToString()) == message
print(google.protobuf.__version__)
"""


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


def test_the_archives_contain_the_expected_files(built: Path) -> None:
    [wheel], [source] = built.glob("*.whl"), built.glob("*.tar.gz")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "lightyear_node/node/daemon.py" in inside
    assert "lightyear_node/lab/paper_tables.json" in inside
    assert not [name for name in inside if name.startswith(("tests/", "docs/"))]
    with tarfile.open(source) as manifests:
        names = {name.partition("/")[2] for name in manifests.getnames()}
    wanted = {"proto/lightyear_node/v1/exchange.proto", "docker/Dockerfile", "Makefile"}
    assert wanted | {"deploy/systemd/lightyear-node.service", "constraints.txt"} <= names
    assert not [name for name in names if name.endswith(".whl")]


def test_a_clean_environment_without_internet_runs_the_demo(
    built: Path, wheelhouse: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    [wheel] = built.glob("*.whl")
    run(
        binaries / "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-index", "--find-links", wheelhouse, f"{wheel}[demo]",
    )  # fmt: skip
    output = run(
        binaries / "lightyear-node", "demo", "--sites", "3", "--rounds", "3",
        "--no-view", "--format", "json", "--keep", tmp_path / "kept",
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    counted = json.loads(output)["data"]["verdicts"]
    assert counted["malfunctioning_accepted"] == 0
    assert counted["malfunctioning_rejected"] > 0


@pytest.mark.parametrize("release", ["==6.31.1", ">=7,<8"])
def test_the_stubs_work_with_the_oldest_and_the_newest_protobuf(
    release: str, tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--target", tmp_path, f"protobuf{release}")
    output = run(sys.executable, "-c", IMPORTS, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert output.startswith(release.lstrip("=>")[0])


@pytest.mark.usefixtures("wheelhouse")
def test_the_wheelhouse_is_described_and_verified() -> None:
    page = "docs/operators/air-gap.md"
    run("bash", "-ec", block(page, "describe"), cwd=ROOT)
    bill = json.loads((ROOT / "build" / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "lightyear-node"
    listed = {component["name"].lower() for component in bill["components"]}
    assert {"torch", "grpcio", "protobuf", "cryptography", "safetensors", "zstandard"} <= listed
    assert not {"pytest", "cyclonedx-bom"} & listed, "it lists exactly the files of the wheelhouse"
    output = run("bash", "-ec", block(page, "compare"), cwd=ROOT)
    assert output.count(": OK") >= len(listed) - 1, output
