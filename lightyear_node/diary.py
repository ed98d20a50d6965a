"""What is remembered of and for each peer, besides its updates."""

from __future__ import annotations

from lightyear_node.records import Opinion, PeerName, SignedHead


class Diary:
    def opinion_of(self, peer: PeerName) -> Opinion | None:
        return None

    def told(self, peer: PeerName, opinion: Opinion) -> None:
        pass

    def head_of(self, peer: PeerName) -> SignedHead | None:
        return None

    def hold(self, peer: PeerName, head: SignedHead) -> None:
        pass

    def claimed(self, peer: PeerName, head: SignedHead) -> None:
        pass
