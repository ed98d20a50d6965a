"""The settings of one node: `node.yaml`.

Precedence: flag > environment > file > default.  No other module reads settings from the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from lightyear_node.config import strict_yaml
from lightyear_node.config.federation import FederationConfig, HarmMax, RuleConfig
from lightyear_node.config.fields import (
    Address,
    Bytes,
    FrozenModel,
    Seconds,
    check_address,
)
from lightyear_node.config.validation import table_in, validated

NODE_FILE = "node.yaml"
ENVIRONMENT_PREFIX = "LIGHTYEAR_"
DIGITS = "lightyear_node.lab.tasks.digits:build"


def _check_arguments(value: object) -> object:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple) and all(isinstance(x, str | int | float) for x in value):
        return tuple(map(str, value))
    raise ValueError("arguments are a table {name: value}; those of a script are a list of texts")


class TaskConfig(FrozenModel):
    """What trains the model: exactly one of `KINDS`, and its arguments."""

    KINDS: ClassVar = ("entry", "script", "bundle")

    entry: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """`module:function` that returns a `Task`."""
    script: str | None = Field(default=None, min_length=1)
    """A Python file that uses `lightyear_node.training`; relative to the folder of node.yaml."""
    bundle: str | None = Field(default=None, min_length=1)
    """A MONAI bundle, relative to the folder of node.yaml; `args` override its configuration."""
    args: Annotated[dict[str, Any] | tuple[str, ...], BeforeValidator(_check_arguments)] = Field(
        default_factory=dict
    )

    @property
    def name(self) -> str:
        """The value of the one kind that is set."""
        return str(next(filter(None, (getattr(self, kind) for kind in self.KINDS))))

    @model_validator(mode="before")
    @classmethod
    def _default(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(kind) is None for kind in cls.KINDS):
            return {**values, "entry": DIGITS}
        return values

    @field_validator("entry")
    @classmethod
    def _moved(cls, entry: str | None) -> str | None:
        """Accept the module names of the built-in tasks in version 0.1."""
        old = "lightyear_node.tasks."
        if entry is None or not entry.startswith(old):
            return entry
        return entry.replace(old, "lightyear_node.lab.tasks.", 1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in self.KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` exclude each other: keep one of them")
        if self.args and isinstance(self.args, tuple) != (self.script is not None):
            form = "list, such as [--lr, 0.1]" if self.script else "table, such as {lr: 0.1}"
            kind = "a script" if self.script else f"`{given[0]}`"
            raise ValueError(f"`args` of {kind} is a {form}")
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        return {key: value for key, value in plain.items() if value is not None}


class HttpTlsConfig(FrozenModel):
    """PEM files for HTTPS; the certificate includes its chain."""

    certificate: str
    key: str


def _address_or_none(value: object) -> str:
    return "" if value == "" else check_address(value)


class HttpConfig(FrozenModel):
    """Metrics, health and the status page; an empty `listen` disables them.

    An address that other machines can reach requires TLS, a token, or both.
    """

    listen: Annotated[str, BeforeValidator(_address_or_none)] = "127.0.0.1:9464"
    tls: HttpTlsConfig | None = None
    token_file: str | None = None


class MetricsConfig(FrozenModel):
    quality: bool = True
    """Whether metrics include the quality of models: federation, weights, our own loss."""


class LogConfig(FrozenModel):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"
    task_errors: Literal["place", "full"] = "place"
    """Log exceptions of the task's code with type and place, or also their text, which may
    contain data."""
    task_output: bool = True
    """Whether output of the task's code is logged."""


class WorkerConfig(FrozenModel):
    """`threads` 0 is torch's default; a worker that is silent for `silence` is killed."""

    threads: int = Field(default=0, ge=0, le=1024)
    silence: Seconds = 600.0
    memory_max: Annotated[Bytes, Field(ge=512 << 20)] | None = None
    """Memory limit of each worker process (Linux only); no limit by default."""


class DiskConfig(FrozenModel):
    """How much of the disk this node may use, and how much it must leave free."""

    quota: Bytes | None = None
    """Maximum size of the state directory; by default, the whole file system."""
    reserve: Bytes | None = None
    """Updates are fetched only while this much stays free; by default, two models."""


class KeepConfig(FrozenModel):
    """What is kept longer than the rounds need."""

    models: int = Field(default=3, ge=1, le=1000)
    """Number of recent rounds whose models are kept; the best model is kept as well."""


class TrackingConfig(FrozenModel):
    """Where completed rounds are written in addition to the state directory."""

    tensorboard: str | None = Field(default=None, min_length=1)
    """Folder for TensorBoard's event files."""
    mlflow: str | None = Field(default=None, min_length=1)
    """URI of an MLflow tracking server or local store."""


class RuleOverrides(FrozenModel):
    """Rule settings that a site may change for its own model."""

    tau: float | None = Field(default=None, ge=0, le=1)
    gamma: float | None = Field(default=None, gt=0, le=1)
    guard: bool | None = None
    harm_max: HarmMax = None
    shadow: bool | None = None


class NodeConfig(FrozenModel):
    """The content of `node.yaml`."""

    address: Address | None = None
    """Where peers reach this site; part of the join line."""
    listen: Address | None = None
    """Where this node listens; `address` by default."""
    state_dir: str = "state"
    keys_dir: str = "keys"
    task: TaskConfig = TaskConfig()
    device: Literal["auto", "cpu", "cuda", "mps"] | Annotated[str, Field(pattern=r"^cuda:\d+$")] = (
        "auto"
    )
    http: HttpConfig = HttpConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
    worker: WorkerConfig = WorkerConfig()
    disk: DiskConfig = DiskConfig()
    keep: KeepConfig = KeepConfig()
    tracking: TrackingConfig = TrackingConfig()
    rule: RuleOverrides = RuleOverrides()
    share_verdicts: bool = False
    """Whether peers receive our verdict on their update and its reason; never the score."""

    def rule_of(self, federation: FederationConfig) -> RuleConfig:
        ours = self.rule.model_dump(exclude_none=True)
        return federation.rule.model_copy(update=ours)


def load_node_config(
    path: Path, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> NodeConfig:
    """Read the settings; `flags` has the keys of the file, and a missing file means defaults."""
    document = strict_yaml.read(path) if path.exists() else strict_yaml.Document(path, {}, {})
    values = _merged(document.values, _from_environment(NodeConfig, environment))
    return validated(NodeConfig, _merged(values, flags or {}), document)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = _merged(both[key], value) if nested else value
    return both


def _from_environment(
    model: type[BaseModel], environment: Mapping[str, str], prefix: str = ENVIRONMENT_PREFIX
) -> dict[str, Any]:
    """Settings from variables such as `LIGHTYEAR_HTTP_LISTEN`; values are YAML scalars."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        variable = prefix + name.upper()
        nested = table_in(field.annotation)
        if variable in environment:
            found[name] = strict_yaml.parse_scalar(environment[variable])
        elif nested and (inner := _from_environment(nested, environment, variable + "_")):
            found[name] = inner
    return found
