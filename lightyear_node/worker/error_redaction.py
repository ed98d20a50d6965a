"""Error texts for the log: our own in full, those of the user's code as type and place only.

The text of a user's exception may name a file of the training data, and so a patient.  Our own
exceptions are recognized by their class, not by the place where they were raised: our code also
calls the user's.  `log.task_errors: full` in node.yaml shows all texts.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from types import TracebackType

from lightyear_node.errors import LightyearError

TEXT_CHARS_MAX = 500
_LIBRARY_FOLDERS = tuple(
    os.path.realpath(path)
    for path in {*sysconfig.get_paths().values(), os.path.dirname(os.path.dirname(__file__))}
    if "lib" in path or "lightyear_node" in path
)


def place_of(problem: BaseException) -> str:
    """File and line of the deepest frame in the user's code, or of the deepest frame if none is."""
    frames = [
        (frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(problem.__traceback__)
    ]
    # Worker processes of a data loader send the place as text only.
    elsewhere = re.findall(r'File "([^"\n]+)", line (\d+)', str(problem))
    frames += [(file, int(line)) for file, line in elsewhere if file.endswith(".py")]
    users = [
        frame for frame in frames if not os.path.realpath(frame[0]).startswith(_LIBRARY_FOLDERS)
    ]
    if not frames:
        return ""
    file, line = (users or frames)[-1]
    return f" ({os.path.basename(file)}:{line})"


def redacted(problem: BaseException, *, full: bool, chars_max: int = TEXT_CHARS_MAX) -> str:
    """One line about an exception; with `full` including the text that the user's code gave it."""
    if isinstance(problem, LightyearError):
        return str(problem) if full else _ours(problem)
    name = type(problem).__name__
    if full:
        return f"{name}: {problem}{place_of(problem)}"[:chars_max]
    if isinstance(problem, OSError) and problem.errno:
        name += f": {os.strerror(problem.errno)}"
    return f"{name}{place_of(problem)}"


def hides_text(problem: BaseException) -> bool:
    """Whether `redacted` leaves out a part of the text unless it is `full`."""
    return not isinstance(problem, LightyearError) or problem.private is not None


def _ours(problem: LightyearError) -> str:
    place = (
        "" if problem.__cause__ is None or not hides_text(problem) else place_of(problem.__cause__)
    )
    # A data loader's process appends a traceback of the user's code to the text.
    return problem.public.partition("\n")[0] + place


def redact_uncaught() -> None:
    """Redact also exceptions that end a thread or the worker itself."""

    def report(kind: type[BaseException], problem: BaseException | None, about: str) -> None:
        place = place_of(problem) if problem is not None else ""
        print(f"{kind.__name__}{place} {about}", file=sys.stderr)

    def ended(
        kind: type[BaseException], problem: BaseException, trace: TracebackType | None
    ) -> None:
        report(kind, problem, "ended the worker")

    sys.excepthook = ended
    threading.excepthook = lambda args: report(args.exc_type, args.exc_value, "ended a thread")
    sys.unraisablehook = lambda args: report(args.exc_type, args.exc_value, "could not be raised")
