"""Which site vouches for which update: exposes a site that signs two updates for one round.

A site vouches for the first update that it learns for each peer and round, and never for another
one.  The vote is durable before it is reported.  In echo mode an update is merged only if so many
sites vouch for it that no other update of that peer and round can get as many.

The table has one slot per pair of sites, with the newest two rounds each.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from lightyear_node.types import PeerName, Update

WINDOW = 2
"""Rounds kept per peer: one may still be counted while the next is announced."""

Vouched = Mapping[PeerName, tuple[Update, ...]]


class EchoVotes:
    def __init__(self, vouched: Vouched) -> None:
        self.vouched: dict[PeerName, tuple[Update, ...]] = dict(vouched)
        self._reports: dict[PeerName, dict[PeerName, tuple[Update, ...]]] = {}

    def is_news(self, update: Update) -> bool:
        """Whether its round is later than every round of that peer that we have vouched for.

        Generations are ignored: a new generation must not get a second vote for a round.
        """
        known = self.vouched.get(update.peer, ())
        return not known or update.round > known[0].round

    def vouch(self, update: Update) -> None:
        """Record our own vote for an update that is news."""
        known = self.vouched.get(update.peer, ())
        self.vouched[update.peer] = (update, *known)[:WINDOW]

    def report(self, by: PeerName, update: Update) -> None:
        """Record that another site vouches for an update."""
        reports = self._reports.setdefault(update.peer, {})
        others = [one for one in reports.get(by, ()) if one.round != update.round]
        newest = sorted([update, *others], key=lambda one: one.round, reverse=True)
        reports[by] = tuple(newest[:WINDOW])

    def keep_reports_of(self, peers: Iterable[PeerName]) -> None:
        """Drop the votes by and for all other sites, but not our own: removed sites may return."""
        members = set(peers)
        self._reports = {
            peer: {by: known for by, known in reports.items() if by in members}
            for peer, reports in self._reports.items()
            if peer in members
        }

    def supporters(self, update: Update, excluded: Container[PeerName]) -> int:
        """Count the sites that vouch for an update: its signer, ourselves, and other peers."""
        reports = self._reports.get(update.peer, {})
        ours = update in self.vouched.get(update.peer, ())
        others = [by for by, known in reports.items() if update in known and by not in excluded]
        return 1 + ours + len(others)

    def contradiction(self, update: Update) -> Update | None:
        """A different update that the same site signed for the same round and generation."""
        return next(
            (one for one in self._updates_of(update.peer) if _contradict(one, update)), None
        )

    def updates(self) -> Iterator[Update]:
        """Every update that any site vouches for."""
        for known in self.vouched.values():
            yield from known
        for reports in self._reports.values():
            for known in reports.values():
                yield from known

    def _updates_of(self, peer: PeerName) -> Iterator[Update]:
        yield from self.vouched.get(peer, ())
        for known in self._reports.get(peer, {}).values():
            yield from known


def _contradict(one: Update, other: Update) -> bool:
    same = one.round == other.round and one.generation == other.generation
    return same and one.digest != other.digest
