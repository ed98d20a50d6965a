"""Divides labelled samples among sites: equally, by label or by size.

    kind        each site gets
    iid         an equal share, drawn at random
    dirichlet   of every class a share drawn from Dirichlet(alpha); a small alpha is uneven
    labels      samples of `classes` classes only
    size        a share of all samples drawn from Dirichlet(alpha), with the same mixture of labels

Equal arguments give equal partitions.  Numpy is loaded when a partition is drawn: suites are read
without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from lightyear_node.config.fields import FrozenModel
from lightyear_node.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

PartitionKind = Literal["iid", "dirichlet", "labels", "size"]
KINDS: tuple[str, ...] = get_args(PartitionKind)
ALPHA = 0.5
CLASSES_PER_SITE = 2
SAMPLES_MIN = 10
DRAWS_MAX = 1000
"""Drawn again so often if a site has too few samples; with a tiny alpha most draws are refused."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "iid": (),
    "dirichlet": ("alpha",),
    "labels": ("classes",),
    "size": ("alpha",),
}
"""The keys of each kind."""


class PartitionConfig(FrozenModel):
    """How the samples of a task are divided among the sites."""

    kind: PartitionKind
    alpha: float | None = Field(default=None, gt=0, le=1e6)
    """Concentration of the Dirichlet distribution; 0.5 by default."""
    classes: int | None = Field(default=None, ge=1)
    """Classes of each site; 2 by default."""
    samples_min: int = Field(default=SAMPLES_MIN, ge=1)
    """Each site has at least so many samples of each split, or a fifth of an equal share of a
    split that is smaller."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Instead of the run's seed."""

    @model_validator(mode="after")
    def _keys_belong(self) -> PartitionConfig:
        for key in ("alpha", "classes"):
            if getattr(self, key) is not None and key not in _KEYS[self.kind]:
                raise ValueError(f"partition {self.kind} has no `{key}`")
        return self

    def computed(self) -> dict[str, Any]:
        """The settings that change results, with their defaults filled in."""
        defaults = {"alpha": ALPHA, "classes": CLASSES_PER_SITE}
        plain = self.model_dump(exclude_none=True)
        return {**{key: defaults[key] for key in _KEYS[self.kind]}, **plain}

    @property
    def needs_labels(self) -> bool:
        return self.kind in ("dirichlet", "labels")


def partition(
    labels: Sequence[int] | NDArray[Any],
    sites: int,
    kind: str = "dirichlet",
    *,
    alpha: float | None = None,
    classes: int | None = None,
    samples_min: int = SAMPLES_MIN,
    seed: int = 0,
) -> list[Rows]:
    """Divide samples among sites by their labels; return the row numbers of each site, shuffled.

    `kind` is `iid`, `dirichlet`, `labels` or `size`; docs/suites.md describes them.
    """
    given = {"kind": kind, "alpha": alpha, "classes": classes, "samples_min": samples_min}
    return divide([labels], sites, config_of({**given, "seed": seed}))[0]


def config_of(given: str | Mapping[str, Any]) -> PartitionConfig:
    """Validate a partition given from Python or on the command line."""
    plain = {"kind": given} if isinstance(given, str) else given
    try:
        return PartitionConfig.model_validate(plain)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"partition: {where + ': ' if where else ''}{message}",
            hint="see docs/suites.md for what a partition is",
        ) from None


def divide(
    splits: Sequence[Sequence[int] | NDArray[Any]], sites: int, config: PartitionConfig
) -> list[list[Rows]]:
    """Divide several splits, given as labels, with the same shares; for each the rows by site.

    So a site's validation and test data have the mixture of labels of its training data.
    """
    import numpy as np

    if sites < 1:
        raise ConfigError(f"a partition needs at least one site, not {sites}")
    arrays = [np.asarray(labels).reshape(-1) for labels in splits]
    names = np.unique(np.concatenate(arrays))
    numbers = [np.searchsorted(names, labels) for labels in arrays]
    if config.kind == "labels" and (config.classes or CLASSES_PER_SITE) > len(names):
        raise ConfigError(f"partition labels: the data has {len(names)} classes only")
    if not config.needs_labels:
        numbers = [np.zeros_like(labels) for labels in numbers]
    totals = [np.bincount(labels, minlength=len(names)) for labels in numbers]
    for draw in range(DRAWS_MAX):
        rng = np.random.default_rng(_seed(config, draw))
        shares = _shares(config, sites, len(names), rng)
        if all(_enough(shares, total, config) for total in totals):
            return [_by_class(labels, shares, rng) for labels in numbers]
    raise ConfigError(
        f"partition {config.kind}: {sites} sites would not all have {config.samples_min} samples"
        " of each split",
        hint="use fewer sites, a larger alpha or more classes, or lower `samples_min`",
    )


def _seed(config: PartitionConfig, draw: int) -> int:
    digest = hashlib.sha256(f"partition/{config.seed or 0}/{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _shares(
    config: PartitionConfig, sites: int, classes: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The share of each site in each class: (site, class)."""
    import numpy as np

    concentration = np.full(sites, ALPHA if config.alpha is None else config.alpha)
    match config.kind:
        case "iid":
            return np.full((sites, classes), 1 / sites)
        case "size":
            return np.tile(rng.dirichlet(concentration)[:, None], classes)
        case "dirichlet":
            return rng.dirichlet(concentration, size=classes).T
    per_site = config.classes or CLASSES_PER_SITE
    order = rng.permutation(classes)
    shares = np.zeros((sites, classes))
    for site in range(sites):
        # One after the other, so that each class has about as many sites as any other.
        shares[site, order[np.arange(site * per_site, (site + 1) * per_site) % classes]] = 1
    # A class that no site has keeps its zeros: with few sites its samples are not used.
    holders: NDArray[np.float64] = np.maximum(shares.sum(axis=0), 1)
    return shares / holders


def _by_class(
    labels: NDArray[np.int64], shares: NDArray[np.float64], rng: np.random.Generator
) -> list[Rows]:
    import numpy as np

    rows_of: list[list[Rows]] = [[] for _ in range(len(shares))]
    for number in range(shares.shape[1]):
        if not shares[:, number].any():
            continue
        rows = rng.permutation(np.flatnonzero(labels == number))
        for own, part in zip(rows_of, _cut(rows, shares[:, number]), strict=True):
            own.append(part)
    return [rng.permutation(np.concatenate(own)) for own in rows_of]


def _cut(rows: Rows, shares: NDArray[np.float64]) -> list[Rows]:
    import numpy as np

    return np.split(rows, _ends(shares, np.array(len(rows)))[:-1])


def _ends(shares: NDArray[np.float64], total: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each site's samples end among those of a class, or of each class."""
    import numpy as np

    return np.rint(np.cumsum(shares, axis=0) * total).astype(np.int64)


def _enough(
    shares: NDArray[np.float64], totals: NDArray[np.int64], config: PartitionConfig
) -> bool:
    """Whether each site has enough samples; `totals` are the numbers of samples by class."""
    import numpy as np

    ends = _ends(shares, totals)
    sizes = np.diff(ends, axis=0, prepend=0).sum(axis=1)
    least = max(1, min(config.samples_min, int(totals.sum()) // (5 * len(shares))))
    return bool((sizes >= least).all())
