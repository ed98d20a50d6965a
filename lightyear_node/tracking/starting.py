"""Which writers a site has, by its settings; followers of its history from then on."""

from __future__ import annotations

import logging
from pathlib import Path

from lightyear_node.home import Home
from lightyear_node.ledger import Ledger
from lightyear_node.tracking import Tracking, Writer
from lightyear_node.tracking.tables import tables
from lightyear_node.tracking.to_mlflow import Mlflow
from lightyear_node.tracking.to_tensorboard import TensorBoard


def started(home: Home, state_dir: Path, ledger: Ledger, log: logging.Logger) -> Tracking:
    """To be closed with the node; something is recorded already."""
    terms = home.site.tracking
    writers: list[Writer] = [*tables(state_dir)]
    if terms.tensorboard is not None:
        writers.append(TensorBoard(home.directory / terms.tensorboard, home.us))
    if terms.mlflow is not None:
        about = {"site": home.us, "task": home.site.task.entry, "rule": home.rule.name}
        writers.append(
            Mlflow(
                terms.mlflow,
                federation=home.agreement.federation,
                site=home.us,
                journal=ledger.hash_of(1) or "",
                about={**about, "rounds": str(home.agreement.rounds)},
            )
        )

    def tell(text: str, bad: bool) -> None:
        level = logging.WARNING if bad else logging.INFO
        log.log(level, "%s", text, extra={"event": "tracking"})

    tracking = Tracking(state_dir / "journal.db", writers, tell)
    ledger.history.followers.append(tracking.follow)
    return tracking
