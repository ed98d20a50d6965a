"""Prepares one data set: `python -m lightyear_node.lab.prepare heart SOURCE --out DATA`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from lightyear_node.errors import LightyearError
from lightyear_node.lab.prepare.arrays import save

SETS = ("femnist", "heart", "hc18", "isic", "pcam", "retina")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lightyear_node.lab.prepare")
    parser.add_argument("set", choices=SETS)
    parser.add_argument("source", type=Path, help="folder of the public files (docs/data.md)")
    parser.add_argument("--out", required=True, type=Path, help="directory of the prepared sets")
    arguments = parser.parse_args()
    module = importlib.import_module(f"{__package__}.{arguments.set}")
    try:
        for path in save(arguments.out, module.prepare(arguments.source)):
            print(path)
    except LightyearError as problem:
        hint = f"\n  {problem.hint}" if problem.hint else ""
        print(f"{parser.prog}: {problem}{hint}", file=sys.stderr)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main()
