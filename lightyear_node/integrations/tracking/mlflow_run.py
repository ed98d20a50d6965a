"""MLflow: one run for this site's journal, in an experiment named like the federation.

A restarted node continues its run after the last round that the server has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightyear_node.integrations.tracking.flat_rows import series
from lightyear_node.storage.history import Entry

LAST_METRIC = "round"
"""Sent last in each round: if the server has it, it has the whole round."""
JOURNAL_TAG = "lightyear.journal"


class Mlflow:
    name = "mlflow"

    def __init__(
        self, uri: str, *, federation: str, site: str, journal: str, about: Mapping[str, str]
    ) -> None:
        """`journal` identifies this site's journal; `about` are the parameters of the run."""
        self._uri = uri
        self._federation, self._site, self._journal = federation, site, journal
        self._about = about
        self._client: Any = None
        self._run = ""
        self._round = -1

    def resume(self, recent: Sequence[Entry]) -> bool:
        return False  # `rebuild` sends only what the server lacks

    def rebuild(self, rounds: Sequence[Entry]) -> None:
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
        # Disable usage reports to the authors of the package.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        if self._uri.startswith("file:"):
            # The package prefers a database, which mlflow-skinny cannot write.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = self._client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._federation)
        experiment = found.experiment_id if found else client.create_experiment(self._federation)
        runs = client.search_runs([experiment], f"tags.`{JOURNAL_TAG}` = '{self._journal}'")
        if runs:
            self._run = runs[0].info.run_id
            history = client.get_metric_history(self._run, LAST_METRIC)
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
        time_ms = int(entry["time"] * 1000)
        metrics = [
            Metric(_name(name), value, time_ms, step) for name, value in series(entry).items()
        ]
        self._client.log_batch(self._run, metrics)
        self._client.log_batch(self._run, [Metric(LAST_METRIC, float(step), time_ms, step)])
        self._round = step

    def _without_address(self, problem: Exception) -> Exception:
        """Remove the URI from the text: it may contain a password."""
        if isinstance(problem, ImportError):
            return problem
        text = str(problem).replace(self._uri, "the server")
        return RuntimeError(f"{type(problem).__name__}: {re.sub(r'//[^/@ ]*@', '//', text)}")


def _name(name: str) -> str:
    """Replace characters that MLflow does not allow in names."""
    return re.sub(r"[^\w.\-/ ]", "_", name, flags=re.ASCII)
