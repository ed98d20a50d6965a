"""Real training as a sequence of files: what sites send each other, round after round."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import TaskEntry
from lightyear_node.lab.simulate import Spec, take_seats
from lightyear_node.records import PeerName, Round
from lightyear_node.transport.codec import Grid

DATA = Path(__file__).parents[4] / "shared" / "data"
"""Where prepared data sets lie, if they do; the digits need none."""
SITES = [PeerName(f"site-{letter}") for letter in "abc"]
SEED = 7

TASKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "digits": ("lightyear_node.tasks.digits:build", {}, 12),
    "femnist": (
        "lightyear_node.tasks.femnist:build",
        {"network": "small", "train_samples": 300, "data": str(DATA)},
        20,
    ),
}


def available() -> list[str]:
    return [name for name in TASKS if name != "femnist" or (DATA / "femnist").is_dir()]


@contextmanager
def recorded(task: str, dtype: str = "float32", rounds: int | None = None) -> Iterator[list[Path]]:
    """The first site's updates of a federation of three under the default rule, in order."""
    entry, args, usual = TASKS[task]
    spec = Spec(
        SITES,
        rounds or usual,
        SEED,
        RuleTerms(),
        TaskEntry(entry=entry, args=args),
        exchange=ExchangeTerms.model_validate({"dtype": dtype}),
    )
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        kept.mkdir()
        seats = take_seats(spec, Path(folder))
        files = []
        for number in range(spec.rounds):
            round = Round(number)
            sent = [seat.train(name, round, measure=False) for name, seat in seats.items()]
            files.append(Path(shutil.copy(sent[0].path, kept / str(number))))
            for name, seat in seats.items():
                seat.close(round, [one for one in sent if one.peer != name], measure=False)
        yield files


def grid_of(path: Path) -> Grid:
    with path.open("rb") as file:
        length = file.read(8)
        return Grid(length + file.read(int.from_bytes(length, "little")))
