"""Runs a node that malfunctions, for demonstrations and tests:

    python -m lightyear_node.lab.faulty_node --malfunction '{"kind": "sfa"}' --peers peers.yaml

This is the ordinary daemon with another worker program, `faulty_worker`.  No setting or environment
variable of `lightyear-node start` selects that program.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from lightyear_node.errors import LightyearError
from lightyear_node.lab import faulty_worker
from lightyear_node.lab.malfunctions import FAULTY_NODE, MalfunctionConfig
from lightyear_node.node.home import Home, load_home
from lightyear_node.node.run import run_node
from lightyear_node.observe.log import set_up


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {FAULTY_NODE}")
    parser.add_argument("--malfunction", required=True, type=_malfunction, metavar="JSON")
    parser.add_argument("--peers", required=True, type=Path, help="the federation's peers.yaml")
    parser.add_argument("--home", default=Path(), type=Path, help="the node's folder")
    arguments = parser.parse_args()

    def load() -> Home:
        now = datetime.now(UTC)
        return load_home(arguments.home, arguments.peers, environment=os.environ, flags={}, now=now)

    try:
        home = load()
        log = set_up(home.config.log.level, home.config.log.format)
        program = (
            faulty_worker.__name__,
            faulty_worker.MALFUNCTION + arguments.malfunction.model_dump_json(),
        )
        log.warning(
            "this node malfunctions: %s", arguments.malfunction.kind, extra={"event": "start"}
        )
        run_node(home, log, load, worker_program=program)
    except LightyearError as problem:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)


def _malfunction(text: str) -> MalfunctionConfig:
    try:
        return MalfunctionConfig.model_validate_json(text).checked()
    except (ValidationError, LightyearError) as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


if __name__ == "__main__":
    main()
