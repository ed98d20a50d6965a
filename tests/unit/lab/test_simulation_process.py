"""Simulations in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lightyear_node.lab.simulation_process import YIELDING_NICE
from tests.support.waiting import wait_until

LOWEST = 19


def test_a_yielding_child_leaves_the_processor_to_others() -> None:
    command = [sys.executable, "-m", "lightyear_node.lab.simulation_process", "--yielding"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        try:
            ours = os.getpriority(os.PRIO_PROCESS, 0)
            expected = min(ours + YIELDING_NICE, LOWEST)
            wait_until(
                lambda: os.getpriority(os.PRIO_PROCESS, child.pid) == expected, "low priority"
            )
            group = Path(f"/proc/{child.pid}/autogroup")
            if group.exists():  # Linux, if its kernel groups processes by session
                wait_until(
                    lambda: group.read_text().split()[-1] == str(YIELDING_NICE), "of its group"
                )
        finally:
            child.kill()
