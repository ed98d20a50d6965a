"""Signed byte layouts of manifests and journal heads, and their verification.

The layouts are fixed so that third parties can verify signatures years later.  Public keys are raw
bytes here; certificates are handled in `identity`.
"""

from __future__ import annotations

import re
import struct

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lightyear_node.types import Digest, Manifest, PeerName, SignedHead, SignedManifest

MANIFEST_DOMAIN = b"lightyear-node manifest 2\0"
HEAD_DOMAIN = b"lightyear-node journal 1\0"
"""Prefix of the signed bytes: a signature for one purpose is invalid for any other."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def verify(signing_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(signing_key).verify(signature, domain + message)
    except (InvalidSignature, ValueError):
        return False
    return True


def verify_manifest(signed: SignedManifest, signing_key: bytes) -> bool:
    """Check a signature; False also for a manifest without a layout, such as a negative round."""
    try:
        layout = manifest_layout(signed.manifest)
    except ValueError:
        return False
    return verify(signing_key, MANIFEST_DOMAIN, layout, signed.signature)


def verify_head(head: SignedHead, federation: str, peer: PeerName, signing_key: bytes) -> bool:
    """Whether `peer` has signed this head of its journal."""
    try:
        layout = head_layout(federation, peer, head.seq, head.hash)
    except (ValueError, struct.error):
        return False
    return verify(signing_key, HEAD_DOMAIN, layout, head.signature)


def manifest_layout(manifest: Manifest) -> bytes:
    """The signed bytes: fixed order and width, big-endian, strings after their 16-bit length.

    Not protobuf: its bytes for one message may differ between versions and languages.
    """
    update = manifest.update
    base = manifest.base or ""
    if not (_DIGEST.fullmatch(update.digest) and _DIGEST.fullmatch(manifest.schema)):
        raise ValueError("a digest is 64 lower-case hexadecimal digits")
    if base and not _DIGEST.fullmatch(base):
        raise ValueError("a digest is 64 lower-case hexadecimal digits")
    try:
        return b"".join(
            [
                _text(manifest.federation),
                _text(update.peer),
                struct.pack(">QQQ", update.generation, update.round, manifest.lamport),
                bytes.fromhex(update.digest),
                bytes.fromhex(manifest.schema),
                struct.pack(">QQ", manifest.raw_bytes, manifest.samples),
                _text(base),
                _text(manifest.dtype),
            ]
        )
    except struct.error as error:
        raise ValueError(f"a number does not fit: {error}") from None


def head_layout(federation: str, peer: PeerName, seq: int, hash: Digest) -> bytes:
    return _text(federation) + _text(peer) + struct.pack(">Q", seq) + bytes.fromhex(hash)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded
