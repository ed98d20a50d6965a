"""Starts the tracking of completed rounds that a site's settings ask for."""

from __future__ import annotations

import logging
from pathlib import Path

from lightyear_node.integrations.tracking import Tracking, Writer
from lightyear_node.integrations.tracking.csv_files import tables
from lightyear_node.integrations.tracking.mlflow_run import Mlflow
from lightyear_node.integrations.tracking.tensorboard_events import TensorBoard
from lightyear_node.node.home import Home
from lightyear_node.storage.round_journal import RoundJournal


def start_tracking(
    home: Home, state_dir: Path, round_journal: RoundJournal, log: logging.Logger
) -> Tracking:
    """Start it; the journal must have a record.  The caller closes it with the node."""
    config = home.config.tracking
    writers: list[Writer] = [*tables(state_dir)]
    if config.tensorboard is not None:
        writers.append(TensorBoard(home.directory / config.tensorboard, home.us))
    if config.mlflow is not None:
        about = {"site": home.us, "task": home.config.task.name, "rule": home.rule.name}
        writers.append(
            Mlflow(
                config.mlflow,
                federation=home.federation.federation,
                site=home.us,
                journal=round_journal.hash_of(1) or "",
                about={**about, "rounds": str(home.federation.rounds)},
            )
        )

    def tell(text: str, bad: bool) -> None:
        level = logging.WARNING if bad else logging.INFO
        log.log(level, "%s", text, extra={"event": "tracking"})

    # The first of them may have begun in a segment that was not read.
    recent = round_journal.rounds()[1:] if round_journal.segmented else ()
    tracking = Tracking(state_dir / "journal.db", writers, tell, recent)
    round_journal.history.followers.append(tracking.follow)
    return tracking
