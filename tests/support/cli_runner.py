"""Runs the command line in this process; errors are returned, not printed."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

import lightyear_node.cli.audit
import lightyear_node.cli.rounds  # noqa: F401
from lightyear_node.cli import app
from lightyear_node.errors import LightyearError


def run_cli(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def output_of(*words: str, code: int = 0) -> str:
    ended = run_cli(*words)
    assert ended.exit_code == code, ended.output
    return ended.output


def data_of(*words: str, code: int = 0) -> Any:
    ended = run_cli(*words, "--format", "json")
    assert ended.exit_code == code, ended.output
    document = json.loads(ended.stdout)
    assert (document["schema_version"], document["status"]) == ("1", "ok")
    return document["data"]


def error_of(*words: str) -> LightyearError:
    """The error of a command that must fail; it has a hint."""
    problem = run_cli(*words).exception
    assert isinstance(problem, LightyearError)
    assert problem.hint
    return problem
