"""Signed manifests: which are valid, and those that the barrier refers to.

`refusal` checks a manifest before any byte of the update is fetched.  A manifest counts from any
source: the site that signed it, or a third one.  This module knows each peer's signing keys; what
follows from a manifest is the barrier's decision.

Checking and keeping are two steps.  `refusal` checks when a message arrives; the manifest then
travels with the event, and `keep` stores it just before the barrier handles that event.  `retain`
occasionally drops what the barrier no longer refers to.  So the proof of every contradiction that
the barrier can find is here, and the number of manifests is bounded by the barrier's tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lightyear_node.protocol.signing import manifest_layout, verify_manifest
from lightyear_node.types import (
    ROUND_MAX,
    Digest,
    Evidence,
    Manifest,
    PeerName,
    Reason,
    SignedManifest,
    Update,
)

VERIFIED_KEPT = 4096
"""Manifests whose signature is not verified again: peers repeat them at every heartbeat."""

SPARE_MANIFESTS = 64
"""`retain` is due above twice the manifests in use plus this many, not at every event."""

SigningKeys = Mapping[PeerName, tuple[bytes, ...]]
"""Signing keys of every certificate pinned for a peer; two during a renewal."""

_SIGNATURE_BYTES = 64


def refusal(
    signed: SignedManifest,
    *,
    peer: PeerName,
    federation: str,
    schema: Digest,
    raw_bytes: int,
    dtype: str,
    verify_keys: Collection[bytes],
) -> tuple[Reason, str] | None:
    """Why a manifest from `peer` is invalid: the first problem found, or None.

    `verify_keys` are the signing keys of every certificate pinned for the peer; two during a
    renewal.
    """
    manifest = signed.manifest
    update = manifest.update
    if update.peer != peer:
        return Reason.IDENTITY, f"{peer} sent a manifest in the name of {update.peer!r}"
    if manifest.federation != federation:
        return Reason.FEDERATION, f"it belongs to the federation {manifest.federation!r}"
    malformed = _malformed(signed)
    if malformed is not None:
        return Reason.MALFORMED, malformed
    if not any(verify_manifest(signed, key) for key in verify_keys):
        return Reason.SIGNATURE, "the signature is not by the key in the peer's certificate"
    if manifest.dtype != dtype:
        return Reason.SCHEMA_MISMATCH, (
            f"its weights travel as {manifest.dtype}, ours as {dtype}:"
            " `exchange.dtype` must be the same in every peers.yaml"
        )
    if manifest.schema != schema:
        return Reason.SCHEMA_MISMATCH, "its model has other tensors than ours"
    if manifest.raw_bytes > raw_bytes:
        return Reason.TOO_LARGE, f"{manifest.raw_bytes} bytes where our model has {raw_bytes}"
    if manifest.raw_bytes < raw_bytes:
        return Reason.SCHEMA_MISMATCH, f"{manifest.raw_bytes} bytes where ours has {raw_bytes}"
    return None


class ManifestStore:
    def __init__(
        self,
        keys: SigningKeys,
        *,
        federation: str,
        schema: Digest,
        raw_bytes: int,
        dtype: str,
    ) -> None:
        self._keys = dict(keys)
        self._federation = federation
        self._schema = schema
        self._raw_bytes = raw_bytes
        self._dtype = dtype
        self._manifests: dict[Update, SignedManifest] = {}
        self._retain_above = SPARE_MANIFESTS
        self._verified: dict[SignedManifest, None] = {}

    def set_keys(self, keys: SigningKeys) -> None:
        """Replace the keys; drop manifests that only a withdrawn key has signed."""
        self._keys = dict(keys)
        self._verified.clear()
        kept = self._manifests.items()
        self._manifests = {
            update: signed for update, signed in kept if self.refusal(signed) is None
        }

    def __len__(self) -> int:
        return len(self._manifests)

    def knows(self, peer: PeerName) -> bool:
        return peer in self._keys

    def keys_of(self, peer: PeerName) -> tuple[bytes, ...]:
        return self._keys.get(peer, ())

    def refusal(self, signed: SignedManifest) -> tuple[Reason, str] | None:
        """Why a manifest is invalid, or None."""
        if signed in self._verified:
            return None
        peer = signed.manifest.update.peer
        if peer not in self._keys:
            return Reason.IDENTITY, f"there is no site {peer!r} in our peers.yaml"
        wrong = refusal(
            signed,
            peer=peer,
            federation=self._federation,
            schema=self._schema,
            raw_bytes=self._raw_bytes,
            dtype=self._dtype,
            verify_keys=self._keys[peer],
        )
        if wrong is None:
            self._verified[signed] = None
            if len(self._verified) > VERIFIED_KEPT:
                del self._verified[next(iter(self._verified))]
        return wrong

    def own_manifest(
        self, update: Update, *, lamport: int, raw_bytes: int, samples: int, base: Digest | None
    ) -> Manifest:
        """The manifest of an update of this site, to be signed."""
        return Manifest(
            federation=self._federation,
            update=update,
            lamport=lamport,
            schema=self._schema,
            raw_bytes=raw_bytes,
            samples=samples,
            base=base,
            dtype=self._dtype,
        )

    def keep(self, manifests: Iterable[SignedManifest]) -> bool:
        """Store those that are valid under the present keys; returns whether `retain` is due."""
        for signed in manifests:
            update = signed.manifest.update
            if update not in self._manifests and self.refusal(signed) is None:
                self._manifests[update] = signed
        return len(self._manifests) > self._retain_above

    def retain(self, updates: Collection[Update]) -> None:
        """Drop all but the manifests of these updates."""
        kept = self._manifests.items()
        self._manifests = {update: signed for update, signed in kept if update in updates}
        self._retain_above = 2 * len(self._manifests) + SPARE_MANIFESTS

    def find(self, update: Update) -> SignedManifest | None:
        return self._manifests.get(update)

    def holds(self, update: Update) -> bool:
        return update in self._manifests

    def newest_of(self, peer: PeerName) -> SignedManifest | None:
        known = (one for one in self._manifests.values() if one.manifest.update.peer == peer)
        return max(known, key=lambda signed: signed.manifest.update.age, default=None)

    def proof(self, first: Update, second: Update) -> Evidence | None:
        found = self.find(first), self.find(second)
        return Evidence(found[0], found[1]) if found[0] and found[1] else None


def contradicts(proof: Evidence) -> bool:
    """Whether two manifests are evidence: one site, one generation and round, two updates."""
    first, second = proof.first.manifest.update, proof.second.manifest.update
    same = (first.peer, first.age) == (second.peer, second.age)
    return same and first.digest != second.digest


def _malformed(signed: SignedManifest) -> str | None:
    manifest = signed.manifest
    numbers = {
        "generation": manifest.update.generation,
        "round": manifest.update.round,
        "lamport": manifest.lamport,
        "raw_bytes": manifest.raw_bytes,
        "samples": manifest.samples,
    }
    for name, number in numbers.items():
        if not 0 <= number <= ROUND_MAX:
            return f"{name} is {number}, not between 0 and 2**62"
    if len(signed.signature) != _SIGNATURE_BYTES:
        return f"the signature has {len(signed.signature)} bytes"
    try:
        manifest_layout(manifest)
    except ValueError as error:
        return str(error)
    return None
