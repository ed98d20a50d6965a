"""A barrier in any phase of a round, and from there to the end of the round."""

from __future__ import annotations

from typing import Any

from lightyear_node.protocol.events import Answered, Command, Judge, Merged, Seal, Sealed, Trained
from lightyear_node.protocol.parameters import Phase
from lightyear_node.types import Digest
from tests.support.barrier_bench import MODEL, US, B, Bench, C, D, judge_in, memory, only, update

BUSY = [
    Phase.OBSERVING,
    Phase.TRAINING,
    Phase.SEALING,
    Phase.COLLECTING,
    Phase.JUDGING,
    Phase.MERGING,
]


def brought_to(phase: Phase, round: int = 3, **parameters: Any) -> Bench:
    """A barrier in the middle of this phase of a round."""
    known = memory(round, announced=update(US, round - 1))
    bench = Bench(**{"faulty_max": 1, **parameters}, remembers=known)
    bench.start(answering=phase is not Phase.OBSERVING)
    if phase in BUSY[2:]:
        bench.tell(Trained(Digest("ours")))
    if phase in BUSY[3:]:
        [seal] = only(Seal, bench.all)
        bench.tell(Sealed(seal.update))
    if phase in BUSY[4:]:
        bench.delivered(*(update(peer, round) for peer in (B, C, D)))
    if phase is Phase.MERGING:
        bench.judged(judge_in(bench.all))
    assert bench.phase is phase
    return bench


def brought_to_the_end_of_the_round(bench: Bench) -> list[Command]:
    """Answer every command until the round is over."""
    before = len(bench.all)
    if bench.phase is Phase.OBSERVING:
        bench.tell(*(Answered(peer) for peer in (B, C, D)))
    if bench.phase is Phase.TRAINING:
        bench.tell(Trained(Digest("ours")))
    if bench.phase is Phase.SEALING:
        bench.tell(Sealed(only(Seal, bench.all)[-1].update))
    if bench.phase is Phase.COLLECTING:
        bench.delivered(*(update(peer, bench.barrier.round) for peer in (B, C, D)))
        bench.wait(31, alive=[B, C, D])
    if bench.phase is Phase.JUDGING:
        bench.judged(only(Judge, bench.all)[-1])
    if bench.phase is Phase.MERGING:
        bench.tell(Merged(bench.barrier.round, MODEL))
    return bench.all[before:]
