"""Properties of every rule for arbitrary models, on a small real network."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightyear_node.learning import (
    Candidate,
    Layout,
    Validation,
    Weights,
    exchanged,
    make_rule,
    shares_of,
    write,
)
from lightyear_node.learning.guard import soundness
from lightyear_node.learning.rules import RULES, RoundContext
from lightyear_node.learning.rules.pairwise import cosines, gram, norms, squared_distances
from lightyear_node.types import PeerName, Reason, Round, Verdict

Tensors = dict[str, Tensor]
RULE_NAMES = sorted(RULES)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def models(seed: int, count: int) -> list[Tensors]:
    """A start model and models derived from it: near, far, flipped, scaled, equal or zero."""
    generator = torch.Generator().manual_seed(seed)
    start = {name: tensor.clone() for name, tensor in exchanged(network()).items()}
    drawn = [start]
    for _ in range(count):
        kind = int(torch.randint(8, (), generator=generator))
        scale = (0.05, 0.05, 0.3, 2.0, -1.0, 5.0, 0.0, 1.0)[kind]
        if kind < 4:
            drawn.append(
                {n: t + scale * torch.randn(t.shape, generator=generator) for n, t in start.items()}
            )
        else:
            drawn.append({name: tensor * scale for name, tensor in start.items()})
    return drawn


@given(st.sampled_from(RULE_NAMES), st.integers(0, 10**6), st.integers(0, 7), st.randoms())
@settings(max_examples=150, deadline=None)
def test_every_rule_keeps_its_invariants_for_arbitrary_models(
    name: str, seed: int, count: int, random: Any
) -> None:
    start, own_weights, *others = models(seed, count + 1)
    samples = [random.choice([0, 10, 500]) for _ in range(count + 1)]
    own = Candidate(PeerName("m"), own_weights, samples[0])  # in the middle of the names
    peers = [
        Candidate(PeerName(f"{random.choice('az')}{index}"), tensors, samples[index + 1])
        for index, tensors in enumerate(others)
    ]
    rule = make_rule(name)
    validation = Validation(
        network(), [(torch.linspace(-1, 1, 24).reshape(8, 3), torch.arange(8) % 2)]
    )
    context = RoundContext(Round(2), 9, start)
    judgement = rule.judge(own, peers, validation, context)
    verdicts = judgement.verdicts

    assert [v.peer for v in verdicts] == [peer.peer for peer in peers]
    assert all(v.accepted is (v.reason is Reason.OK) is (v.weight > 0) for v in verdicts)
    assert sum(v.weight for v in verdicts) <= 1 + 1e-9
    assert all(math.isfinite(number) for v in verdicts for number in (v.weight, *v.checks.values()))
    json.dumps(dict(judgement.state), allow_nan=False)
    after = dict(rule.merge(own.weights, shares_of(verdicts, peers), context.round))
    if not any(v.accepted for v in verdicts):
        assert bits(after) == bits(own.weights)

    # In another order and with unusable peers added, the result is the same bit for bit.
    broken = {n: t.clone() for n, t in start.items()}
    broken["2.bias"][1] = random.choice([math.nan, math.inf, -math.inf])
    unsound = Candidate(PeerName("nan"), broken, 7)
    other_schema = Candidate(PeerName("b-schema"), {**start, "2.bias": torch.zeros(3)}, 7)
    shuffled = [*peers, unsound, other_schema]
    random.shuffle(shuffled)
    again = rule.judge(own, shuffled, validation, context)
    by_name = {v.peer: v for v in again.verdicts}
    assert [by_name[v.peer] for v in verdicts] == list(verdicts)
    assert again.state == judgement.state
    if name != "local":
        assert by_name[unsound.peer].reason is Reason.NONFINITE
        assert by_name[other_schema.peer].reason is Reason.SCHEMA_MISMATCH
    for unusable in (unsound, other_schema):
        assert by_name[unusable.peer].weight == 0
    shares = shares_of(again.verdicts, shuffled)
    assert bits(dict(rule.merge(own.weights, shares, context.round))) == bits(after)


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_nan_after_a_negative_variance_is_found() -> None:
    """`soundness` stops at the first problem; a rule that tolerates it must still find the NaN."""
    own = {"a.running_var": torch.ones(2), "b.weight": torch.ones(2)}
    negative = {"a.running_var": -torch.ones(2), "b.weight": torch.ones(2)}
    both = {**negative, "b.weight": torch.full((2,), math.nan)}
    assert soundness(both) is Reason.DOMAIN
    peers = [Candidate(PeerName("n"), negative), Candidate(PeerName("b"), both)]
    context = RoundContext(Round(0))
    verdicts = make_rule("fedavg").judge(
        Candidate(PeerName("us"), own), peers, cast(Validation, None), context
    )
    assert [v.reason for v in verdicts.verdicts] == [Reason.OK, Reason.NONFINITE]


@pytest.mark.parametrize(
    "name", [name for name in RULE_NAMES if name not in ("lightyear", "local")]
)
def test_values_that_overflow_when_squared_count_as_nonfinite(name: str) -> None:
    def weights(value: float) -> Tensors:
        return {"w": torch.tensor([value, 1.0], dtype=torch.float64)}

    peers = [Candidate(PeerName(f"p{index}"), weights(index)) for index in range(4)]
    peers.append(Candidate(PeerName("huge"), weights(-1e200)))
    own, context = Candidate(PeerName("us"), weights(1.5)), RoundContext(Round(0))
    verdicts = make_rule(name).judge(own, peers, cast(Validation, None), context).verdicts
    assert verdicts[-1].reason is Reason.NONFINITE
    without = make_rule(name).judge(own, peers[:-1], cast(Validation, None), context).verdicts
    assert verdicts[:-1] == without


# The Gram matrix.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_distances_and_cosines_are_those_of_the_whole_vector(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightyear_node.learning.rules.pairwise.BLOCK_BYTES", 8 * 4 * 7)
    generator = torch.Generator().manual_seed(0)

    def draw() -> Tensors:
        return {
            "conv": torch.randn(4, 3, 2, 2, generator=generator).to(dtype),
            "loose": torch.randn(11, 5, generator=generator).to(dtype).T,  # not contiguous
            "one": torch.randn((), generator=generator).to(dtype),
            "none": torch.empty(0, dtype=dtype),
        }

    drawn = [draw() for _ in range(4)]
    flat = np.array(
        [np.concatenate([t.double().numpy().ravel() for t in m.values()]) for m in drawn]
    )
    assert gram(drawn) == pytest.approx(flat @ flat.T, rel=1e-12)
    lengths = np.linalg.norm(flat, axis=1)
    assert cosines(gram(drawn)) == pytest.approx(
        (flat @ flat.T) / np.outer(lengths, lengths), rel=1e-12
    )
    apart = np.linalg.norm(flat[:, None] - flat[None, :], axis=2)
    near = gram(drawn, drawn[1])
    assert np.sqrt(squared_distances(near)) == pytest.approx(apart, abs=1e-9)
    assert norms(near) == pytest.approx(apart[1], rel=1e-12)
    assert norms(near)[1] == 0


def test_a_small_step_far_from_zero_is_measured() -> None:
    """1e8 from zero, one step of single precision is still measured: subtraction comes first."""
    own = {"w": torch.full((1000,), 1e8)}
    other = {"w": torch.full((1000,), 1e8 + 8)}
    assert norms(gram([own, other], own))[1] == pytest.approx(8 * math.sqrt(1000), rel=1e-12)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name != "lightyear"])
def test_judging_many_files_holds_one_tensor_of_each(tmp_path: Path, name: str) -> None:
    tensors = {f"{index}.weight": torch.randn(512, 1024) for index in range(8)}  # 16 MiB
    layout = Layout.of(tensors)
    for peer in range(12):
        write(tmp_path / str(peer), layout, tensors)
    files = [Weights(tmp_path / str(peer), layout) for peer in range(12)]
    sites = [Candidate(PeerName(f"p{index:02}"), file) for index, file in enumerate(files)]
    context = RoundContext(Round(0), 9, Weights(tmp_path / "3", layout))

    def judge() -> tuple[Verdict, ...]:
        return make_rule(name).judge(sites[0], sites[1:], cast(Validation, None), context).verdicts

    assert memory_peak(judge) < 3 * layout.file_bytes  # all twelve would be 192 MiB


def memory_peak(work: Callable[[], Any]) -> int:
    """Peak growth of resident memory in bytes during `work`, sampled by another thread."""
    process, done, seen = psutil.Process(), threading.Event(), [0]

    def watch() -> None:
        while not done.is_set():
            seen.append(process.memory_info().rss)
            time.sleep(0.0005)

    before = process.memory_info().rss
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(seen) - before
