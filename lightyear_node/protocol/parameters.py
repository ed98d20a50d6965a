"""Configuration of the barrier, phases of a round, causes of closing, standings of peers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightyear_node.errors import BarrierMisuse
from lightyear_node.types import PeerName


class Phase(StrEnum):
    """Where a site is in its round."""

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
    """What the current round can still expect from a peer."""

    DELIVERED = "delivered"
    AWAITED = "awaited"
    LAGGING = "lagging"
    SILENT = "silent"
    REFUSED = "refused"
    PAUSED = "paused"
    BLOCKED = "blocked"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Parameters:
    """The barrier's part of peers.yaml, already validated; `peers` excludes this site.

    A site that trains alone has no peers.
    """

    peers: frozenset[PeerName]
    min_peers: int
    faulty_max: int
    rounds: int
    grace_s: float = 30.0
    grace_min_s: float = 30.0
    """The grace period adapts to usual delays between `grace_min_s` and `grace_s`."""
    deadline_s: float = 0.0
    """How long to wait for peers that make progress; no effect if below `grace_s`."""
    heartbeat_s: float = 5.0
    suspect_s: float = 20.0
    observe_s: float = 5.0
    degraded_s: float = 60.0
    lag_rounds: int = 3
    stall_s: float = 120.0
    """A peer whose reported progress is unchanged for this long is not making progress."""
    probation_rounds: int = 2
    echo: bool = False
    """Merge only updates that `echo_quorum` sites vouch for."""

    @property
    def echo_quorum(self) -> int:
        """The size at which any two groups of sites share an honest site."""
        sites = len(self.peers) + 1
        return (sites + self.faulty_max) // 2 + 1

    @property
    def honest_quorum(self) -> int:
        """Number of peers that guarantees at least one honest one (at most all)."""
        return min(self.faulty_max + 1, len(self.peers))


def admissible_min_peers(sites: int, faulty_max: int) -> range:
    """The values of min_peers that are both safe and live; empty if there are too few sites.

    Above sites - 1 - faulty_max, silent sites could block the rest.  Below 2 * faulty_max, two
    groups could drift apart for good: when a site advances, faulty_max + 1 honest sites must be at
    its round or beyond, so that the others follow them.  Hence 3 * faulty_max + 1 sites are needed.
    """
    if faulty_max < 0:
        return range(0)
    return range(max(1, 2 * faulty_max), sites - faulty_max)


def check_parameters(us: PeerName, parameters: Parameters) -> None:
    """Raise `BarrierMisuse` if no barrier can run with these parameters."""
    sites = len(parameters.peers) + 1
    if us in parameters.peers:
        raise BarrierMisuse(f"{us} cannot be its own peer")
    alone = not parameters.peers and parameters.min_peers == parameters.faulty_max == 0
    if not alone and parameters.min_peers not in admissible_min_peers(sites, parameters.faulty_max):
        raise BarrierMisuse(
            f"min_peers of {parameters.min_peers} is impossible with {sites} sites of which"
            f" {parameters.faulty_max} may be faulty"
        )


def default_faulty_max(sites: int) -> int:
    return 1 if sites >= 4 else 0


def default_min_peers(sites: int, faulty_max: int) -> int:
    """Half of the sites, limited to the admissible range."""
    admissible = admissible_min_peers(sites, faulty_max)
    if not admissible:
        raise ValueError(f"{sites} sites cannot tolerate {faulty_max} faulty ones")
    return min(max(sites // 2, admissible[0]), admissible[-1])
