"""The signed words of all sites that this one holds: checked once, found again by their update.

Whoever brings them: a manifest is as good from a third site as from the one that signed it.  Owns
which keys vouch for whom.  Must not know what follows from a manifest: that is the barrier's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightyear_node.admission import refusal
from lightyear_node.identity import Certificate
from lightyear_node.records import (
    Digest,
    Evidence,
    PeerName,
    Reason,
    SignedManifest,
    Update,
)

MANIFESTS_KEPT = 4
"""Per site: the one being fetched, the one held, and what may arrive meanwhile."""

Pins = Mapping[PeerName, tuple[Certificate, ...]]


class Archive:
    def __init__(
        self,
        pins: Pins,
        *,
        federation: str,
        schema: Digest,
        raw_bytes: int,
        dtype: str,
    ) -> None:
        self._keys = _signing_keys(pins)
        self._federation = federation
        self._schema = schema
        self._raw_bytes = raw_bytes
        self._dtype = dtype
        self._manifests: dict[PeerName, dict[Digest, SignedManifest]] = {}

    def agree(self, pins: Pins) -> None:
        """Other certificates count from now on."""
        keys = _signing_keys(pins)
        for peer, known in self._keys.items():
            if not set(known) <= set(keys.get(peer, ())):
                # Something that only a withdrawn key vouches for may be among them.
                self._manifests.pop(peer, None)
        self._keys = keys

    def knows(self, peer: PeerName) -> bool:
        return peer in self._keys

    def keys_of(self, peer: PeerName) -> tuple[bytes, ...]:
        return self._keys.get(peer, ())

    def refusal(self, signed: SignedManifest, lamport: int) -> tuple[Reason, str] | None:
        """What is wrong with a manifest; one that is sound is kept.  `lamport` is our own stamp."""
        update = signed.manifest.update
        if self.find(update) == signed:
            return None
        if update.peer not in self._keys:
            return Reason.IDENTITY, f"there is no site {update.peer!r} in our peers.yaml"
        wrong = refusal(
            signed,
            peer=update.peer,
            federation=self._federation,
            schema=self._schema,
            raw_bytes=self._raw_bytes,
            dtype=self._dtype,
            verify_keys=self._keys[update.peer],
            lamport=lamport,
        )
        if wrong is None:
            self._keep(signed)
        return wrong

    def restore(self, manifests: Iterable[SignedManifest]) -> None:
        """What we held before a restart, as far as today's keys still vouch for it."""
        for signed in manifests:
            self.refusal(signed, signed.manifest.lamport)

    def find(self, update: Update) -> SignedManifest | None:
        found = self._manifests.get(update.peer, {}).get(update.digest)
        return found if found is not None and found.manifest.update == update else None

    def newest_of(self, peer: PeerName) -> SignedManifest | None:
        known = self._manifests.get(peer, {}).values()
        return max(known, key=lambda signed: signed.manifest.update.age, default=None)

    def proof(self, first: Update, second: Update) -> Evidence | None:
        found = self.find(first), self.find(second)
        return Evidence(found[0], found[1]) if found[0] and found[1] else None

    def _keep(self, signed: SignedManifest) -> None:
        update = signed.manifest.update
        known = self._manifests.setdefault(update.peer, {})
        known[update.digest] = signed
        if len(known) > MANIFESTS_KEPT:
            # Not the first to come: a peer that repeats old ones must not push out its newest.
            oldest = min(known.values(), key=lambda signed: signed.manifest.update.age)
            del known[oldest.manifest.update.digest]


def contradicts(proof: Evidence) -> bool:
    """Whether two manifests show what evidence must: one site, one round, two updates."""
    first, second = proof.first.manifest.update, proof.second.manifest.update
    same = (first.peer, first.age) == (second.peer, second.age)
    return same and first.digest != second.digest


def _signing_keys(pins: Pins) -> dict[PeerName, tuple[bytes, ...]]:
    return {peer: tuple(one.signing_key for one in pinned) for peer, pinned in pins.items()}
