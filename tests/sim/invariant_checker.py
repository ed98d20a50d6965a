"""Checks every step of a simulated federation against the protocol's invariants.

Observes what sites receive and do, and keeps its own record; it never reads a barrier's beliefs, so
that a barrier with a wrong state is caught.  S1 to S10 are the names of the invariants.

Guarantees for sites that lose state.  A disk that is lost, or replaced by an older copy, takes away
what the site had signed.  If no peer has reported, since the start, an update of its own that the
site does not remember, it may sign a round a second time, and the others will find out.  No
protocol without a clock could prevent that.  With monotonic wall clocks a lost disk is no such
case: the clock alone makes every generation new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any, NoReturn

from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.events import (
    Accused,
    Announced,
    Answered,
    Event,
    Fetched,
    Judge,
    Reconfigured,
    Reported,
)
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.protocol.peer_table import EVIDENCE_ROUNDS
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Digest, Generation, PeerName, Round, Update
from tests.sim.expected_state import (
    NEVER,
    Age,
    History,
    ProcessState,
    Sealing,
    longest_window,
    widest,
)
from tests.support.object_state import tables_of

WINDOW_MAX = 4
TABLES_EVERY = 8
"""Steps between two checks of all tables: unlimited growth is caught a little later."""


class InvariantBroken(AssertionError):
    def __init__(self, invariant: str, text: str, *sites: PeerName) -> None:
        super().__init__(f"{invariant} is broken: {text}")
        self.invariant = invariant
        self.sites = sites


class InvariantChecker:
    def __init__(
        self,
        sites: list[PeerName],
        honest: list[PeerName],
        parameters: Parameters,
        signed: Set[Update],
        *,
        reliable_clocks: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.highest = Round(-1)
        """The highest tag that an honest site has announced so far."""
        self.signed_twice: set[PeerName] = set()
        """Honest sites that have signed a round twice without being able to know it."""
        self._sites = frozenset(sites)
        self._signed = signed
        self._reliable_clocks = reliable_clocks
        self._byzantine = len(sites) - len(honest)
        self._parameters = dict.fromkeys(honest, parameters)
        self._members = dict.fromkeys(honest, self._sites)
        self._digests: dict[Sealing, tuple[Digest, int]] = {}
        self._merged_as: dict[tuple[PeerName, Round], Digest] = {}
        self._processes: dict[PeerName, ProcessState] = {}
        self._histories = {site: History() for site in honest}
        self._backups = {site: History() for site in honest}
        self._forgotten: dict[PeerName, list[str]] = {site: [] for site in honest}

    def commits_of(self, site: PeerName) -> int:
        return len(self._histories[site].committed) - 1

    def merged_by(self, site: PeerName) -> Mapping[Round, tuple[Update, ...]]:
        """Return what a site merged in each of its rounds."""
        return {round: merged for (_, round), merged in self._histories[site].decided.items()}

    # Restarts and disks.

    def boots(self, site: PeerName, barrier: Barrier, parameters: Parameters) -> None:
        self._reconfigures(site, parameters)
        known = dict(self._histories[site].generations)
        self._processes[site] = ProcessState(barrier, known, list(tables_of(barrier)))

    def loses_disk(self, site: PeerName) -> None:
        self._forgotten[site].append("lost")
        self._histories[site] = History()

    def backs_up(self, site: PeerName) -> None:
        self._backups[site] = self._histories[site].copy()

    def restores(self, site: PeerName) -> None:
        self._forgotten[site].append("restored")
        self._histories[site] = self._backups[site].copy()

    def distrusts_memory(self, site: PeerName) -> None:
        """The operator declares the disk to be from a backup."""
        self._histories[site].incomplete = True

    def has_an_older_disk(self, site: PeerName) -> bool:
        """Tell whether it has signed in a later generation than it knows of."""
        generation = self._histories[site].generation
        return any(name == site and signed > generation for name, signed, _ in self._digests)

    # Inputs.

    def receives(self, site: PeerName, event: Event) -> None:
        match event:
            case Announced(update):
                self._learns(site, update)
            case Reported(_, updates):
                for update in updates:
                    self._learns(site, update)
            case Answered(peer, yours):
                self._processes[site].answered.add(peer)
                if yours is not None:
                    self._learns(site, yours)
            case Fetched(update):
                self._processes[site].fetched[update.peer] = update
            case Accused(first, _):
                self._receives_accusation(site, first)
            case Reconfigured(parameters):
                self._reconfigures(site, parameters)

    def _reconfigures(self, site: PeerName, parameters: Parameters) -> None:
        self._parameters[site] = parameters
        self._members[site] = parameters.peers | {site}

    def _learns(self, site: PeerName, update: Update) -> None:
        process, peer = self._processes[site], update.peer
        if peer == site:
            if process.own is None or process.own.age < update.age:
                process.own = update
            return
        if peer not in self._members[site]:
            return
        process.reached[peer] = max(process.reached.get(peer, update.round), update.round)
        known, until = process.generations.get(peer, (update.generation, Round(0)))
        if update.generation > known and peer not in self._histories[site].quarantined:
            until = Round(process.barrier.round + self._parameters[site].probation_rounds)
        process.generations[peer] = (max(known, update.generation), until)

    def _receives_accusation(self, site: PeerName, first: Update) -> None:
        history, peer = self._histories[site], first.peer
        pardoned = first.age <= history.pardoned.get(peer, NEVER)
        pardoned |= first.round < self._processes[site].barrier.round - EVIDENCE_ROUNDS
        if peer in self._members[site] - {site} and peer not in history.quarantined:
            self._processes[site].accused = None if pardoned else first

    # Actions.

    def keeps(self, site: PeerName, manifests: int) -> None:
        """The site holds this many signed manifests."""
        sites = len(self._sites)
        if manifests > sites * (WINDOW_MAX // 2 * sites + WINDOW_MAX):
            self._broken("S8", site, f"keeps {manifests} manifests")

    def steps(self, site: PeerName) -> None:
        """The site has handled an input completely."""
        process = self._processes[site]
        age: Age = (self._histories[site].generation, process.barrier.round)
        if age < process.age:
            self._broken("S2", site, f"goes back from round {process.age[1]} to {age[1]}")
        process.age = age
        if process.accused is not None:
            peer = process.accused.peer
            if peer not in self._histories[site].quarantined:
                self._broken(
                    "S7", site, f"has proof that {peer} equivocated, and does not quarantine it"
                )
            process.accused = None
        process.steps += 1
        entries, where = widest(process.tables) if process.steps % TABLES_EVERY == 0 else (0, "")
        if entries > len(self._sites):
            self._broken("S8", site, f"has {entries} entries in {where}")

    def persists(self, site: PeerName, memory: DurableState) -> None:
        """The site has made its state durable."""
        history, process = self._histories[site], self._processes[site]
        window = longest_window(process.tables)
        if window > WINDOW_MAX:
            self._broken("S8", site, f"remembers {window} updates of one peer")
        if memory.generation != history.generation:
            self._begins_generation(site, memory.generation)
        history.justified = max(history.justified, self._justified(site))
        history.generation, history.announced = memory.generation, memory.announced
        history.generations = dict(process.generations)
        vouched = [update for known in memory.vouched.values() for update in known]
        history.vouched = frozenset(vouched)
        for update in vouched:
            if history.echo(update) != update.digest:
                text = f"vouches for two updates of {update.peer} in round {update.round}"
                self._broken("S9", site, text)

    def _begins_generation(self, site: PeerName, generation: Generation) -> None:
        """Allowed only without a state, or with one that a peer has shown to be incomplete."""
        history, process = self._histories[site], self._processes[site]
        own, parameters = process.own, self._parameters[site]
        if not history.generation and len(process.answered) < min(
            parameters.faulty_max + 1, len(parameters.peers)
        ):
            self._broken("recovery", site, "begins without a state, and without enough answers")
        if generation < history.generation:
            self._broken("S2", site, f"goes back to generation {generation}")
        known = own is not None and own.generation >= history.generation
        if history.generation and not known and not history.incomplete:
            self._broken("S2", site, f"begins generation {generation} for no reason")
        history.incomplete = False
        self.counts["generations"] += 1

    def notes(self, site: PeerName, kind: str, about: Mapping[str, Any]) -> None:
        history = self._histories[site]
        match kind:
            case "blocked":
                history.blocked = frozenset(about["peers"])
            case "rollback":
                history.incomplete = True
            case "pardon":
                history.pardoned[about["peer"]] = history.quarantined.pop(about["peer"])
        self.counts[f"notes: {kind}"] += 1

    def signs(self, site: PeerName, update: Update) -> None:
        """The site has sealed an update."""
        if not self._histories[site].generation:
            self._broken("recovery", site, "signs before it knows what it has signed before")
        if update.round > self._justified(site):
            self._broken("S10", site, f"jumps to round {update.round} without enough vouchers")
        forgotten, process = self._forgotten[site], self._processes[site]
        first, known = self._digests.setdefault(
            (site, *update.age), (update.digest, len(forgotten))
        )
        if first == update.digest:
            return
        text = f"signs two different updates of {update.age}"
        since = forgotten[known:]
        if not since or (self._reliable_clocks and "restored" not in since):
            self._broken("S1", site, text)
        if process.own is not None and process.own.age >= update.age:
            self._broken("S1", site, f"{text}, although a peer had reported {process.own}")
        self.signed_twice.add(site)
        self.counts["rounds signed twice unknowingly"] += 1

    def announces(self, site: PeerName, update: Update | None, seen: tuple[Update, ...]) -> None:
        """The site sends its state to any peer."""
        history = self._histories[site]
        if update != history.announced:
            self._broken("durable", site, f"announces {update}, unlike its disk")
        if not history.vouched.issuperset(seen):
            text = f"vouches for {set(seen) - history.vouched}, unlike its disk"
            self._broken("durable", site, text)
        if update is None:
            return
        if update.round > self.highest + 1:
            text = f"announces round {update.round}; until now {self.highest} was highest"
            self._broken("S6", site, text)
        self.highest = max(self.highest, update.round)

    def closes(self, site: PeerName, judge: Judge) -> None:
        process, parameters = self._processes[site], self._parameters[site]
        trusted = self._members[site] - self._histories[site].excluded - {site}
        delivered = {
            peer for peer, u in process.fetched.items() if u.round >= judge.round
        } & trusted
        beyond = {peer for peer, round in process.reached.items() if round > judge.round} & trusted
        if len(delivered) < parameters.min_peers and len(beyond) < parameters.faulty_max + 1:
            text = f"with {len(delivered)} delivered and {len(beyond)} beyond it"
            self._broken("S10", site, f"closes round {judge.round} ({judge.why}) {text}")
        for update in judge.updates:
            if update.peer not in trusted or process.fetched.get(update.peer) != update:
                self._broken("S3", site, f"judges {update}, which it has not fetched")
        accounted = [update.peer for update in judge.updates] + [peer for peer, _ in judge.missing]
        if sorted(accounted) != sorted(self._members[site] - {site}):
            self._broken("S3", site, f"closes round {judge.round} with lines for {accounted}")
        self.counts[f"closed by {judge.cause}"] += 1

    def decides(self, site: PeerName, decision: Decision) -> None:
        history, process = self._histories[site], self._processes[site]
        for update in decision.accepted:
            peer = update.peer
            if peer in history.excluded or peer not in self._members[site]:
                self._broken("S3", site, f"accepts {update} of an excluded peer", peer)
            known, until = process.generations.get(peer, (update.generation, Round(0)))
            if update.generation == known and decision.round < until:
                text = f"accepts {update} in round {decision.round}: on probation until {until}"
                self._broken("probation", site, text, peer)

    def merges(self, site: PeerName, decision: Decision) -> None:
        history, accepted, round = self._histories[site], decision.accepted, decision.round
        age: Age = (history.generation, round)
        if age in history.decided:
            if history.decided[age] != accepted:
                self._broken("S5", site, f"decides round {round} again, and differently")
            self.counts["merged again"] += 1
            return
        history.decided[age] = accepted
        if len({update.peer for update in accepted}) < len(accepted):
            self._broken("S3", site, f"merges one peer twice in round {round}")
        for update in accepted:
            self._merges_one(site, update, round)
        self.counts["merged updates"] += len(accepted)
        self.counts["empty merges"] += not accepted

    def _merges_one(self, site: PeerName, update: Update, round: Round) -> None:
        history, peer = self._histories[site], update.peer
        sealing: Sealing = (peer, *update.age)
        if peer == site or update not in self._signed:
            self._broken("S3", site, f"merges {update}, which was never signed", peer)
        if update.round < round:
            self._broken("S4", site, f"merges {update} in round {round}", peer)
        if sealing in history.merged:
            self._broken("S4b", site, f"merges {update} once more, in round {round}", peer)
        if not self._parameters[site].echo or not self._echo_guarantee_applies():
            return
        first = self._merged_as.setdefault((peer, update.round), update.digest)
        if first != update.digest:
            self._broken("S9", site, f"merges {update}, and another site {first}", peer)

    def commits(self, site: PeerName, round: Round) -> None:
        history = self._histories[site]
        generation, before = history.committed[-1]
        # A site that loses its state after the last round repeats it in a new generation.
        again = round == self._parameters[site].rounds - 1 and history.generation > generation
        if round <= before and not again:
            self._broken("S2", site, f"commits round {round} after {before}")
        decided = history.decided.get((history.generation, round))
        if decided is None:
            self._broken("S5", site, f"commits round {round}, which it has not decided")
        if round > self.highest:
            self._broken("S6", site, f"commits round {round}, which no honest site has announced")
        history.committed.append((history.generation, round))
        history.merged.update((update.peer, *update.age) for update in decided)
        self.counts["commits"] += 1

    def accuses(self, site: PeerName, first: Update, second: Update) -> None:
        history, peer = self._histories[site], first.peer
        if first.age <= history.pardoned.get(peer, NEVER):
            self._broken("pardon", site, f"quarantines {peer} for a pardoned offence", peer)
        history.quarantined[peer] = first.age
        contradict = first.age == second.age and first.peer == second.peer and first != second
        if not contradict or not {first, second} <= self._signed:
            self._broken("S7", site, f"accuses {peer} falsely with {first} and {second}", peer)
        if peer in self._histories and peer not in self.signed_twice:
            self._broken("S7", site, f"quarantines {peer}, which is honest", peer)
        self.counts["quarantines"] += 1

    def _justified(self, site: PeerName) -> int:
        """Return the highest round that a site has a reason to be in."""
        history, process = self._histories[site], self._processes[site]
        vouchers = self._parameters[site].faulty_max + 1
        return max(
            history.justified,
            history.committed[-1][1] + 1,
            process.supported(vouchers, history.excluded),
            process.own.round + 1 if process.own is not None else 0,
        )

    def _echo_guarantee_applies(self) -> bool:
        """Tell whether few enough sites are faulty: two echo quorums share faulty_max + 1 sites.

        A site that has lost what it vouched for counts as faulty.
        """
        lost_state = sum(bool(forgotten) for forgotten in self._forgotten.values())
        faulty_max = min(parameters.faulty_max for parameters in self._parameters.values())
        return self._byzantine + lost_state <= faulty_max

    def _broken(self, invariant: str, site: PeerName, text: str, *others: PeerName) -> NoReturn:
        raise InvariantBroken(invariant, f"{site} {text}", site, *others)
