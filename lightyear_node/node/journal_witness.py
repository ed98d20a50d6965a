"""Sites witness each other's journals: each stores the newest signed head of every peer.

With a site's signing key its whole journal can be rewritten, and with its disk an older copy can
be restored; both verify on their own.  The peers hold heads of the original, though.  This module
stores one head per peer, and compares the heads of our own journal that peers hold with it.

No network, and no transaction of its own: a stored head becomes durable with the next record.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightyear_node.audit.verify import head_contradiction
from lightyear_node.errors import PeerMisbehaved
from lightyear_node.protocol.signing import verify_head
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import PeerName, Reason, SignedHead


class JournalWitness:
    """`signing_key` is our own: heads that it has not signed prove nothing."""

    def __init__(
        self, round_journal: RoundJournal, *, us: PeerName, federation: str, signing_key: bytes
    ) -> None:
        self._round_journal = round_journal
        self._us = us
        self._federation = federation
        self._signing_key = signing_key
        self._contradicted: dict[PeerName, SignedHead] = {}
        self._claimed: dict[PeerName, SignedHead] = {}

    def held(self, peer: PeerName) -> SignedHead | None:
        return self._round_journal.witnessed.get(peer)

    def hold(self, peer: PeerName, head: SignedHead, keys: Sequence[bytes]) -> str | None:
        """Store the head of a peer's journal if it is newer; describe a contradiction, if any.

        `keys` are those pinned for the peer.  Each stored head is contradicted at most once.  Older
        heads are ignored: messages may be delayed.
        """
        held = self.held(peer)
        if head == held or (held is not None and head.seq < held.seq):
            return None
        if not any(verify_head(head, self._federation, peer, key) for key in keys):
            raise PeerMisbehaved(
                peer, Reason.SIGNATURE, "the head of its journal is not signed by it"
            )
        if held is None or head.seq > held.seq:
            self._round_journal.witness(peer, head)
            return None
        if head.hash == held.hash or self._contradicted.get(peer) == held:
            return None
        self._contradicted[peer] = held
        return (
            f"{peer} has signed two different journals up to record {head.seq}: it has rewritten"
            f" its history; we hold {held.hash[:12]}, it now says {head.hash[:12]}"
        )

    def claimed(self, peer: PeerName, head: SignedHead) -> str | None:
        """What is wrong with our journal if a peer holds this head; reported once per head."""
        if self._claimed.get(peer) == head:
            return None
        if not verify_head(head, self._federation, self._us, self._signing_key):
            return None
        round_journal = self._round_journal
        length, found = round_journal.length, round_journal.hash_of(head.seq)
        if head.seq <= length and found is None:
            return None  # the segment was moved away by the operator
        problem = head_contradiction(peer, head, length=length, found=found)
        if problem is not None:
            self._claimed[peer] = head
        return problem

    def forget(self, peer: PeerName) -> None:
        """Drop a peer that has left, or has begun a new journal because its disk was lost."""
        self._round_journal.witness(peer, None)
        self._contradicted.pop(peer, None)
        self._claimed.pop(peer, None)
