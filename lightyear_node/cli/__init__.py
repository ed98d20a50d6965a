"""The command line: parses arguments, calls one function, prints its result.

Modules:

    common          shared options and output formats
    completion      shell completion of peers and rounds
    keys            `init`, `id`
    peers           `peers add|remove|list|show`
    check           `check`, `peers ping`
    start           `start`
    status          `status`, `health`
    status_view     drawing of the status
    status_polling  `status --watch`
    control         `pause`, `resume`, `stop`, `peers block|unblock|unquarantine`
    renew           `renew`
    rounds          `rounds`, `explain`
    audit           `audit`
    model           `model`
    score           `score`
    demo            `demo`
    lab             `experiment`, `report`, `simulate`

Data goes to standard output, messages to standard error.  Heavy imports happen inside the command
that needs them, so `--help` and `status` answer at once.  This is the only place that catches
`LightyearError`: one line and a hint, a traceback only with `--debug`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from lightyear_node.cli.common import Format, asked_format, examples, print_error
from lightyear_node.errors import AlreadyRunning, ConfigError, LightyearError, StoreError

NAME = "lightyear-node"

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNHEALTHY = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "invalid usage",
    EXIT_UNHEALTHY: "not healthy, not running, or a check failed",
    StoreError.exit_code: "disk full, read-only or damaged",
    AlreadyRunning.exit_code: "another node is running in the same folder",
    ConfigError.exit_code: "invalid configuration or input file",
    EXIT_INTERRUPTED: "interrupted",
}
"""Stable for scripts; `--help` and docs/commands.md list them."""

app = typer.Typer(
    name=NAME,
    help="Train a model together with other hospitals: peer to peer, without a server."
    " Data stays at its site.",
    epilog=examples(
        f"{NAME} demo", f"{NAME} init site-a --name site-a --address a.example.org:7443"
    )
    + "\n\nExit codes:\n"
    + "\n".join(f"  {code:>3}  {about}" for code, about in EXIT_CODES.items()),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
peers_app = typer.Typer(help="The sites of the federation.", no_args_is_help=True)
app.add_typer(peers_app, name="peers")
rounds_app = typer.Typer(help="Recorded rounds of this site.", no_args_is_help=True)
app.add_typer(rounds_app, name="rounds")
audit_app = typer.Typer(
    help="Verify, export and compare this site's journal.", no_args_is_help=True
)
app.add_typer(audit_app, name="audit")
model_app = typer.Typer(help="List and export this site's models.", no_args_is_help=True)
app.add_typer(model_app, name="model")

_MODULES = (
    *("demo", "keys", "peers", "check", "start", "status", "control", "renew"),
    *("rounds", "audit", "model", "score", "lab"),
)
_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        from lightyear_node import __version__

        typer.echo(f"{NAME} {__version__}")
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
    sys.exit(_run(sys.argv[1:]))


def load_commands() -> None:
    """Import the modules, which register their commands in the order that `--help` shows."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")


def _run(arguments: list[str]) -> int:
    load_commands()
    for_program = asked_format(arguments) is not Format.TABLE
    try:
        # With JSON output usage errors are objects, too; otherwise typer prints them.
        code = app(arguments, prog_name=NAME, standalone_mode=not for_program)
        return int(code or EXIT_OK)
    except LightyearError as problem:
        if _debug:
            raise
        _print_message(f"{problem}", problem.hint)
        if for_program:
            print_error(str(problem), problem.hint, problem.exit_code)
        return problem.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has closed it.
        sys.stderr.close()
        return EXIT_OK
    except Exception as problem:
        # Typer's usage errors; the module of their class depends on its version.
        format_message = getattr(problem, "format_message", None)
        if format_message is None:
            raise
        hint = f"see `{NAME} --help` and `{NAME} COMMAND --help`"
        _print_message(format_message(), hint)
        print_error(format_message(), hint, EXIT_USAGE)
        return EXIT_USAGE


def _print_message(message: str, hint: str | None) -> None:
    print(f"{NAME}: {message}", file=sys.stderr)
    if hint:
        print(f"  what to do: {hint}", file=sys.stderr)
