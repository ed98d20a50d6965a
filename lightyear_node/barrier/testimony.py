"""Who has heard which update of whom: what makes a site that tells two stories stand out.

A site vouches for the first update of a peer and round that it hears of, and never for another
one; what it vouches for is durable before anybody is told.  In echo mode an update is merged only
when so many sites vouch for it that no other can find as many.

One slot per pair of sites, with the newest two rounds of each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from lightyear_node.records import PeerName, Update

WINDOW = 2
"""Rounds of one peer that are remembered: one may be counted while the next is announced."""

Vouched = Mapping[PeerName, tuple[Update, ...]]


class Testimony:
    def __init__(self, vouched: Vouched) -> None:
        self.vouched: dict[PeerName, tuple[Update, ...]] = dict(vouched)
        self._reports: dict[PeerName, dict[PeerName, tuple[Update, ...]]] = {}

    def vouch(self, update: Update) -> bool:
        """Whether this is news: a later round than any we have vouched for."""
        known = self.vouched.get(update.peer, ())
        # By the round alone: a new generation is no way to have a second update of a round.
        if known and update.round <= known[0].round:
            return False
        self.vouched[update.peer] = (update, *known)[:WINDOW]
        return True

    def report(self, by: PeerName, update: Update) -> None:
        """Another site vouches for an update."""
        reports = self._reports.setdefault(update.peer, {})
        others = [one for one in reports.get(by, ()) if one.round != update.round]
        newest = sorted([update, *others], key=lambda one: one.round, reverse=True)
        reports[by] = tuple(newest[:WINDOW])

    def forget_reports_but_of(self, peers: Iterable[PeerName]) -> None:
        """What we have vouched for ourselves is remembered: a site that is removed may return."""
        here = set(peers)
        self._reports = {
            peer: {by: told for by, told in reports.items() if by in here}
            for peer, reports in self._reports.items()
            if peer in here
        }

    def supporters(self, update: Update, liars: Container[PeerName]) -> int:
        """How many sites stand for an update: who signed it, we, and the others that told us."""
        reports = self._reports.get(update.peer, {})
        ours = update in self.vouched.get(update.peer, ())
        others = [by for by, told in reports.items() if update in told and by not in liars]
        return 1 + ours + len(others)

    def contradiction(self, update: Update) -> Update | None:
        """An update that the same site has signed for the same round and generation."""
        return next((one for one in self._told_of(update.peer) if _contradict(one, update)), None)

    def _told_of(self, peer: PeerName) -> Iterator[Update]:
        yield from self.vouched.get(peer, ())
        for told in self._reports.get(peer, {}).values():
            yield from told


def _contradict(one: Update, other: Update) -> bool:
    same = one.round == other.round and one.generation == other.generation
    return same and one.digest != other.digest
