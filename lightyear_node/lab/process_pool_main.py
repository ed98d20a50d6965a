"""Loads torch once and forks for every job: `python -m` this module.

Loading torch takes three seconds, longer than many small jobs.  Each line on standard input is a
module and a job; a fork calls that module's `answer_all` with it, which writes to standard output,
and `{"ended": code}` follows.  So every job has its own process and cannot affect the next.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    _load()
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    # What a task prints goes to stderr, not between the answers.
    os.dup2(2, 1)
    # A job that is killed cannot write what is left in a buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for line in sys.stdin:
        module, job = json.loads(line)
        child = os.fork()
        if child == 0:
            _answer(module, job, answers)
        _, status = os.waitpid(child, 0)
        answers.write(json.dumps({"ended": os.waitstatus_to_exitcode(status)}) + "\n")


def _load() -> None:
    """Load torch and what its first optimizer step loads; start no thread before a fork."""
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()
    importlib.import_module("lightyear_node.worker.site")


def _answer(module: str, job: Any, answers: Any) -> None:
    code = 1
    try:
        importlib.import_module(module).answer_all(job, answers)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # printed, as by the interpreter at its end
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        answers.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
