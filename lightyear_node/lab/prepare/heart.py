"""Heart disease: UCI's `processed.*.data`, one file for each hospital."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightyear_node.lab.prepare.arrays import Prepared, found, names
from lightyear_node.lab.tasks.heart import FILE, SCALES

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def prepare(source: Path) -> Prepared:
    tables = []
    for hospital in HOSPITALS:
        [path] = found(source, f"processed.{hospital}.data")
        lines = path.read_text(encoding="utf-8").split()
        tables.append([["nan" if v == "?" else v for v in line.split(",")] for line in lines])
    rows = np.array([row for table in tables for row in table], dtype=np.float32)  # (n, 14)
    severity = rows[:, -1].astype(np.uint8)
    sizes = [len(table) for table in tables]
    return {
        FILE: {
            "features": rows[:, :-1],
            "labels": (severity > 0).astype(np.uint8),
            "severity": severity,
            "client": np.repeat(np.arange(len(HOSPITALS), dtype=np.uint8), sizes),
            "feature_names": names(list(SCALES)),
            "client_names": names(HOSPITALS),
        }
    }
