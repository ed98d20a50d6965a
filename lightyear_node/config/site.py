"""One hospital's own settings: `node.yaml`.

Nothing else in the program looks at the environment.  Precedence: flag > environment > file >
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from lightyear_node import strict_yaml
from lightyear_node.config.agreement import Agreement, HarmMax, RuleTerms
from lightyear_node.config.fields import (
    ADDRESS_PATTERN,
    Address,
    Bytes,
    Frozen,
    Seconds,
    check_port,
)
from lightyear_node.config.validation import table_in, validated

NODE_FILE = "node.yaml"
ENVIRONMENT_PREFIX = "LIGHTYEAR_"


class TaskEntry(Frozen):
    """Whose model and data to train: `module:function` and its arguments."""

    entry: str = Field(default="lightyear_node.tasks.digits:build", pattern=r"^[\w.]+:[\w.]+$")
    args: dict[str, Any] = Field(default_factory=dict)


class HttpTls(Frozen):
    """Files (PEM) for HTTPS; the certificate with its chain."""

    certificate: str
    key: str


class Http(Frozen):
    """Metrics, health and the node's page; an empty `listen` switches them off.

    Other machines can reach them only over TLS, or with the token of a file, or both.
    """

    listen: Annotated[str, BeforeValidator(check_port)] = Field(
        default="127.0.0.1:9464", pattern=ADDRESS_PATTERN + r"|^$"
    )
    tls: HttpTls | None = None
    token_file: str | None = None


class MetricsTerms(Frozen):
    quality: bool = True
    """Whether metrics tell how well models do: agreement, weights, our own loss."""


class Log(Frozen):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"
    task_errors: Literal["place", "full"] = "place"
    """Of an exception in the task's code its type and place, or its text too: it may name data."""
    task_output: bool = True
    """Whether what the task's code prints goes into the log."""


class WorkerTerms(Frozen):
    """0 `threads` leaves the choice to torch; a worker silent for `silence` is killed."""

    threads: int = Field(default=0, ge=0, le=1024)
    silence: Seconds = 600.0


class DiskTerms(Frozen):
    """How much of the disk this node may use, and how much it must leave free."""

    quota: Bytes | None = None
    """What the state directory may hold; without it, all that the file system has."""
    reserve: Bytes | None = None
    """Others' updates are fetched only as long as this stays free; by default, two models."""


class KeepTerms(Frozen):
    """What is kept longer than the rounds need it."""

    models: int = Field(default=3, ge=1, le=1000)
    """The models of so many last rounds; that of the best round is kept besides."""


class TrackingTerms(Frozen):
    """Where completed rounds are written besides the state directory."""

    tensorboard: str | None = Field(default=None, min_length=1)
    """A folder for TensorBoard's event files."""
    mlflow: str | None = Field(default=None, min_length=1)
    """The address of an MLflow tracking server, or of a store on this machine."""


class Malfunction(Frozen):
    """For experiments only: what this site's outgoing model is corrupted with."""

    kind: str
    scale: float | None = None
    """How strong; what it means, and the default, depends on the kind."""


class RuleOverrides(Frozen):
    """What a site may decide for itself: how strict it is with its own model."""

    tau: float | None = Field(default=None, ge=0, le=1)
    gamma: float | None = Field(default=None, gt=0, le=1)
    guard: bool | None = None
    harm_max: HarmMax = None


class Site(Frozen):
    """One hospital's own settings: `node.yaml`."""

    address: Address | None = None
    """Where the others reach this site; it travels in the join line."""
    listen: Address | None = None
    """Where this node listens; `address` when not given."""
    state_dir: str = "state"
    keys_dir: str = "keys"
    task: TaskEntry = TaskEntry()
    device: Literal["auto", "cpu", "cuda", "mps"] | Annotated[str, Field(pattern=r"^cuda:\d+$")] = (
        "auto"
    )
    http: Http = Http()
    metrics: MetricsTerms = MetricsTerms()
    log: Log = Log()
    worker: WorkerTerms = WorkerTerms()
    disk: DiskTerms = DiskTerms()
    keep: KeepTerms = KeepTerms()
    tracking: TrackingTerms = TrackingTerms()
    rule: RuleOverrides = RuleOverrides()
    share_verdicts: bool = False
    """Whether a peer is told what became of its update here, and why; never the score."""
    malfunction: Malfunction | None = None

    def rule_of(self, agreement: Agreement) -> RuleTerms:
        ours = self.rule.model_dump(exclude_none=True)
        return agreement.rule.model_copy(update=ours)


def load_site(
    path: Path, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Site:
    """`flags` are the same nested keys as in the file; a missing file means all defaults."""
    document = strict_yaml.read(path) if path.exists() else strict_yaml.Document(path, {}, {})
    values = _merged(document.values, _from_environment(Site, environment))
    return validated(Site, _merged(values, flags or {}), document)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = _merged(both[key], value) if nested else value
    return both


def _from_environment(
    model: type[BaseModel], environment: Mapping[str, str], prefix: str = ENVIRONMENT_PREFIX
) -> dict[str, Any]:
    """`http.listen` is `LIGHTYEAR_HTTP_LISTEN`; nested tables by name, values as YAML scalars."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        nested = table_in(field.annotation)
        if variable in environment:
            found[name] = strict_yaml.parse_scalar(environment[variable])
        elif nested and (inner := _from_environment(nested, environment, variable + "_")):
            found[name] = inner
    return found
