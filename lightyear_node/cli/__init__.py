"""The command line: reads arguments, calls one function, prints what it returned.

Data goes to standard output, words for people to standard error.  Everything heavy is imported
inside the command that needs it, so that `--help` and `status` answer at once.  The only place that
catches our errors: one line and a hint, no traceback unless `--debug` asks for it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lightyear_node.errors import LightyearError

app = typer.Typer(
    name="lightyear-node",
    help="Train a model together with other hospitals: peer to peer, no server, no data leaves.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
peers_app = typer.Typer(help="The sites of the federation.", no_args_is_help=True)
app.add_typer(peers_app, name="peers")
rounds_app = typer.Typer(help="What happened here, round by round.", no_args_is_help=True)
app.add_typer(rounds_app, name="rounds")
audit_app = typer.Typer(
    help="This site's record: does it hold, and do others agree?", no_args_is_help=True
)
app.add_typer(audit_app, name="audit")

_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        from lightyear_node import __version__

        typer.echo(f"lightyear-node {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    global _debug
    _debug = debug


def main() -> None:
    # Each registers its commands.
    from lightyear_node.cli import (  # noqa: F401
        audit,
        check,
        demo,
        keys,
        lab,
        operate,
        renew,
        rounds,
        run,
        watch,
    )

    try:
        app()
    except LightyearError as problem:
        if _debug:
            raise
        print(f"lightyear-node: {problem}", file=sys.stderr)
        if problem.hint:
            print(f"  what to do: {problem.hint}", file=sys.stderr)
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (`| head`) has seen enough.
        sys.stderr.close()
        sys.exit(0)
