"""A process that has loaded torch once, and is forked for every job: `python -m` this module.

Loading torch takes three seconds, more than many a small job.  Each line on standard input names
the module to ask and the question; a fork answers it on standard output, as that module would in a
process of its own, and `{"ended": code}` follows.  So every job still has its own process, and what
it leaves behind or dies of is its own affair.
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
    # Whatever a task prints must not come between the answers.
    os.dup2(2, 1)
    for line in sys.stdin:
        module, question = json.loads(line)
        job = os.fork()
        if job == 0:
            _answer(module, question, answers)
        _, status = os.waitpid(job, 0)
        answers.write(json.dumps({"ended": os.waitstatus_to_exitcode(status)}) + "\n")


def _load() -> None:
    """Also what torch itself loads only at the first optimizer; no thread may run yet."""
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()
    importlib.import_module("lightyear_node.worker.site")


def _answer(module: str, question: Any, answers: Any) -> None:
    code = 1
    try:
        importlib.import_module(module).answer_all(question, answers)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # a process of its own would print this and end, too
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        answers.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
