"""What all sites of a federation have agreed on: `peers.yaml`.

The same at every site; its digest is compared when peers meet.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from lightyear_node import strict_yaml
from lightyear_node.config.fields import FINGERPRINT_PATTERN, Address, Frozen, Name, Seconds
from lightyear_node.config.validation import validated
from lightyear_node.records import Digest, Fingerprint, PeerName

SITES_MAX = 64
PINS_MAX = 2
"""Certificates of one site: the one in use, and the one that is to follow it."""

CLAUSE_DIGITS = 16
"""Of a digest, to tell two values of one key apart."""

LIGHTYEAR = "lightyear"
ALONE = "local"
HARM_MAX_GUARDED = 0.1
"""What a merge may cost a guarded site; see docs/do-no-harm.md for why."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


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


Option = Annotated[bool | int | float | str | None, BeforeValidator(_check_option)]
HarmMax = Annotated[bool | float | None, BeforeValidator(_check_harm)]


class RuleTerms(Frozen):
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


class BarrierTerms(Frozen):
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


class ExchangeTerms(Frozen):
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


class Peer(Frozen):
    name: Name
    address: Address | None
    """None for a site that nobody can reach: it opens all its connections itself."""
    fingerprint: Annotated[
        tuple[Annotated[str, Field(pattern=FINGERPRINT_PATTERN)], ...], BeforeValidator(_as_list)
    ] = Field(min_length=1, max_length=PINS_MAX)
    certificate: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        min_length=1, max_length=PINS_MAX
    )


class Agreement(Frozen):
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


def load_agreement(path: Path) -> Agreement:
    document = strict_yaml.read(path)
    return validated(Agreement, document.values, document)


def _digest_of(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
