"""The import contracts in pyproject.toml: each one fails when a forbidden import is added."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PACKAGE, ROOT

LAYERS = "Packages in layers: each imports only from below"
GRPC = "gRPC and protobuf only in transport"
STUBS = "Protobuf stubs only in transport"
TENSORS = "Tensors only in worker, training, learning and lab"
NO_TORCH = "The daemon never loads torch, not even indirectly"
BUNDLE = "No module imports the task of a MONAI bundle"
NUMPY = "numpy only in the codec, worker, learning and lab"
WORKER = "The worker never imports the network"
PURE = "The protocol is pure: no clock, no network, no disk, no tensors"


@pytest.fixture(scope="module")
def package_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contracts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def contracts(folder: Path) -> dict[str, bool]:
    """Run lint-imports in `folder`; map each contract's name to whether it is kept."""
    run = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*\))?$", run.stdout, re.MULTILINE)
    assert found, run.stdout + run.stderr
    kept = {name: state == "KEPT" for name, state in found}
    assert run.returncode == (0 if all(kept.values()) else 1)
    return kept


def test_the_package_keeps_every_contract(package_copy: Path) -> None:
    assert contracts(package_copy) == dict.fromkeys(
        [LAYERS, GRPC, STUBS, TENSORS, NO_TORCH, BUNDLE, NUMPY, WORKER, PURE], True
    )


@pytest.mark.parametrize(
    ("module", "planted", "broken"),
    [
        pytest.param("observe/log.py", "import grpc", {GRPC}, id="grpc outside transport"),
        pytest.param(
            "observe/log.py",
            "from lightyear_node.v1 import exchange_pb2",
            {STUBS},
            id="protobuf stubs outside transport",
        ),
        pytest.param("cli/peers.py", "import google.protobuf", {GRPC}, id="protobuf in the cli"),
        pytest.param("node/home.py", "import torch", {TENSORS, NO_TORCH}, id="torch in node"),
        pytest.param("tools/preflight.py", "import torch", {TENSORS}, id="torch in tools"),
        pytest.param(
            "node/home.py",
            "import lightyear_node.worker.site",
            {NO_TORCH},
            id="torch through another module in node",
        ),
        pytest.param(
            "node/home.py",
            "import lightyear_node.integrations.monai_bundle",
            {BUNDLE},
            id="the bundle's task in node",
        ),
        pytest.param(
            "integrations/tracking/csv_files.py",
            "import torch",
            {TENSORS, NO_TORCH},
            id="torch in another integration",
        ),
        pytest.param(
            "node/home.py",
            "import lightyear_node.training",
            {NO_TORCH},
            id="the training verbs in node",
        ),
        pytest.param(
            "training/standalone.py", "import sklearn", {TENSORS}, id="sklearn in training"
        ),
        pytest.param("storage/blobs.py", "import numpy", {NUMPY}, id="numpy in storage"),
        pytest.param("transport/client.py", "import numpy", {NUMPY}, id="numpy beside the codec"),
        pytest.param(
            "node/home.py", "import lightyear_node.lab.html", {LAYERS}, id="lab from node"
        ),
        pytest.param(
            "config/fields.py",
            "import lightyear_node.storage.blobs",
            {LAYERS},
            id="an upper layer from a lower one",
        ),
        pytest.param("helpers.py", "VALUE = 1", {LAYERS}, id="a module outside the layers"),
        pytest.param(
            "helpers.py",
            "import grpc, numpy, torch",
            {LAYERS, GRPC, NUMPY, TENSORS},
            id="libraries in a module outside the layers",
        ),
        pytest.param("protocol/events.py", "import time", {PURE}, id="the clock in protocol"),
        pytest.param(
            "worker/task.py",
            "import lightyear_node.transport.limits",
            {LAYERS, WORKER},
            id="transport from worker",
        ),
        pytest.param(
            "learning/guard.py", "import grpc", {GRPC, WORKER}, id="the network in learning"
        ),
    ],
)
def test_a_forbidden_import_breaks_its_contracts(
    package_copy: Path, module: str, planted: str, broken: set[str]
) -> None:
    path = package_copy / PACKAGE.name / module
    before = path.read_text() if path.exists() else None
    path.write_text((before or "") + f"\n{planted}\n")
    try:
        kept = contracts(package_copy)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
    assert {name for name, holds in kept.items() if not holds} == broken
