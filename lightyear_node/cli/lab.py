"""`experiment`, `report` and `simulate`: federations in one place, to see what a rule is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import EXIT_FAILED, app
from lightyear_node.cli.common import Format, FormatOption, examples, show

DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="LIGHTYEAR_DATA",
        help="Directory of the prepared data sets.",
    ),
]


@app.command(
    epilog=examples(
        "lightyear-node experiment suite.yaml --out results",
        "lightyear-node experiment suite.yaml --out results --resume",
    )
)
def experiment(
    suite: Annotated[Path, typer.Argument(help="What to run: a suite file (YAML).")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results that are there.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="How many at a time.", min=1, show_default="number of cores"),
    ] = None,
    data: DataOption = None,
    only: Annotated[str | None, typer.Option(help="Run this grid of the suite alone.")] = None,
    no_view: Annotated[bool, typer.Option("--no-view", help="Show no progress.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run every rule of a suite under every malfunction, and draw tables and figures of it.

    Ends with 1 if a job has failed; interrupted, with 130: what is finished is kept.
    """
    from lightyear_node.lab.digest import cells, print_outcome
    from lightyear_node.lab.experiment import Options, run

    options = Options(
        suite=suite, out=out, resume=resume, jobs=jobs, data=data, only=only, view=not no_view
    )
    outcome = run(options)
    found = {**outcome.to_plain(), "scores": cells(out) if outcome.page else []}
    show(format, found, lambda: print_outcome(outcome))
    if outcome.failures:
        raise typer.Exit(EXIT_FAILED)


@app.command(epilog=examples("lightyear-node report results"))
def report(
    directory: Annotated[Path, typer.Argument(help="Folder of an experiment's results.")],
    format: FormatOption = Format.TABLE,
) -> None:
    """Draw an experiment's tables, figures and page again, from its results."""
    from lightyear_node.lab.publish import publish

    page = publish(directory)
    show(format, {"report": str(page)}, lambda: typer.echo(str(page)))


@app.command(
    epilog=examples(
        "lightyear-node simulate",
        "lightyear-node simulate --rule krum --malfunction ana --bad 2 --rounds 20",
        "lightyear-node simulate --task my_package.tasks:build --arg data_root=/data",
    )
)
def simulate(
    task: Annotated[str, typer.Option(help="A built-in task, or `module:function`.")] = "digits",
    data: DataOption = None,
    rule: Annotated[str, typer.Option(help="The rule that every site follows.")] = "lightyear",
    option: Annotated[
        list[str] | None, typer.Option(help="A setting of the rule: key=value; repeatable.")
    ] = None,
    guard: Annotated[
        bool | None, typer.Option("--guard/--no-guard", help="LIGHTYEAR's guard; it has one.")
    ] = None,
    malfunction: Annotated[
        str, typer.Option(help="What is wrong with the bad sites' models, or none.")
    ] = "sfa",
    scale: Annotated[float | None, typer.Option(help="How strong the malfunction is.")] = None,
    bad: Annotated[int, typer.Option(help="How many sites malfunction.", min=0)] = 1,
    clients: Annotated[
        int | None, typer.Option(help="How many sites.", min=2, show_default="the task's")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds.", min=1, show_default="the task's")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, weights and noise.", min=0)] = 0,
    arg: Annotated[
        list[str] | None, typer.Option(help="An argument of the task: key=value; repeatable.")
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Simulate one federation in one process, without a network, and print how it went."""
    from lightyear_node.lab.trial import Options, print_table, run

    options = Options(
        task=task,
        args=_pairs("--arg", arg),
        data=data,
        rule=rule,
        guard=guard,
        settings=_pairs("--option", option),
        malfunction=malfunction,
        scale=scale,
        bad=bad,
        clients=clients,
        rounds=rounds,
        seed=seed,
    )
    trial = run(options)
    show(format, trial.to_plain(), lambda: print_table(trial))


def _pairs(flag: str, given: list[str] | None) -> dict[str, Any]:
    """`lr=0.1` is a number, `network=small` a word: as in a file."""
    from lightyear_node.errors import ConfigError
    from lightyear_node.strict_yaml import parse_scalar

    found = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {pair}: expected key=value")
        found[key] = parse_scalar(value)
    return found
