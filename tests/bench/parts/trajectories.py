"""Updates of real training, as a sequence of files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.simulate import make_sites
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.types import PeerName, Round

DATA = Path(__file__).parents[4] / "shared" / "data"
"""Folder of prepared data sets, if it exists; the digits need none."""
SITES = [PeerName(f"site-{letter}") for letter in "abc"]
SEED = 7

TASKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "digits": ("lightyear_node.lab.tasks.digits:build", {}, 12),
    "femnist": (
        "lightyear_node.lab.tasks.femnist:build",
        {"network": "small", "train_samples": 300, "data": str(DATA)},
        20,
    ),
}


def available() -> list[str]:
    return [name for name in TASKS if name != "femnist" or (DATA / "femnist").is_dir()]


@contextmanager
def recorded(task: str, dtype: str = "float32", rounds: int | None = None) -> Iterator[list[Path]]:
    """The first site's updates in a federation of three with the default rule, in order."""
    entry, args, usual = TASKS[task]
    spec = SimulationSpec(
        SITES,
        rounds or usual,
        SEED,
        RuleConfig(),
        TaskConfig(entry=entry, args=args),
        exchange=ExchangeConfig.model_validate({"dtype": dtype}),
    )
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        kept.mkdir()
        sites = make_sites(spec, Path(folder))
        files = []
        for number in range(spec.rounds):
            round = Round(number)
            sent = [site.train(name, round, measure=False) for name, site in sites.items()]
            files.append(Path(shutil.copy(sent[0].path, kept / str(number))))
            for name, site in sites.items():
                site.close(round, [one for one in sent if one.peer != name], measure=False)
        yield files


def grid_of(path: Path) -> ChunkGrid:
    with path.open("rb") as file:
        length = file.read(8)
        return ChunkGrid(length + file.read(int.from_bytes(length, "little")))
