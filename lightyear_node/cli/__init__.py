"""The command line: reads arguments, calls one function, prints what it returned.

Data goes to standard output, words for people to standard error.  Everything heavy is imported
inside the command that needs it, so that `--help` and `status` answer at once.  The only place that
catches our errors: one line and a hint, no traceback unless `--debug` asks for it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

from lightyear_node.cli.common import Format, asked_format, examples, print_error
from lightyear_node.errors import LightyearError

NAME = "lightyear-node"

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNHEALTHY = 3
EXIT_DISK = 4
EXIT_ALREADY_RUNNING = 75
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_FAILED: "failed",
    EXIT_USAGE: "the command is not written like that",
    EXIT_UNHEALTHY: "not healthy, not running, or a check failed",
    EXIT_DISK: "the disk: full, read-only or damaged",
    EXIT_ALREADY_RUNNING: "another node runs in the same folder",
    EXIT_CONFIG: "a setting or a file of yours is wrong",
    EXIT_INTERRUPTED: "interrupted",
}
"""What scripts may rely on; each has a test, and `--help` and docs/commands.md list them."""

app = typer.Typer(
    name=NAME,
    help="Train a model together with other hospitals: peer to peer, no server, no data leaves.",
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
rounds_app = typer.Typer(help="What happened here, round by round.", no_args_is_help=True)
app.add_typer(rounds_app, name="rounds")
audit_app = typer.Typer(
    help="This site's record: does it hold, and do others agree?", no_args_is_help=True
)
app.add_typer(audit_app, name="audit")
model_app = typer.Typer(help="What this site has learned, to take out.", no_args_is_help=True)
app.add_typer(model_app, name="model")

_MODULES = (
    *("demo", "keys", "peers", "check", "run", "watch", "operate", "renew"),
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
    """Each module registers its commands, which `--help` shows in this order."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")


def _run(arguments: list[str]) -> int:
    load_commands()
    for_program = asked_format(arguments) is not Format.TABLE
    try:
        # A program that made a mistake gets it as an object; for people, typer draws it.
        code = app(arguments, prog_name=NAME, standalone_mode=not for_program)
        return int(code or EXIT_OK)
    except LightyearError as problem:
        if _debug:
            raise
        _say(f"{problem}", problem.hint)
        if for_program:
            print_error(str(problem), problem.hint, problem.exit_code)
        return problem.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough.
        sys.stderr.close()
        return EXIT_OK
    except Exception as problem:
        # Typer's own errors; where their class is to be imported from depends on its version.
        words = getattr(problem, "format_message", None)
        if words is None:
            raise
        hint = f"`{NAME} --help` and `{NAME} COMMAND --help` say how"
        _say(words(), hint)
        print_error(words(), hint, EXIT_USAGE)
        return EXIT_USAGE


def _say(message: str, hint: str | None) -> None:
    print(f"{NAME}: {message}", file=sys.stderr)
    if hint:
        print(f"  what to do: {hint}", file=sys.stderr)
