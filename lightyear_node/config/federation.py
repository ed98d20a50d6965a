"""The federation config, `peers.yaml`: settings that are the same at every site.

Its digest is compared when peers connect.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lightyear_node.config import strict_yaml
from lightyear_node.config.fields import FINGERPRINT_PATTERN, Address, FrozenModel, Name, Seconds
from lightyear_node.config.validation import validated
from lightyear_node.types import Digest, Fingerprint

SITES_MAX = 64
PINS_MAX = 2
"""Certificates per site: the one in use, and its successor during a renewal."""

CLAUSE_DIGITS = 16
"""Digits of a digest that distinguishes two values of one key."""

LIGHTYEAR = "lightyear"
ALONE = "local"
NEWER_RULE_KEYS = ("shadow", "output", "reference", "unbiased")
"""Settings of a rule that version 0.1.0 does not have."""
HARM_MAX_GUARDED = 0.1
"""Default of `harm_max` with the guard; docs/do-no-harm.md has the reasons."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_option(value: object) -> object:
    # These values are also sent as JSON, which has no infinity.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("an option is a finite number")
    if not isinstance(value, bool | int | float | str | None):
        raise ValueError("an option is a number, a word, true, false or null")
    return value


def _check_harm(value: object) -> object:
    if value is None or value is False:
        return value
    if isinstance(value, int | float) and value is not True and 0 <= value <= 1:
        return float(value)  # the integer 0 would equal false
    raise ValueError("write a number from 0 to 1, or false to keep whatever was merged")


Option = Annotated[bool | int | float | str | None, BeforeValidator(_check_option)]
HarmMax = Annotated[bool | float | None, BeforeValidator(_check_harm)]


class RuleConfig(FrozenModel):
    """Which peers' models are accepted, and how they are merged.

    All keys but `name`, `shadow` and `options` belong to LIGHTYEAR; other rules read `options`.
    """

    name: str = LIGHTYEAR
    tau: float = Field(default=0.6, ge=0, le=1)
    gamma: float = Field(default=0.95, gt=0, le=1)
    guard: bool = True
    include_self: bool = True
    weights: Literal["uniform", "samples"] = "uniform"
    weight_max: float = Field(default=0.5, gt=0, le=1)
    harm_max: HarmMax = None
    """How much a merge may add to our validation loss, in units of ln C or as measured (`chance`).

    False: no limit.  None: 0.1 with the guard, no limit without it, as in the paper.
    """
    shadow: bool = False
    """Whether a second model trains without merging, to compare with and to fall back to."""
    output: Literal["logits", "softmax"] = "logits"
    """The network function whose kernel is compared."""
    reference: Literal["trained", "previous"] = "trained"
    """The model of ours that peers are compared with: as trained, or before this training."""
    unbiased: bool = False
    """Whether the agreement is the unbiased estimate, which has no floor for few samples."""
    options: dict[str, Option] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_newer_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave newer keys out unless they are set: nodes without them compare digests."""
        plain: dict[str, Any] = serialize(self)
        for key in NEWER_RULE_KEYS:
            if getattr(self, key) == type(self).model_fields[key].default:
                plain.pop(key, None)
        return plain

    @model_validator(mode="after")
    def _options_belong(self) -> RuleConfig:
        if self.name == LIGHTYEAR and self.options:
            raise ValueError("lightyear's settings stand beside `name`, not under `options`")
        ours = self.model_dump(exclude={"name", "shadow", "options"}, exclude_defaults=True)
        if self.name != LIGHTYEAR and ours:
            key = next(iter(ours))
            raise ValueError(
                f"`{key}` is a setting of lightyear; those of {self.name} stand under `options`"
            )
        return self

    @property
    def harm_allowed(self) -> float | None:
        """The limit for merged models; None if they are not checked."""
        if self.name != LIGHTYEAR or isinstance(self.harm_max, bool):
            return None
        if self.harm_max is None:
            return HARM_MAX_GUARDED if self.guard else None
        return self.harm_max

    def computed(self) -> dict[str, Any]:
        """The settings that change results, as plain values.

        `harm_max` is included only if there is a limit, so results from before that setting
        existed keep their identity.
        """
        plain = self.model_dump(mode="json", exclude={"harm_max"})
        return plain if self.harm_allowed is None else {**plain, "harm_max": self.harm_allowed}

    @property
    def threshold(self) -> float | None:
        """The minimum agreement of a peer, if the rule has one."""
        return self.tau if self.name == LIGHTYEAR else None

    @property
    def alone(self) -> bool:
        """Whether this site trains without peers: nothing is sent or fetched."""
        return self.name == ALONE


class BarrierConfig(FrozenModel):
    """When a round closes; without `min_peers` and `faulty_max`, the number of sites decides."""

    min_peers: int | None = Field(default=None, ge=1)
    faulty_max: int | None = Field(default=None, ge=0)
    grace: Seconds = 30.0
    """How long to wait for missing peers once `min_peers` have delivered."""
    grace_min: Seconds | None = None
    """The shortest wait, for peers that usually deliver soon; a third of `grace` by default."""
    deadline: Seconds = 1800.0
    """How long to wait for a peer that makes progress in training or sending."""
    consistency: Literal["echo", "none"] | None = None
    """echo: merge only updates that enough sites vouch for, so that no site can be shown another
    one; the default if faulty sites are tolerated."""
    heartbeat: Annotated[Seconds, Field(ge=0.5)] = 5.0
    suspect: Seconds = 20.0
    observe: Seconds = 5.0


class ExchangeConfig(FrozenModel):
    """Which tensors are exchanged, and how they are encoded."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """float32 sends weights unchanged; for the shorter types they are rounded before sending."""
    compression: Literal["zstd"] = "zstd"
    delta: bool = True
    """Send only differences to peers that have the previous update."""
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    """Shell patterns of tensor names; excluded tensors are not sent."""

    def selection(self) -> dict[str, Any]:
        """The settings that change the models, without those at their default."""
        return self.model_dump(
            mode="json", include={"dtype", "include", "exclude"}, exclude_defaults=True
        )


class PeerConfig(FrozenModel):
    name: Name
    address: Address | None
    """None for a site that cannot be reached: it opens all its connections itself."""
    fingerprint: Annotated[
        tuple[Annotated[str, Field(pattern=FINGERPRINT_PATTERN)], ...], BeforeValidator(_as_list)
    ] = Field(min_length=1, max_length=PINS_MAX)
    certificate: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        min_length=1, max_length=PINS_MAX
    )


class FederationConfig(FrozenModel):
    """The content of `peers.yaml`."""

    version: Literal[1]
    federation: Name
    seed: int = Field(default=0, ge=0, lt=2**63)
    rounds: int = Field(default=20, ge=1, le=1_000_000)
    rule: RuleConfig = RuleConfig()
    barrier: BarrierConfig = BarrierConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    peers: tuple[PeerConfig, ...] = Field(max_length=SITES_MAX)

    @model_validator(mode="after")
    def _peers_are_distinct(self) -> FederationConfig:
        seen: set[tuple[str, str]] = set()
        for index, peer in enumerate(self.peers):
            keys = [("name", peer.name)]
            keys += [("address", peer.address)] if peer.address else []
            keys += [("fingerprint", pin) for pin in peer.fingerprint]
            for key in keys:
                if key in seen:
                    raise PydanticCustomError(
                        "duplicate_peer",
                        "two peers have the same {what} `{value}`",
                        {"what": key[0], "value": key[1], "index": index},
                    )
                seen.add(key)
        return self

    def digest(self) -> Digest:
        """The hash of the settings; independent of the order of peers, comments and spacing."""
        plain = self.model_dump(mode="json")
        plain["peers"].sort(key=lambda peer: peer["name"])
        return Digest(_digest_of(plain))

    def clauses(self) -> dict[str, str]:
        """The settings that `digest` covers: each key with a short digest of its value."""
        plain = self.model_dump(mode="json")
        peers = plain.pop("peers")
        flat = {f"peers.{peer['name']}": peer for peer in peers}
        for key, value in plain.items():
            if isinstance(value, dict):
                flat |= {f"{key}.{inner}": each for inner, each in value.items()}
            else:
                flat[key] = value
        return {key: _digest_of(value)[:CLAUSE_DIGITS] for key, value in flat.items()}

    def find(self, fingerprint: Fingerprint) -> PeerConfig | None:
        return next((peer for peer in self.peers if fingerprint in peer.fingerprint), None)


def load_federation_config(path: Path) -> FederationConfig:
    document = strict_yaml.read(path)
    return validated(FederationConfig, document.values, document)


def _digest_of(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
