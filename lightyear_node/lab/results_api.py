"""`lightyear_node.read_results`: the results of an experiment from Python, as flat records."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightyear_node.lab.results_reader import JobRow, SiteResultRow, read

Record = dict[str, Any]


def read_results(directory: str | os.PathLike[str]) -> list[Record]:
    """Read a results folder of `lightyear-node experiment`: one record per job, site and round.

    Jobs without curves have a record for the last round only.
    """
    return [
        record
        for row in read(Path(directory)).rows
        for site in row.sites
        for record in _records(row, site)
    ]


def _records(row: JobRow, site: SiteResultRow) -> Iterator[Record]:
    job = {
        "suite": row.suite,
        "grid": row.grid,
        "task": row.setting.task,
        "arguments": row.setting.args,
        "clients": row.setting.clients,
        "partition": row.setting.partition or None,
        "participation": row.setting.participation,
        "rule": row.rule,
        "label": row.label,
        "rule_terms": json.dumps(row.terms, sort_keys=True),
        "malfunction": row.fault.name,
        "scale": row.fault.scale,
        "bad": row.bad,
        "seed": row.seed,
        "site": site.name,
        "site_malfunctions": site.malfunctioning,
    }
    if not site.curves:
        last = {f"merged.{name}": value for name, value in site.metrics.items()}
        yield {**job, "round": row.setting.rounds - 1, **last}
        return
    for round in range(max(map(len, site.curves.values()))):
        values = {
            name: curve[round] if round < len(curve) else None
            for name, curve in site.curves.items()
        }
        yield {**job, "round": round, **values}
