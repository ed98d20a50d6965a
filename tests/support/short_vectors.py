"""Models that are short vectors, split into two tensors so that rules must read both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lightyear_node.learning import Candidate, Validation, make_rule, shares_of
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Reason, Round, Verdict

NO_VALIDATION = cast(Validation, None)  # these rules must not use the validation data


def tensors(values: Sequence[float]) -> dict[str, Tensor]:
    vector = torch.tensor(values, dtype=torch.float64)
    return {"a.weight": vector[1:], "b.weight": vector[:1]}


def vector(model: Mapping[str, Tensor]) -> list[float]:
    return torch.cat([model["b.weight"], model["a.weight"]]).tolist()


def site(name: str, values: Sequence[float], samples: int = 0) -> Candidate:
    return Candidate(PeerName(name), tensors(values), samples)


def run(
    name: str,
    own: Sequence[float],
    peers: Mapping[str, Sequence[float]],
    context: RoundContext | None = None,
    **options: Any,
) -> tuple[dict[str, Verdict], list[float]]:
    """Each peer's verdict, and the new model."""
    rule = make_rule(name, options)
    candidates = [site(peer, values) for peer, values in peers.items()]
    verdicts = rule.judge(
        site("us", own), candidates, NO_VALIDATION, context or RoundContext(Round(0))
    ).verdicts
    after = rule.merge(tensors(own), shares_of(verdicts, candidates), Round(0))
    return {v.peer: v for v in verdicts}, vector(dict(after))


def reasons(verdicts: Mapping[str, Verdict]) -> dict[str, Reason]:
    return {name: verdict.reason for name, verdict in verdicts.items()}
