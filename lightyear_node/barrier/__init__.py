"""The round barrier: when to train, whom to fetch, when to close a round, what to merge.

Everything that decides a round's fate is in this folder, and nothing here acts.  Time is an
argument, the network is events in and commands out, and equal inputs give equal outputs:
`tests/sim` runs whole federations of these objects.  The barrier must not know sockets, files,
tensors or clocks.

    OBSERVING ─▶ TRAINING ─▶ SEALING ─▶ COLLECTING ─▶ JUDGING ─▶ MERGING ─▶ TRAINING … FINISHED
       P0                           P1                        P2         P3   (or PAUSED)

This is not consensus: every site merges its own choice, and no two need the same model.  It is
loose lock-step, with rounds as Lamport time.  The laws:

1. Durable, then visible.  An update is announced after P1, merged after P2, and its successor is
   trained after P3.  A site that crashed announces the same update again and carries out the same
   decision again.
2. The round of an update, its tag, is chosen when training ends, so that no training is thrown
   away: max(our round, the supported round, our last tag + 1).
3. The supported round is the highest that faulty_max + 1 distinct peers have reached.  Of so many
   one is honest, so liars cannot drag us beyond a round that an honest site has announced.
4. A peer has delivered when we hold an update of it with tag >= our round: a fresher one is never
   worse, and a peer that has moved on does not hold us back.
5. A round closes with min_peers delivered and nobody left to wait for (ALL) or a grace period over
   (GRACE), or because the supported round is beyond it (OVERTAKEN); never for time alone.  Who is
   seen to work or to send is waited for beyond the grace, up to a deadline.
6. One update of a peer is merged at most once.
7. Every table has one slot per peer, or per pair of peers.  No memory is spent on a round number.
8. Who has no memory, or an outdated one, says nothing until faulty_max + 1 peers have answered, and
   then signs under a new generation.  Others do not merge it for a while, but count it.
9. Two updates with one signature for one generation and round are evidence, whoever brings them:
   durable (P4), then the peer is as if it were not there, until an operator forgives it.
10. We vouch for at most one update of a peer and round, durably (P5) before anybody hears of it.
    In echo mode only what so many vouch for that no other can find as many is merged.

`terms`, `memory` and `records` have the words, `view` and `testimony` what a site knows of the
others, `patience` and `closing` when a round may close, `machine` a site's life.
"""

from lightyear_node.barrier.machine import DEGRADED, LEFT_OUT, ROLLED_BACK, Barrier
from lightyear_node.barrier.memory import Decision, Memory
from lightyear_node.barrier.records import (
    Accuse,
    Accused,
    Alarm,
    Announce,
    Announced,
    Answered,
    Blocked,
    Command,
    Commit,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Heard,
    Judge,
    Judged,
    Merge,
    Merged,
    Note,
    Pardoned,
    Paused,
    Reformed,
    Reported,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
)
from lightyear_node.barrier.terms import (
    Cause,
    Phase,
    Standing,
    Terms,
    admissible_min_peers,
    default_faulty_max,
    default_min_peers,
)

__all__ = [
    "DEGRADED",
    "LEFT_OUT",
    "ROLLED_BACK",
    "Accuse",
    "Accused",
    "Alarm",
    "Announce",
    "Announced",
    "Answered",
    "Barrier",
    "Blocked",
    "Cause",
    "Command",
    "Commit",
    "Decide",
    "Decision",
    "Event",
    "Fetch",
    "FetchFailed",
    "Fetched",
    "Finish",
    "Greet",
    "Heard",
    "Judge",
    "Judged",
    "Memory",
    "Merge",
    "Merged",
    "Note",
    "Pardoned",
    "Paused",
    "Phase",
    "Reformed",
    "Reported",
    "Seal",
    "Sealed",
    "Standing",
    "Terms",
    "Tick",
    "Train",
    "Trained",
    "admissible_min_peers",
    "default_faulty_max",
    "default_min_peers",
]
