"""`experiment`, `report` and `simulate`: simulated federations, to compare rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import EXIT_FAILED, app
from lightyear_node.cli.common import Format, FormatOption, examples, show
from lightyear_node.errors import ConfigError

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
    suite: Annotated[Path, typer.Argument(help="Suite file (YAML) that lists what to run.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue with the existing results.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help="Number of parallel jobs.", min=1, show_default="number of cores"),
    ] = None,
    data: DataOption = None,
    only: Annotated[str | None, typer.Option(help="Run only this grid of the suite.")] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Repeat training that another job has done.")
    ] = False,
    cache_max: Annotated[
        float, typer.Option(help="GiB of trained models that are kept for other jobs.", min=0.0)
    ] = 8.0,
    no_view: Annotated[bool, typer.Option("--no-view", help="Show no progress.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Run every rule of a suite under every malfunction; write tables and figures.

    Exits with 1 if a job failed, with 130 if interrupted; finished results are kept.
    """
    from lightyear_node.lab.experiment import ExperimentOptions, run
    from lightyear_node.lab.terminal_summary import cells, print_outcome

    options = ExperimentOptions(
        suite=suite,
        out=out,
        resume=resume,
        jobs=jobs,
        data=data,
        only=only,
        view=not no_view,
        cache_max=None if no_cache else cache_max,
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
    """Write an experiment's tables, figures and page again, from its results."""
    from lightyear_node.lab.experiment_report import write_report

    page = write_report(directory)
    show(format, {"report": str(page)}, lambda: typer.echo(str(page)))


@app.command(
    epilog=examples(
        "lightyear-node simulate",
        "lightyear-node simulate --rule krum --malfunction ana --bad 2 --rounds 20",
        "lightyear-node simulate --task my_package.tasks:build --arg data_root=/data",
        "lightyear-node simulate --malfunction my_attacks:inner_product --bad 2",
    )
)
def simulate(
    task: Annotated[str, typer.Option(help="A built-in task, or `module:function`.")] = "digits",
    data: DataOption = None,
    rule: Annotated[str, typer.Option(help="Aggregation rule of all sites.")] = "lightyear",
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the rule: key=value; repeatable.")
    ] = None,
    guard: Annotated[
        bool | None,
        typer.Option("--guard/--no-guard", help="Enable LIGHTYEAR's guard (the default)."),
    ] = None,
    malfunction: Annotated[
        str, typer.Option(help="Malfunction of the bad sites, `module:function`, or none.")
    ] = "sfa",
    malfunction_option: Annotated[
        list[str] | None,
        typer.Option(help="Option of your own malfunction: key=value; repeatable."),
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Strength of the malfunction.")] = None,
    bad: Annotated[int, typer.Option(help="Number of malfunctioning sites.", min=0)] = 1,
    clients: Annotated[
        int | None, typer.Option(help="Number of sites.", min=2, show_default="the task's")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Number of rounds.", min=1, show_default="the task's")
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            help="Divide the task's data again: iid, dirichlet, labels or size.",
            show_default="as the task has it",
        ),
    ] = None,
    partition_option: Annotated[
        list[str] | None, typer.Option(help="Option of the partition: key=value; repeatable.")
    ] = None,
    participation: Annotated[
        float, typer.Option(help="Probability with which a site takes part in a round.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for data, weights and noise.", min=0)] = 0,
    arg: Annotated[
        list[str] | None, typer.Option(help="Argument of the task: key=value; repeatable.")
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Simulate one federation in one process, without a network, and print the scores."""
    from lightyear_node.lab.simulate_command import SimulateOptions, print_table, run

    options = SimulateOptions(
        task=task,
        args=_pairs("--arg", arg),
        data=data,
        rule=rule,
        guard=guard,
        settings=_pairs("--option", option),
        malfunction=malfunction,
        malfunction_options=_pairs("--malfunction-option", malfunction_option),
        scale=scale,
        bad=bad,
        clients=clients,
        rounds=rounds,
        seed=seed,
        partition=partition,
        partition_options=_pairs("--partition-option", partition_option),
        participation=participation,
        curves=format is not Format.TABLE,
    )
    result = run(options)
    show(format, result.to_plain(), lambda: print_table(result))


def _pairs(flag: str, given: list[str] | None) -> dict[str, Any]:
    """Parse key=value pairs; values as in YAML: `lr=0.1` is a number, `network=small` a string."""
    from lightyear_node.config.strict_yaml import parse_scalar

    found = {}
    for pair in given or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {pair}: expected key=value")
        found[key] = parse_scalar(value)
    return found
