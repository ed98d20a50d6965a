"""The terms that a federation's rounds run on, and the words for where a round and a peer stand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightyear_node.records import PeerName


class Phase(StrEnum):
    OBSERVING = "observing"
    PAUSED = "paused"
    TRAINING = "training"
    SEALING = "sealing"
    COLLECTING = "collecting"
    JUDGING = "judging"
    MERGING = "merging"
    FINISHED = "finished"


class Cause(StrEnum):
    """Which rule closed a round."""

    ALL = "all"
    GRACE = "grace"
    OVERTAKEN = "overtaken"


class Standing(StrEnum):
    """What the round being collected may still expect of a peer."""

    DELIVERED = "delivered"
    AWAITED = "awaited"
    LAGGING = "lagging"
    SILENT = "silent"
    REFUSED = "refused"
    PAUSED = "paused"
    BLOCKED = "blocked"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Terms:
    """The barrier's part of peers.yaml, already validated; `peers` is everybody but ourselves.

    A site that trains alone has no peers, and needs none.
    """

    peers: frozenset[PeerName]
    min_peers: int
    faulty_max: int
    rounds: int
    grace_s: float = 30.0
    grace_min_s: float = 30.0
    """The grace adapts to when updates usually come, between these two."""
    deadline_s: float = 0.0
    """How long whoever still makes progress is waited for; no longer than the grace if shorter."""
    heartbeat_s: float = 5.0
    suspect_s: float = 20.0
    observe_s: float = 5.0
    degraded_s: float = 60.0
    lag_rounds: int = 3
    stall_s: float = 120.0
    """Whoever says that it is training, and is no further than this long ago, is not."""
    probation_rounds: int = 2
    echo: bool = False
    """Merge only what so many sites have heard of that none of them can hear of another."""

    @property
    def echo_quorum(self) -> int:
        """More than half of all sites and the faulty ones: two such groups share an honest site."""
        sites = len(self.peers) + 1
        return (sites + self.faulty_max) // 2 + 1

    @property
    def vouchers(self) -> int:
        """So many peers that one of them is honest, or all of them."""
        return min(self.faulty_max + 1, len(self.peers))


def admissible_min_peers(sites: int, faulty_max: int) -> range:
    """The values of min_peers that are both safe and live; none when there are too few sites.

    With more than sites - 1 - faulty_max, silent sites could block the rest.  With fewer than
    2 * faulty_max, two groups could drift apart for good: whoever advances must leave
    faulty_max + 1 honest sites at its round or beyond, for they pull the others up.
    """
    if faulty_max < 0 or sites < 3 * faulty_max + 1:
        return range(0)
    return range(max(1, 2 * faulty_max), sites - faulty_max)


def default_faulty_max(sites: int) -> int:
    return 1 if sites >= 4 else 0


def default_min_peers(sites: int, faulty_max: int) -> int:
    """Half of the peers, as far as that is admissible."""
    admissible = admissible_min_peers(sites, faulty_max)
    if not admissible:
        raise ValueError(f"{sites} sites cannot tolerate {faulty_max} faulty ones")
    return min(max(sites // 2, admissible[0]), admissible[-1])
