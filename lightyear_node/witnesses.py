"""Witnesses of each other's journals: the newest signed head of every peer, and theirs of ours.

Whoever holds a site's signing key can write its whole journal anew, and whoever holds its disk can
put back an older copy; both look sound from inside.  The peers have seen the heads, though.  Here
one head of each is kept, and what they say they hold of ours is compared with what is there.

No network, and no transaction of its own: what is held becomes durable with the next record.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightyear_node.audit.verify import claim
from lightyear_node.errors import PeerMisbehaved
from lightyear_node.ledger import Ledger
from lightyear_node.records import PeerName, Reason, SignedHead
from lightyear_node.signing import verify_head


class Witnesses:
    """`signing_key` is our own, by which we know what we have signed."""

    def __init__(
        self, ledger: Ledger, *, us: PeerName, federation: str, signing_key: bytes
    ) -> None:
        self._ledger = ledger
        self._us = us
        self._federation = federation
        self._signing_key = signing_key
        self._contradicted: dict[PeerName, SignedHead] = {}
        self._claimed: dict[PeerName, SignedHead] = {}

    def ours(self) -> SignedHead | None:
        """What the others are to hold of us; it is durable."""
        return self._ledger.head

    def held(self, peer: PeerName) -> SignedHead | None:
        return self._ledger.witnessed.get(peer)

    def hold(self, peer: PeerName, head: SignedHead, keys: Sequence[bytes]) -> str | None:
        """Keep what a peer says of its own journal, if it is newer; its contradictions in words.

        `keys` are those pinned for it.  Each head that we hold is contradicted at most once.  An
        older head means nothing: words may come late.
        """
        held = self.held(peer)
        if head == held or (held is not None and head.seq < held.seq):
            return None
        if not any(verify_head(head, self._federation, peer, key) for key in keys):
            raise PeerMisbehaved(
                peer, Reason.SIGNATURE, "the head of its journal is not signed by it"
            )
        if held is None or head.seq > held.seq:
            self._ledger.witness(peer, head)
            return None
        if head.hash == held.hash or self._contradicted.get(peer) == held:
            return None
        self._contradicted[peer] = held
        return (
            f"{peer} has signed two different journals up to record {head.seq}: it has written its"
            f" history anew; we hold {held.hash[:12]}, it now says {head.hash[:12]}"
        )

    def claimed(self, peer: PeerName, head: SignedHead) -> str | None:
        """What is wrong with our own journal if a peer holds this head of it; told once for each.

        What we have not signed proves nothing, whatever the peer says.
        """
        if self._claimed.get(peer) == head:
            return None
        if not verify_head(head, self._federation, self._us, self._signing_key):
            return None
        ledger = self._ledger
        problem = claim(peer, head, length=ledger.length, found=ledger.hash_of(head.seq))
        if problem is not None:
            self._claimed[peer] = head
        return problem

    def forget(self, peer: PeerName) -> None:
        """It has left, or has begun a new journal because its disk was lost."""
        self._ledger.witness(peer, None)
        self._contradicted.pop(peer, None)
        self._claimed.pop(peer, None)
