"""Recovery of a site whose durable state was lost, or restored from an old backup.

Peers answer a greeting with our newest update that they know.  An update that is signed by us and
missing from our state proves that the state is outdated.  Such a site then signs under a new
generation, which no earlier signature of ours can belong to (law 8).
"""

from __future__ import annotations

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.protocol.peer_table import PeerTable
from lightyear_node.protocol.round_closing import count
from lightyear_node.types import Generation, PeerName, Round, Update


class Recovery:
    """Our generation, and which updates of ours the peers know."""

    def __init__(self, parameters: Parameters, memory: DurableState, table: PeerTable) -> None:
        self.parameters = parameters
        self.generation = memory.generation
        self.recovering = memory.recovering
        """Whether a new generation must start before anything is announced."""
        self.rolled_back = False
        """Whether the state proved outdated in the middle of a round."""
        self._table = table
        self._answered: set[PeerName] = set()
        self._newest_own: Update | None = None
        self._wall_s = 0
        self._observe_until = 0.0

    def start(self, now: float, wall_s: int) -> None:
        self._wall_s = wall_s
        self._observe_until = now + self.parameters.observe_s

    def reconfigure(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._answered &= parameters.peers

    def answered(self, peer: PeerName) -> None:
        self._answered |= {peer} & self.parameters.peers

    def learn_own(self, update: Update, announced: Update | None, sealing: Update | None) -> bool:
        """Note an update signed by us; whether it proves that our state is outdated."""
        known = self._newest_own
        if known is None or update.age > known.age:
            self._newest_own = update
        return not self.recovering and self._is_unknown(update, announced, sealing)

    def has_observed(self, now: float) -> bool:
        """Whether enough peers have answered, or had the time to, for a round to begin."""
        if self.recovering and len(self._answered) < self.parameters.honest_quorum:
            return False
        all_answered = self._answered >= self.parameters.peers - self._table.excluded
        return all_answered or now >= self._observe_until

    def next_generation(self, round: Round) -> Round:
        """Start a new generation; returns its first round."""
        seen = self._newest_own
        before = max(self._wall_s, self.generation, seen.generation if seen else 0)
        self.generation = Generation(before + 1)
        self.recovering = self.rolled_back = False
        # A site that had finished repeats the last round: peers may need its last update, and they
        # do not accept updates of an earlier generation.
        reached = max(round, seen.round + 1 if seen else 0, self._table.supported_round())
        return Round(min(reached, self.parameters.rounds - 1))

    def status_text(self) -> str:
        """What a starting site is waiting for, for the operator."""
        share = f"{len(self._answered)} of {len(self._table.peers)}"
        if self.recovering and not self.parameters.peers - self._table.excluded:
            return "too few sites are left to look for"
        if self.recovering:
            needed = count(self.parameters.honest_quorum, "answer")
            why = f"; {needed} needed to know which rounds we took part in"
            return f"looking for the other sites ({share} have answered{why})"
        return f"looking for the other sites ({share} have answered)"

    def _is_unknown(self, update: Update, announced: Update | None, sealing: Update | None) -> bool:
        """Whether an update signed by us is missing from our state."""
        if update.generation < self.generation or update in (announced, sealing):
            return False
        return announced is None or update.age >= announced.age
