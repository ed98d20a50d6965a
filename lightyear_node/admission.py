"""Whether a signed manifest may be believed at all, before a byte of the update is pulled.

Pure: no clock, no disk, no network.  Must not know rounds: whether an update is still wanted is
the barrier's question; here the question is whether this peer said something sound.
"""

from __future__ import annotations

from collections.abc import Collection

from lightyear_node.records import ROUND_MAX, Digest, PeerName, Reason, SignedManifest
from lightyear_node.signing import manifest_layout, verify_manifest

LAMPORT_JUMP_MAX = 2**40
"""An honest stamp grows by a few per second; a larger jump could only be meant to overflow."""

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
    lamport: int,
) -> tuple[Reason, str] | None:
    """The first thing wrong with what `peer` says, or None.

    `verify_keys` are the signing keys of every certificate pinned for the peer: during a renewal
    there are two.  `lamport` is our own stamp.
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
    if lamport_jumps(manifest.lamport, lamport):
        return Reason.MALFORMED, f"the stamp {manifest.lamport} is far beyond ours, {lamport}"
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


def lamport_jumps(theirs: int, ours: int) -> bool:
    """Whether a peer's stamp is too far ahead to be taken over; holds for every message."""
    return theirs > ours + LAMPORT_JUMP_MAX


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
