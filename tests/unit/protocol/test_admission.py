"""Which manifests are refused: one deviation at a time."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest

from lightyear_node.identity.keys import Identity, make_identity
from lightyear_node.protocol.manifests import refusal
from lightyear_node.types import (
    ROUND_MAX,
    Digest,
    Generation,
    Manifest,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)
SITE_A, SITE_B = make_identity("site-a", NOW), make_identity("site-b", NOW)
SCHEMA = Digest("cd" * 32)
MANIFEST = Manifest(
    federation="chest-xray",
    update=Update(PeerName("site-a"), Generation(0), Round(7), Digest("ab" * 32)),
    lamport=99,
    schema=SCHEMA,
    raw_bytes=1000,
    samples=500,
)


def judge(signed: SignedManifest, **changed: Any) -> Reason | None:
    verdict = refused(signed, **changed)
    if verdict is None:
        return None
    assert verdict[1], "a refusal comes with a sentence"
    return verdict[0]


def refused_because(signed: SignedManifest) -> str:
    verdict = refused(signed)
    assert verdict is not None
    return verdict[1]


def refused(signed: SignedManifest, **changed: Any) -> tuple[Reason, str] | None:
    expected: dict[str, Any] = {
        "peer": PeerName("site-a"),
        "federation": "chest-xray",
        "schema": SCHEMA,
        "raw_bytes": 1000,
        "dtype": "float32",
        "verify_keys": [SITE_A.certificate.signing_key],
    }
    return refusal(signed, **{**expected, **changed})


def signed(by: Identity = SITE_A, **changed: Any) -> SignedManifest:
    names = {field.name for field in dataclasses.fields(Update)}
    update = {name: changed.pop(name) for name in list(changed) if name in names}
    manifest = dataclasses.replace(MANIFEST, **changed)
    return by.sign_manifest(
        dataclasses.replace(manifest, update=dataclasses.replace(MANIFEST.update, **update))
    )


def test_a_valid_manifest_is_accepted() -> None:
    assert judge(signed()) is None


def test_a_manifest_in_another_sites_name_is_refused() -> None:
    # site-b's own certificate, site-b's own signature, site-a's name.
    forged = signed(by=SITE_B)
    keys = [SITE_B.certificate.signing_key]
    assert judge(forged, peer=PeerName("site-b"), verify_keys=keys) is Reason.IDENTITY
    # Nor can site-b send a manifest of site-a as its own.
    assert judge(signed(), peer=PeerName("site-b")) is Reason.IDENTITY


def test_another_federation_is_refused() -> None:
    assert judge(signed(federation="brain-mri")) is Reason.FEDERATION


def test_a_signature_by_another_key_is_refused() -> None:
    assert judge(signed(by=SITE_B)) is Reason.SIGNATURE
    assert judge(signed(), verify_keys=[]) is Reason.SIGNATURE


def test_both_keys_of_a_renewing_peer_are_accepted() -> None:
    keys = [SITE_B.certificate.signing_key, SITE_A.certificate.signing_key]
    assert judge(signed(), verify_keys=keys) is None


def test_a_changed_manifest_is_refused() -> None:
    honest = signed()
    altered = dataclasses.replace(honest.manifest, samples=10**6)
    assert judge(SignedManifest(altered, honest.signature)) is Reason.SIGNATURE


def test_a_manifest_of_another_model_is_refused() -> None:
    assert judge(signed(schema=Digest("ce" * 32))) is Reason.SCHEMA_MISMATCH
    assert judge(signed(dtype="float16")) is Reason.SCHEMA_MISMATCH
    assert judge(signed(raw_bytes=999)) is Reason.SCHEMA_MISMATCH
    assert judge(signed(raw_bytes=1001)) is Reason.TOO_LARGE


@pytest.mark.parametrize("field", ["generation", "round", "lamport", "raw_bytes", "samples"])
@pytest.mark.parametrize("value", [-1, ROUND_MAX + 1, 2**64])
def test_numbers_out_of_range_are_malformed(field: str, value: int) -> None:
    manifest = signed().manifest
    if field in ("generation", "round"):
        update = dataclasses.replace(manifest.update, **{field: value})
        manifest = dataclasses.replace(manifest, update=update)
    else:
        manifest = dataclasses.replace(manifest, **{field: value})
    unsound = SignedManifest(manifest, bytes(64))
    assert judge(unsound) is Reason.MALFORMED
    assert refused_because(unsound).startswith(f"{field} is {value}, ")


@pytest.mark.parametrize("field", ["generation", "round", "lamport", "samples"])
@pytest.mark.parametrize("value", [0, ROUND_MAX])
def test_the_smallest_and_the_largest_number_are_accepted(field: str, value: int) -> None:
    assert judge(signed(**{field: value})) is None


@pytest.mark.parametrize("digest", ["", "ab" * 31, "AB" * 32, "../../etc/passwd", "zz" * 32])
def test_an_invalid_digest_is_malformed(digest: str) -> None:
    update = dataclasses.replace(MANIFEST.update, digest=Digest(digest))
    manifest = dataclasses.replace(MANIFEST, update=update)
    assert judge(SignedManifest(manifest, bytes(64))) is Reason.MALFORMED


def test_a_short_signature_is_malformed() -> None:
    assert judge(SignedManifest(MANIFEST, b"")) is Reason.MALFORMED
