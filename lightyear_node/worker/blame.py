"""What may be told of an exception in the user's code: its type and its place, not its text.

The text may name a file of the training data, and so a patient.  Whoever wants it in the log says
so in node.yaml (`log.task_errors: full`).
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from types import TracebackType

TEXT_CHARS_MAX = 500
_LIBRARIES = tuple(
    os.path.realpath(path)
    for path in {*sysconfig.get_paths().values(), os.path.dirname(os.path.dirname(__file__))}
    if "lib" in path or "lightyear_node" in path
)


def place_of(problem: BaseException) -> str:
    """The deepest line of the user's code, or the deepest of all where none is known to be."""
    frames = [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(problem.__traceback__)
    ]
    # A loader's own processes send the place as text only.
    elsewhere = re.findall(r'File "([^"\n]+)", line (\d+)', str(problem))
    frames += [(file, int(line)) for file, line in elsewhere if file.endswith(".py")]
    users = [frame for frame in frames if not os.path.realpath(frame[0]).startswith(_LIBRARIES)]
    if not frames:
        return ""
    file, line = (users or frames)[-1]
    return f" ({os.path.basename(file)}:{line})"


def blame(problem: BaseException, *, full: bool) -> str:
    name = type(problem).__name__
    if full:
        return f"{name}: {problem}{place_of(problem)}"[:TEXT_CHARS_MAX]
    if isinstance(problem, OSError) and problem.errno:
        name += f": {os.strerror(problem.errno)}"
    return f"{name}{place_of(problem)}"


def keep_texts_out() -> None:
    """Also of exceptions that end a thread, or the worker itself."""

    def tell(kind: type[BaseException], problem: BaseException | None, about: str) -> None:
        place = place_of(problem) if problem is not None else ""
        print(f"{kind.__name__}{place} {about}", file=sys.stderr)

    def ended(
        kind: type[BaseException], problem: BaseException, trace: TracebackType | None
    ) -> None:
        tell(kind, problem, "ended the worker")

    sys.excepthook = ended
    threading.excepthook = lambda args: tell(args.exc_type, args.exc_value, "ended a thread")
    sys.unraisablehook = lambda args: tell(args.exc_type, args.exc_value, "could not be raised")
