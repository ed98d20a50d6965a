"""The two files a user writes, as frozen records: `peers.yaml` and `node.yaml`.

`Agreement` is the federation's common file, the same at every site; its digest is compared when
peers meet.  `Site` is one hospital's own.  Both are read once and passed down; nothing else in the
program looks at the environment.  Precedence: flag > environment > file > default.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from lightyear_node import strict_yaml
from lightyear_node.records import Digest, Fingerprint, PeerName

NODE_FILE = "node.yaml"
SITES_MAX = 64
PINS_MAX = 2
"""Certificates of one site: the one in use, and the one that is to follow it."""
NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$"
FINGERPRINT_PATTERN = r"^SHA256:[A-Za-z0-9+/]{43}$"
ENVIRONMENT_PREFIX = "LIGHTYEAR_"

CLAUSE_DIGITS = 16
"""Of a digest, to tell two values of one key apart."""

LIGHTYEAR = "lightyear"
ALONE = "local"
HARM_MAX_GUARDED = 0.1
"""What a merge may cost a guarded site; see docs/do-no-harm.md for why."""

Model = typing.TypeVar("Model", bound=BaseModel)

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration_s(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*", value)
        if not match:
            raise ValueError(f"`{value}` is not a duration: write 500ms, 30s, 5m or 2h")
        return float(match[1]) * _UNITS_S[match[2]]
    return value


def parse_size_bytes(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)?B\s*", value)
        if not match:
            raise ValueError(f"`{value}` is not a size: write 500MiB, 20GiB or 1TB")
        unit = match[2] or ""
        step = 1024 if unit.endswith("i") else 1000
        return int(float(match[1]) * step ** " KMGT".index(unit[:1].upper() or " "))
    return value


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_port(value: str) -> str:
    if value != "" and int(value.rpartition(":")[2]) > 65535:
        raise ValueError(f"`{value}`: a port is at most 65535")
    return value


def _check_option(value: object) -> object:
    # Not every copy of these terms survives infinity: JSON has no word for it.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("an option is a finite number")
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError("an option is a number, a word, true, false or null")
    return value


def _check_harm(value: object) -> object:
    if value is None or value is False:
        return value
    if isinstance(value, int | float) and value is not True and 0 <= value <= 1:
        return float(value)  # an integer's 0 would pass for false
    raise ValueError("write a number from 0 to 1, or false to keep whatever was merged")


Seconds = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=30 * 86400)]
Bytes = Annotated[int, BeforeValidator(parse_size_bytes), Field(ge=0, le=2**60)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Option = Annotated[bool | int | float | str | None, BeforeValidator(_check_option)]
HarmMax = Annotated[bool | float | None, BeforeValidator(_check_harm)]
Address = Annotated[str, Field(pattern=ADDRESS_PATTERN), BeforeValidator(_check_port)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RuleTerms(_Frozen):
    """Which peers' models are accepted, and how they are merged.

    All but `name` and `options` are LIGHTYEAR's own; other rules take theirs from `options`.
    """

    name: str = LIGHTYEAR
    tau: float = Field(default=0.6, ge=0, le=1)
    gamma: float = Field(default=0.95, gt=0, le=1)
    guard: bool = True
    include_self: bool = True
    weights: Literal["uniform", "samples"] = "uniform"
    weight_max: float = Field(default=0.5, gt=0, le=1)
    harm_max: HarmMax = None
    """How much a merge may add to our validation loss, in units of what guessing costs (ln C).

    False: anything.  Not said: a tenth under the guard; without it anything, as in the paper.
    """
    options: dict[str, Option] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_belong(self) -> RuleTerms:
        if self.name == LIGHTYEAR and self.options:
            raise ValueError("lightyear's settings stand beside `name`, not under `options`")
        ours = self.model_dump(exclude={"name", "options"}, exclude_defaults=True)
        if self.name != LIGHTYEAR and ours:
            stray = next(iter(ours))
            raise ValueError(
                f"`{stray}` is a setting of lightyear; those of {self.name} stand under `options`"
            )
        return self

    @property
    def harm_allowed(self) -> float | None:
        """The largest harm that a merge may do; None where merged models are not measured."""
        if self.name != LIGHTYEAR or isinstance(self.harm_max, bool):
            return None
        if self.harm_max is None:
            return HARM_MAX_GUARDED if self.guard else None
        return self.harm_max

    def computed(self) -> dict[str, Any]:
        """What of this changes results, as plain values.

        The limit for merged models is named only where there is one: results from before there
        was one are known by the rest.
        """
        plain = self.model_dump(mode="json", exclude={"harm_max"})
        return plain if self.harm_allowed is None else {**plain, "harm_max": self.harm_allowed}

    @property
    def threshold(self) -> float | None:
        """The agreement that a peer must reach, where the rule asks for one."""
        return self.tau if self.name == LIGHTYEAR else None

    @property
    def alone(self) -> bool:
        """Whether this site trains without the others: nothing is sent, nothing is fetched."""
        return self.name == ALONE


class BarrierTerms(_Frozen):
    """When a round closes; `min_peers` and `faulty_max` default to what suits the sites' number."""

    min_peers: int | None = Field(default=None, ge=1)
    faulty_max: int | None = Field(default=None, ge=0)
    grace: Seconds = 30.0
    """How long those who are missing are waited for, once `min_peers` have delivered."""
    grace_min: Seconds | None = None
    """Peers that usually come soon are given less, but at least this: a third by default."""
    deadline: Seconds = 1800.0
    """How long a site that is seen to work or to send is waited for."""
    consistency: Literal["echo", "none"] | None = None
    """echo: merge only what so many sites have heard of that nobody can be told another story;
    the default where a faulty site is to be tolerated."""
    heartbeat: Annotated[Seconds, Field(ge=0.5)] = 5.0
    suspect: Seconds = 20.0
    observe: Seconds = 5.0


class ExchangeTerms(_Frozen):
    """How weights travel, and which of them stay at home."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """float32 sends weights as they are; the shorter types are rounded to before sending."""
    compression: Literal["zstd"] = "zstd"
    delta: bool = True
    """Send the differences from the update before, to whom has that."""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    """Shell patterns of tensors' names; whatever is excluded stays at home."""

    def selection(self) -> dict[str, Any]:
        """What of this changes the models, where it is not as usual."""
        return self.model_dump(
            mode="json", include={"dtype", "include", "exclude"}, exclude_defaults=True
        )


class Peer(_Frozen):
    name: Name
    address: Address | None
    """None for a site that nobody can reach: it opens all its connections itself."""
    fingerprint: Annotated[
        tuple[Annotated[str, Field(pattern=FINGERPRINT_PATTERN)], ...], BeforeValidator(_as_list)
    ] = Field(min_length=1, max_length=PINS_MAX)
    certificate: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        min_length=1, max_length=PINS_MAX
    )


class Agreement(_Frozen):
    """What all sites have agreed on: `peers.yaml`."""

    version: Literal[1]
    federation: Name
    seed: int = Field(default=0, ge=0, lt=2**63)
    rounds: int = Field(default=20, ge=1, le=1_000_000)
    rule: RuleTerms = RuleTerms()
    barrier: BarrierTerms = BarrierTerms()
    exchange: ExchangeTerms = ExchangeTerms()
    peers: tuple[Peer, ...] = Field(max_length=SITES_MAX)

    @model_validator(mode="after")
    def _everybody_once(self) -> Agreement:
        seen: set[tuple[str, str]] = set()
        for index, peer in enumerate(self.peers):
            marks = [("name", peer.name)]
            marks += [("address", peer.address)] if peer.address else []
            marks += [("fingerprint", pin) for pin in peer.fingerprint]
            for mark in marks:
                if mark in seen:
                    raise PydanticCustomError(
                        "duplicate_peer",
                        "two peers have the same {what} `{value}`",
                        {"what": mark[0], "value": mark[1], "index": index},
                    )
                seen.add(mark)
        return self

    def digest(self) -> Digest:
        """Equal for files that mean the same, whatever their order, comments and spacing."""
        plain = self.model_dump(mode="json")
        plain["peers"].sort(key=lambda peer: peer["name"])
        return Digest(_digest_of(plain))

    def clauses(self) -> dict[str, str]:
        """What `digest` is of, by key: each with a short digest of its value."""
        plain = self.model_dump(mode="json")
        peers = plain.pop("peers")
        flat = {f"peers.{peer['name']}": peer for peer in peers}
        for key, value in plain.items():
            if isinstance(value, dict):
                flat |= {f"{key}.{inner}": each for inner, each in value.items()}
            else:
                flat[key] = value
        return {key: _digest_of(value)[:CLAUSE_DIGITS] for key, value in flat.items()}

    def find(self, fingerprint: Fingerprint) -> Peer | None:
        return next((peer for peer in self.peers if fingerprint in peer.fingerprint), None)

    def others(self, us: PeerName) -> tuple[Peer, ...]:
        return tuple(peer for peer in self.peers if peer.name != us)


class TaskEntry(_Frozen):
    """Whose model and data to train: `module:function` and its arguments."""

    entry: str = Field(default="lightyear_node.tasks.digits:build", pattern=r"^[\w.]+:[\w.]+$")
    args: dict[str, Any] = Field(default_factory=dict)


class HttpTls(_Frozen):
    """Files (PEM) for HTTPS; the certificate with its chain."""

    certificate: str
    key: str


class Http(_Frozen):
    """Metrics, health and the node's page; an empty `listen` switches them off.

    Other machines can reach them only over TLS, or with the token of a file, or both.
    """

    listen: Annotated[str, BeforeValidator(_check_port)] = Field(
        default="127.0.0.1:9464", pattern=ADDRESS_PATTERN + r"|^$"
    )
    tls: HttpTls | None = None
    token_file: str | None = None


class MetricsTerms(_Frozen):
    quality: bool = True
    """Whether metrics tell how well models do: agreement, weights, our own loss."""


class Log(_Frozen):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"
    task_errors: Literal["place", "full"] = "place"
    """Of an exception in the task's code its type and place, or its text too: it may name data."""
    task_output: bool = True
    """Whether what the task's code prints goes into the log."""


class WorkerTerms(_Frozen):
    """0 `threads` leaves the choice to torch; a worker silent for `silence` is killed."""

    threads: int = Field(default=0, ge=0, le=1024)
    silence: Seconds = 600.0


class DiskTerms(_Frozen):
    """How much of the disk this node may use, and how much it must leave free."""

    quota: Bytes | None = None
    """What the state directory may hold; without it, all that the file system has."""
    reserve: Bytes | None = None
    """Others' updates are fetched only as long as this stays free; by default, two models."""


class KeepTerms(_Frozen):
    """What is kept longer than the rounds need it."""

    models: int = Field(default=3, ge=1, le=1000)
    """The models of so many last rounds; that of the best round is kept besides."""


class TrackingTerms(_Frozen):
    """Where completed rounds are written besides the state directory."""

    tensorboard: str | None = Field(default=None, min_length=1)
    """A folder for TensorBoard's event files."""
    mlflow: str | None = Field(default=None, min_length=1)
    """The address of an MLflow tracking server, or of a store on this machine."""


class Malfunction(_Frozen):
    """For experiments only: what this site's outgoing model is corrupted with."""

    kind: str
    scale: float | None = None
    """How strong; what it means, and the default, depends on the kind."""


class RuleOverrides(_Frozen):
    """What a site may decide for itself: how strict it is with its own model."""

    tau: float | None = Field(default=None, ge=0, le=1)
    gamma: float | None = Field(default=None, gt=0, le=1)
    guard: bool | None = None
    harm_max: HarmMax = None


class Site(_Frozen):
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


def _digest_of(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def load_agreement(path: Path) -> Agreement:
    document = strict_yaml.read(path)
    return validated(Agreement, document.values, document)


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
        nested = _model_in(field.annotation)
        if variable in environment:
            found[name] = strict_yaml.parse_scalar(environment[variable])
        elif nested and (inner := _from_environment(nested, environment, variable + "_")):
            found[name] = inner
    return found


def validated(model: type[Model], values: dict[str, Any], document: strict_yaml.Document) -> Model:
    """The record that a file describes, or a `ConfigError` that names the line and what to do."""
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        first = _most_telling(problem)
        where = first["loc"]
        if first["type"] == "duplicate_peer":
            where = ("peers", first["ctx"]["index"])
            raise document.error(where, first["msg"], hint="keep one of them") from None
        key = ".".join(str(part) for part in where)
        if first["type"] == "extra_forbidden":
            raise document.error(where, *_unknown_key(model, where)) from None
        if first["type"] == "missing":
            raise document.error(where, f"`{key}` is missing", hint="add that key") from None
        message = first["msg"].removeprefix("Value error, ")
        shown = _shown(first.get("input"))
        if first["type"] == "string_pattern_mismatch":
            message = _PATTERN_WORDS.get(first["ctx"]["pattern"], message)
        text = f"`{key}`: {message}{shown}" if key else message
        raise document.error(where, text, hint="correct that value") from None


def _most_telling(problem: ValidationError) -> ErrorDetails:
    """The first; but a misspelt key is the cause, and the one that is missing its effect."""
    errors = problem.errors()
    if errors[0]["type"] == "missing":
        return next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    return errors[0]


_PATTERN_WORDS = {
    NAME_PATTERN: "a name is lower-case letters, digits and dashes, at most 63",
    ADDRESS_PATTERN: "an address is host:port",
    FINGERPRINT_PATTERN: "a fingerprint is SHA256: and 43 base64 characters,"
    " as `lightyear-node id` prints it",
}


def _shown(value: object) -> str:
    plain = isinstance(value, str | int | float | bool)
    return f" (it is {json.dumps(value)[:80]})" if plain else ""


def _unknown_key(model: type[BaseModel], where: tuple[str | int, ...]) -> tuple[str]:
    known = list(_model_at(model, where[:-1]).model_fields)
    key = str(where[-1])
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean `{nearest[0]}`?" if nearest else f"known keys: {', '.join(known)}"
    return (f"unknown key `{key[:80]}`: {advice}",)


def _model_at(model: type[BaseModel], where: tuple[str | int, ...]) -> type[BaseModel]:
    for part in where:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The table behind an annotation such as `Rule`, `Rule | None` or `tuple[Peer, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType, typing.Union, Annotated):
        found = (_model_in(argument) for argument in typing.get_args(annotation))
        return next((model for model in found if model), None)
    return None
