"""Judges peers so that a bad file affects the verdict of its own peer only.

Opens the files, runs the rule on those that open, and leaves out those with which the rule raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from lightyear_node.learning import Weights
from lightyear_node.learning.rules.base import Candidate, Judgement
from lightyear_node.types import PeerName, Reason, Verdict
from lightyear_node.worker.bad_file_search import tried
from lightyear_node.worker.error_redaction import redacted
from lightyear_node.worker.job_types import CandidateFile

_log = logging.getLogger(__name__)

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
"""Not a file's fault, since all have the same size; the daemon retries in a new process."""


def judge_isolated(
    peers: Sequence[CandidateFile],
    opened: Callable[[str], Weights],
    judge: Callable[[Sequence[Candidate]], Judgement],
) -> Judgement:
    """The verdicts of `judge`, and one for each peer whose file it cannot judge.

    Raises what `judge` raises if it fails without any peer, or if no single peer is the cause.
    """
    unfit: dict[PeerName, Reason] = {}
    candidates: list[Candidate] = []
    for peer in peers:
        try:
            weights = opened(peer.path)
        except FileNotFoundError:
            unfit[peer.peer] = Reason.DAMAGED
        except ValueError as problem:  # another size or header, or an empty file
            unfit[peer.peer] = Reason.MALFORMED
            _log_problem(peer.peer, problem)
        else:
            candidates.append(Candidate(peer.peer, weights, peer.samples, peer.digest))
    problems: list[Exception] = []

    def attempt(some: Sequence[Candidate]) -> Judgement | None:
        try:
            return judge(some)
        except OUT_OF_MEMORY:
            raise
        except Exception as problem:  # the user's model, loss or rule may raise anything
            problems.append(problem)
            if len(some) == 1:
                _log_problem(some[0].peer, problem)
            return None

    found = tried(candidates, attempt)
    if found.job_at_fault or found.result is None:
        raise problems[-1]
    unfit |= {peer.peer: Reason.MALFORMED for peer in found.culprits}
    unfit |= {peer.peer: Reason.UNSCORED for peer in found.unclear}
    if not unfit:
        return found.result
    given = {verdict.peer: verdict for verdict in found.result.verdicts}
    return Judgement(
        tuple(
            given.get(peer.peer) or Verdict(peer.peer, False, unfit[peer.peer], digest=peer.digest)
            for peer in peers
        ),
        found.result.state,
    )


def _log_problem(peer: PeerName, problem: Exception) -> None:
    fields = {"event": "judging", "peer": peer}
    text = "the update of %s cannot be judged: %s"
    _log.warning(text, peer, redacted(problem, full=False), extra=fields)
