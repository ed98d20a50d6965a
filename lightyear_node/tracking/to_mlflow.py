"""MLflow: one run for this site's journal, in an experiment that bears the federation's name.

A restarted node goes on with its run, from the last round that the server has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightyear_node.history import Entry
from lightyear_node.tracking.flat import series

MARK = "round"
"""Sent last of each round: who has it has all of that round."""
JOURNAL_TAG = "lightyear.journal"


class Mlflow:
    name = "mlflow"

    def __init__(
        self, uri: str, *, federation: str, site: str, journal: str, about: Mapping[str, str]
    ) -> None:
        """`journal` tells this site's record from any other, such as its first hash."""
        self._uri = uri
        self._federation, self._site, self._journal = federation, site, journal
        self._about = about
        self._client: Any = None
        self._run = ""
        self._round = -1

    def begin(self, rounds: Sequence[Entry]) -> None:
        try:
            self._connect()
            for entry in rounds:
                self._send(entry)
        except Exception as problem:
            raise self._without_address(problem) from None

    def add(self, entry: Entry) -> None:
        try:
            self._send(entry)
        except Exception as problem:
            raise self._without_address(problem) from None

    def close(self) -> None:
        pass

    def _connect(self) -> None:
        # Otherwise the package would tell its makers that it is used here.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if self._uri.startswith("file:"):
            # It would rather have a database, which the light package cannot write.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = self._client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._federation)
        experiment = found.experiment_id if found else client.create_experiment(self._federation)
        runs = client.search_runs([experiment], f"tags.`{JOURNAL_TAG}` = '{self._journal}'")
        if runs:
            self._run = runs[0].info.run_id
            history = client.get_metric_history(self._run, MARK)
            self._round = max((int(one.value) for one in history), default=-1)
            return
        tags = {JOURNAL_TAG: self._journal, "lightyear.site": self._site}
        self._run = client.create_run(experiment, tags=tags, run_name=self._site).info.run_id
        self._round = -1
        for key, value in self._about.items():
            client.log_param(self._run, key, value)

    def _send(self, entry: Entry) -> None:
        from mlflow.entities import Metric

        step = entry["round"]
        if step <= self._round:
            return
        when_ms = int(entry["time"] * 1000)
        metrics = [
            Metric(_name(name), value, when_ms, step) for name, value in series(entry).items()
        ]
        self._client.log_batch(self._run, metrics)
        self._client.log_batch(self._run, [Metric(MARK, float(step), when_ms, step)])
        self._round = step

    def _without_address(self, problem: Exception) -> Exception:
        """It may have a password in it."""
        if isinstance(problem, ImportError):
            return problem
        text = str(problem).replace(self._uri, "the server")
        return RuntimeError(f"{type(problem).__name__}: {re.sub(r'//[^/@ ]*@', '//', text)}")


def _name(name: str) -> str:
    """MLflow takes letters, digits and a few signs; users' metrics may have others."""
    return re.sub(r"[^\w.\-/ ]", "_", name, flags=re.ASCII)
