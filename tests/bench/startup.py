"""Measures the start of the command line, relative to the start of Python.

`--help` and `status` must not load torch.  Prints one JSON object.

    python tests/bench/startup.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time

from lightyear_node.lab.federation import package_environment

REPEATS = 9
COMMANDS = {
    "python": ["-c", "pass"],
    "help": ["-m", "lightyear_node", "--help"],
    "status": ["-m", "lightyear_node", "status"],
    "torch": ["-c", "import torch"],
}


def measure() -> dict[str, list[float]]:
    """Run all commands alternately, so that other load affects them alike."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(REPEATS):
            for name, arguments in COMMANDS.items():
                started = time.perf_counter()
                subprocess.run(
                    [sys.executable, *arguments],
                    cwd=folder,
                    env=package_environment(),
                    capture_output=True,
                    check=False,
                )
                times[name].append(time.perf_counter() - started)
    return times


def main() -> None:
    seconds = {name: statistics.median(taken) for name, taken in measure().items()}
    print(
        json.dumps(
            {
                "bench": "startup",
                "seconds": {name: round(value, 3) for name, value in seconds.items()},
                "help_over_python": round(seconds["help"] / seconds["python"], 1),
                "status_over_python": round(seconds["status"] / seconds["python"], 1),
                "torch_over_status": round(seconds["torch"] / seconds["status"], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
