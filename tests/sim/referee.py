"""The referee: knows the truth about a simulated federation and checks every step against it.

It watches what sites are told and what they do, and keeps its own books; it never asks a barrier
what it believes, so that one that is wrong about itself is caught.  S1 to S10 are the names of the
protocol's invariants.

What is promised to sites that forget.  A disk that is lost, or replaced by an older copy, takes
away what a site had signed.  Somebody must tell it: if nobody has, since it was started, told it of
an update of its own that it does not remember, it may sign a round a second time, and the others
will find out.  No protocol without a clock could prevent that.  With walls whose clocks go forward
a lost disk is no such case, for the clock alone makes every generation new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from lightyear_node.barrier import (
    Accused,
    Announced,
    Answered,
    Barrier,
    Decision,
    Event,
    Fetched,
    Judge,
    Memory,
    Reformed,
    Reported,
    Terms,
)
from lightyear_node.records import Digest, Generation, PeerName, Round, Update
from tests.sim.books import NEVER, Age, History, Life, Sealing, longest_window, tables_of, widest

WINDOW_MAX = 4
TABLES_EVERY = 8
"""Steps between two looks at all tables: what grows without a limit is caught a little later."""


class InvariantBroken(AssertionError):
    def __init__(self, invariant: str, text: str, *sites: PeerName) -> None:
        super().__init__(f"{invariant} is broken: {text}")
        self.invariant = invariant
        self.sites = sites


class Referee:
    def __init__(
        self,
        sites: list[PeerName],
        honest: list[PeerName],
        terms: Terms,
        signed: set[Update],
        *,
        reliable_clocks: bool = True,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.highest = Round(-1)
        """The highest tag that an honest site has announced so far."""
        self.two_stories: set[PeerName] = set()
        """Honest sites that have signed a round twice, and could not know it."""
        self._sites = frozenset(sites)
        self._signed = signed
        self._reliable_clocks = reliable_clocks
        self._liars = len(sites) - len(honest)
        self._terms = dict.fromkeys(honest, terms)
        self._members = dict.fromkeys(honest, self._sites)
        self._digests: dict[Sealing, tuple[Digest, int]] = {}
        self._merged_as: dict[tuple[PeerName, Round], Digest] = {}
        self._lives: dict[PeerName, Life] = {}
        self._histories = {site: History() for site in honest}
        self._backups = {site: History() for site in honest}
        self._forgotten: dict[PeerName, list[str]] = {site: [] for site in honest}

    def commits_of(self, site: PeerName) -> int:
        return len(self._histories[site].committed) - 1

    def merged_by(self, site: PeerName) -> Mapping[Round, tuple[Update, ...]]:
        """What a site merged in each of its rounds."""
        return {round: merged for (_, round), merged in self._histories[site].decided.items()}

    # What befalls a site.

    def boots(self, site: PeerName, barrier: Barrier, terms: Terms) -> None:
        self._reforms(site, terms)
        known = dict(self._histories[site].generations)
        self._lives[site] = Life(barrier, known, tables_of(barrier))

    def forgets(self, site: PeerName) -> None:
        self._forgotten[site].append("lost")
        self._histories[site] = History()

    def backs_up(self, site: PeerName) -> None:
        self._backups[site] = self._histories[site].copied()

    def restores(self, site: PeerName) -> None:
        self._forgotten[site].append("restored")
        self._histories[site] = self._backups[site].copied()

    def doubts(self, site: PeerName) -> None:
        """Its operator does not trust its memory."""
        self._histories[site].doubted = True

    def has_an_older_disk(self, site: PeerName) -> bool:
        """Whether it has signed in a later generation than it knows of."""
        generation = self._histories[site].generation
        return any(name == site and signed > generation for name, signed, _ in self._digests)

    # What a site is told.

    def tells(self, site: PeerName, event: Event) -> None:
        match event:
            case Announced(update):
                self._learns(site, update)
            case Reported(_, updates):
                for update in updates:
                    self._learns(site, update)
            case Answered(peer, yours):
                self._lives[site].answered.add(peer)
                if yours is not None:
                    self._learns(site, yours)
            case Fetched(update):
                self._lives[site].fetched[update.peer] = update
            case Accused(first, _):
                self._is_told_of_two_stories(site, first)
            case Reformed(terms):
                self._reforms(site, terms)

    def _reforms(self, site: PeerName, terms: Terms) -> None:
        self._terms[site] = terms
        self._members[site] = terms.peers | {site}

    def _learns(self, site: PeerName, update: Update) -> None:
        life, peer = self._lives[site], update.peer
        if peer == site:
            if life.own is None or life.own.age < update.age:
                life.own = update
            return
        if peer not in self._members[site]:
            return
        life.reached[peer] = max(life.reached.get(peer, update.round), update.round)
        known, until = life.generations.get(peer, (update.generation, Round(0)))
        if update.generation > known and peer not in self._histories[site].quarantined:
            until = Round(life.barrier.round + self._terms[site].probation_rounds)
        life.generations[peer] = (max(known, update.generation), until)

    def _is_told_of_two_stories(self, site: PeerName, first: Update) -> None:
        history, peer = self._histories[site], first.peer
        forgiven = first.age <= history.pardoned.get(peer, NEVER)
        if peer in self._members[site] - {site} and peer not in history.quarantined:
            self._lives[site].accused = None if forgiven else first

    # What a site does.

    def steps(self, site: PeerName) -> None:
        """After everything that a site was told, and did about it."""
        life = self._lives[site]
        age: Age = (self._histories[site].generation, life.barrier.round)
        if age < life.age:
            self._broken("S2", site, f"goes back from round {life.age[1]} to {age[1]}")
        life.age = age
        if life.accused is not None:
            peer = life.accused.peer
            if peer not in self._histories[site].quarantined:
                self._broken("S7", site, f"knows two stories of {peer}, and does nothing about it")
            life.accused = None
        life.steps += 1
        entries, where = widest(life.tables) if life.steps % TABLES_EVERY == 0 else (0, "")
        if entries > len(self._sites):
            self._broken("S8", site, f"has {entries} entries in {where}")

    def persists(self, site: PeerName, memory: Memory) -> None:
        """From now on a restart would find this."""
        history, life = self._histories[site], self._lives[site]
        window = longest_window(life.barrier)
        if window > WINDOW_MAX:
            self._broken("S8", site, f"remembers {window} updates of one peer")
        if memory.generation != history.generation:
            self._begins_anew(site, memory.generation)
        history.justified = max(history.justified, self._justified(site))
        history.generation, history.announced = memory.generation, memory.announced
        history.generations = dict(life.generations)
        vouched = [update for known in memory.vouched.values() for update in known]
        history.vouched = frozenset(vouched)
        for update in vouched:
            if history.echo(update) != update.digest:
                text = f"vouches for two updates of {update.peer} in round {update.round}"
                self._broken("S9", site, text)

    def _begins_anew(self, site: PeerName, generation: Generation) -> None:
        """Only without a memory, or with one that somebody else has shown to be incomplete."""
        history, life = self._histories[site], self._lives[site]
        own, terms = life.own, self._terms[site]
        if not history.generation and len(life.answered) < min(
            terms.faulty_max + 1, len(terms.peers)
        ):
            self._broken("recovery", site, "begins without a memory, and without asking enough")
        if generation < history.generation:
            self._broken("S2", site, f"goes back to generation {generation}")
        known = own is not None and own.generation >= history.generation
        if history.generation and not known and not history.doubted:
            self._broken("S2", site, f"begins generation {generation} for no reason")
        history.doubted = False
        self.counts["generations"] += 1

    def notes(self, site: PeerName, kind: str, about: Mapping[str, Any]) -> None:
        history = self._histories[site]
        match kind:
            case "blocked":
                history.blocked = frozenset(about["peers"])
            case "rollback":
                history.doubted = True
            case "pardon":
                history.pardoned[about["peer"]] = history.quarantined.pop(about["peer"])
        self.counts[f"notes: {kind}"] += 1

    def signs(self, site: PeerName, update: Update) -> None:
        """An update is sealed."""
        if not self._histories[site].generation:
            self._broken("recovery", site, "signs before it knows what it has signed before")
        if update.round > self._justified(site):
            self._broken("S10", site, f"jumps to round {update.round} without enough vouchers")
        forgotten, life = self._forgotten[site], self._lives[site]
        first, known = self._digests.setdefault(
            (site, *update.age), (update.digest, len(forgotten))
        )
        if first == update.digest:
            return
        text = f"signs two different updates of {update.age}"
        since = forgotten[known:]
        if not since or (self._reliable_clocks and "restored" not in since):
            self._broken("S1", site, text)
        if life.own is not None and life.own.age >= update.age:
            self._broken("S1", site, f"{text}, and had been told of {life.own}")
        self.two_stories.add(site)
        self.counts["rounds signed twice unknowingly"] += 1

    def says(self, site: PeerName, update: Update | None, seen: tuple[Update, ...]) -> None:
        """Something is told to anybody at all."""
        history = self._histories[site]
        if update != history.announced:
            self._broken("durable", site, f"says that {update} is its update, unlike its disk")
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
        life, terms = self._lives[site], self._terms[site]
        trusted = self._members[site] - self._histories[site].excluded - {site}
        delivered = {peer for peer, u in life.fetched.items() if u.round >= judge.round} & trusted
        beyond = {peer for peer, round in life.reached.items() if round > judge.round} & trusted
        if len(delivered) < terms.min_peers and len(beyond) < terms.faulty_max + 1:
            text = f"with {len(delivered)} delivered and {len(beyond)} beyond it"
            self._broken("S10", site, f"closes round {judge.round} ({judge.why}) {text}")
        for update in judge.updates:
            if update.peer not in trusted or life.fetched.get(update.peer) != update:
                self._broken("S3", site, f"judges {update}, which it has not fetched")
        accounted = [update.peer for update in judge.updates] + [peer for peer, _ in judge.missing]
        if sorted(accounted) != sorted(self._members[site] - {site}):
            self._broken("S3", site, f"closes round {judge.round} with lines for {accounted}")
        self.counts[f"closed by {judge.cause}"] += 1

    def decides(self, site: PeerName, decision: Decision) -> None:
        history, life = self._histories[site], self._lives[site]
        for update in decision.accepted:
            peer = update.peer
            if peer in history.excluded or peer not in self._members[site]:
                self._broken("S3", site, f"accepts {update} of one whom it excludes", peer)
            known, until = life.generations.get(peer, (update.generation, Round(0)))
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
        if not self._terms[site].echo or not self._promises_one_story():
            return
        first = self._merged_as.setdefault((peer, update.round), update.digest)
        if first != update.digest:
            self._broken("S9", site, f"merges {update}, and another site {first}", peer)

    def commits(self, site: PeerName, round: Round) -> None:
        history = self._histories[site]
        generation, before = history.committed[-1]
        # Who forgets after the last round does it again, in a new generation.
        again = round == self._terms[site].rounds - 1 and history.generation > generation
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
            self._broken("pardon", site, f"holds against {peer} what was forgiven", peer)
        history.quarantined[peer] = first.age
        contradict = first.age == second.age and first.peer == second.peer and first != second
        if not contradict or not {first, second} <= self._signed:
            self._broken("S7", site, f"frames {peer} with {first} and {second}", peer)
        if peer in self._histories and peer not in self.two_stories:
            self._broken("S7", site, f"quarantines {peer}, which is honest", peer)
        self.counts["quarantines"] += 1

    def _justified(self, site: PeerName) -> int:
        """The highest round that a site has a reason to be in."""
        history, life = self._histories[site], self._lives[site]
        vouchers = self._terms[site].faulty_max + 1
        return max(
            history.justified,
            history.committed[-1][1] + 1,
            life.supported(vouchers, history.excluded),
            life.own.round + 1 if life.own is not None else 0,
        )

    def _promises_one_story(self) -> bool:
        """In echo mode two quorums share faulty_max + 1 sites.

        A site that has forgotten what it vouched for may do so twice, as a liar may.
        """
        forgetful = sum(bool(forgotten) for forgotten in self._forgotten.values())
        faulty_max = min(terms.faulty_max for terms in self._terms.values())
        return self._liars + forgetful <= faulty_max

    def _broken(self, invariant: str, site: PeerName, text: str, *others: PeerName) -> NoReturn:
        raise InvariantBroken(invariant, f"{site} {text}", site, *others)
