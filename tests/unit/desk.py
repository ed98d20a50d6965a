"""The command line as a program calls it, in this process: quick, and its errors as they are."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

import lightyear_node.cli.audit
import lightyear_node.cli.rounds  # noqa: F401
from lightyear_node.cli import app
from lightyear_node.errors import LightyearError


def ran(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def told(*words: str, code: int = 0) -> str:
    ended = ran(*words)
    assert ended.exit_code == code, ended.output
    return ended.output


def data_of(*words: str, code: int = 0) -> Any:
    ended = ran(*words, "--format", "json")
    assert ended.exit_code == code, ended.output
    document = json.loads(ended.stdout)
    assert (document["schema_version"], document["status"]) == ("1", "ok")
    return document["data"]


def refused(*words: str) -> LightyearError:
    """A mistake of the caller: one error with a hint, as `main` prints it."""
    problem = ran(*words).exception
    assert isinstance(problem, LightyearError)
    assert problem.hint
    return problem
