"""Names and settings of the malfunctions that experiments inject.

A malfunction changes the update that a site sends: one copy per round, the same for every peer.
The site itself trains, judges and merges like an honest one.

    kind          update sent                                    scale and its default
    ana           θ · (1 + s/100 · N(0, 1))                      s = 120.5      the paper's noise
    noise         θ + σ · N(0, 1), as in the paper's main text   σ = 0.1
    sfa           −α θ                                           α = 1          sign flipping
    random        a freshly initialized network                  –              failed training
    dynamic       one of ana, sfa, random, drawn every round     s = 120.5      of its noise
    nan           NaN in every entry                             –              not in the paper,
    head-flip     the final layer times −1                       –              nor are those below
    head-scale    the final layer times a factor                 100
    bias-shift    one class's bias raised                        10
    label-flip    trained on flipped labels                      –
    stale         the update of some rounds ago                  3 rounds
    free-rider    the model that the round began with            –

`label-flip` needs labels that are classes, of samples or of pixels; it refuses a regression.

`ATTACKS` names the attacks of the literature in `lab.attacks`, which see the other sites' updates
and have options.  Other kinds are the user's own: the name of an entry point of an installed
package, or `module:function`.  `malfunction_plugins` loads both.

The product has no fault injection: no setting of a node makes it malfunction.  The laboratory
starts a malfunctioning node with `faulty_node` and simulates one with `faulty_site`.  Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lightyear_node.config.federation import Option
from lightyear_node.config.fields import FrozenModel
from lightyear_node.errors import ConfigError

FAULTY_NODE = "lightyear_node.lab.faulty_node"
PLUGIN_GROUP = "lightyear_node.malfunctions"
"""Entry point group of the malfunctions in installed packages."""
ATTACK_SUCCESS = "attack_success"
"""Metric of honest sites under an attack that says how its success is measured."""


class Malfunction(StrEnum):
    ANA = "ana"
    SFA = "sfa"
    RANDOM = "random"
    DYNAMIC = "dynamic"
    NOISE = "noise"
    NAN = "nan"
    HEAD_FLIP = "head-flip"
    HEAD_SCALE = "head-scale"
    BIAS_SHIFT = "bias-shift"
    LABEL_FLIP = "label-flip"
    STALE = "stale"
    FREE_RIDER = "free-rider"


MALFUNCTIONS = tuple(str(kind) for kind in Malfunction)

_FUNCTIONS = {
    "statistical": ("alie", "ipm", "min-max", "min-sum"),
    "layers": ("clipped-bias", "layer-swap", "rescale"),
    "label_poison": ("targeted-flip", "boiling-frog", "sybil"),
    "backdoors": ("backdoor", "backdoor-search"),
    "adaptive": ("adaptive-grey", "adaptive-white", "sleeper", "overfit-v"),
}
ATTACKS: Mapping[str, str] = MappingProxyType(
    {
        name: f"lightyear_node.lab.attacks.{module}:{name.replace('-', '_')}"
        for module, names in _FUNCTIONS.items()
        for name in names
    }
)
"""Attacks of the literature by name, as `module:function`."""


def known_malfunctions() -> tuple[str, ...]:
    """Names of the built-in malfunctions, of the known attacks, then of installed packages."""
    ours = (*MALFUNCTIONS, *ATTACKS)
    installed = {point.name for point in entry_points(group=PLUGIN_GROUP)}
    return (*ours, *sorted(installed - set(ours)))


def is_known(kind: str) -> bool:
    """Whether this is a known name or has the form `module:function`; imports nothing."""
    return kind in known_malfunctions() or re.fullmatch(r"[\w.]+:[\w.]+", kind) is not None


def plugin_point(name: str) -> EntryPoint | None:
    """The entry point of this name; raises if two packages offer different ones."""
    points = entry_points(group=PLUGIN_GROUP, name=name)
    values = sorted({point.value for point in points})  # a package may be on the path twice
    if len(values) > 1:
        raise ConfigError(
            f'two packages offer a malfunction "{name}": {values[0]} and {values[1]}',
            hint="uninstall one of them, or name the function as module:function",
        )
    return next(iter(points), None)


class MalfunctionConfig(FrozenModel):
    """How a site's outgoing updates are corrupted."""

    kind: str
    scale: float | None = None
    """Strength; its unit and its default depend on the kind."""
    options: dict[str, Option] = Field(default_factory=dict)
    """Of an attack or the user's own malfunction; the built-in ones have none."""

    @model_serializer(mode="wrap")
    def _without_empty_options(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out empty options: the keys of published results were made without them."""
        values: dict[str, Any] = plain(self)
        if not self.options:
            values.pop("options", None)
        return values

    @property
    def built_in(self) -> bool:
        """Whether it is no function that sees the other sites' updates."""
        return self.kind in MALFUNCTIONS

    def checked(self) -> MalfunctionConfig:
        """Raise `ConfigError` for an unknown kind, or for options that it cannot have."""
        if not is_known(self.kind):
            raise ConfigError(
                f"there is no malfunction `{self.kind}`",
                hint="known: " + ", ".join(known_malfunctions()) + ", or module:function",
            )
        if self.kind in (*MALFUNCTIONS, *ATTACKS) and plugin_point(self.kind) is not None:
            raise ConfigError(
                f"an installed package offers a malfunction `{self.kind}`, which is built in",
                hint="give it another name in that package's entry points",
            )
        if self.built_in and self.options:
            raise ConfigError(
                f"malfunction {self.kind} has no option `{next(iter(self.options))}`",
                hint="built-in malfunctions have a scale only",
            )
        return self
