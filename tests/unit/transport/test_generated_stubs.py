"""The committed stubs equal those generated from the .proto file, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightyear_node.v1
from lightyear_node.v1 import exchange_pb2, exchange_pb2_grpc
from tests.support.paths import ROOT

COMMITTED = Path(lightyear_node.v1.__file__).parent


def test_committed_stubs_are_up_to_date(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, "proto/lightyear_node/v1/exchange.proto"], cwd=ROOT, check=True)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "lightyear_node/v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in COMMITTED.glob("exchange_pb2*.py*")}
    assert fresh == committed


def test_only_reverse_streams_send_more_than_one_message_to_the_server() -> None:
    service = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"]
    streams = {
        method.name: (method.client_streaming, method.server_streaming)
        for method in service.methods
    }
    assert streams == {
        "Hello": (False, False),
        "Announce": (False, False),
        "Fetch": (False, True),
        "Lend": (True, True),
    }
    assert exchange_pb2_grpc.ExchangeStub
