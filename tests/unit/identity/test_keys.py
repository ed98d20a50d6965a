"""Keys, certificates, join lines and signatures: what is accepted and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.errors import ConfigError
from lightyear_node.identity.invite import invite_line, parse_invite
from lightyear_node.identity.keys import (
    BACKDATED,
    LIFETIME,
    Certificate,
    Identity,
    fingerprint,
    make_identity,
)
from lightyear_node.protocol.signing import (
    MANIFEST_DOMAIN,
    manifest_layout,
    verify,
    verify_manifest,
)
from lightyear_node.types import Digest, Generation, Manifest, PeerName, Round, Update

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ADDRESS = "fl.site-a.example.org:7443"
SITE_A = make_identity("site-a", NOW)
MANIFEST = Manifest(
    federation="chest-xray",
    update=Update(PeerName("site-a"), Generation(1), Round(7), Digest("ab" * 32)),
    lamport=99,
    schema=Digest("cd" * 32),
    raw_bytes=1 << 20,
    samples=500,
    base=Digest("ef" * 32),
)


# -- keys on disk ---------------------------------------------------------------------------------


def test_saved_identity_loads_as_the_same_site(tmp_path: Path) -> None:
    SITE_A.save(tmp_path / "keys")
    loaded = Identity.load(tmp_path / "keys")
    assert loaded.certificate == SITE_A.certificate
    assert loaded.name == "site-a"
    signed = loaded.sign_manifest(MANIFEST)
    assert verify_manifest(signed, SITE_A.certificate.signing_key)


def test_only_the_owner_can_read_the_keys(tmp_path: Path) -> None:
    SITE_A.save(tmp_path / "keys")
    modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "keys").iterdir()}
    assert modes == {"tls.key": 0o600, "sign.key": 0o600, "tls.crt": 0o600}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_existing_keys_are_never_replaced(tmp_path: Path) -> None:
    SITE_A.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="already has"):
        make_identity("site-a", NOW).save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("key", ["tls.key", "sign.key"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_key_readable_by_others_is_refused_with_a_hint(tmp_path: Path, key: str, mode: int) -> None:
    SITE_A.save(tmp_path)
    (tmp_path / key).chmod(mode)
    with pytest.raises(ConfigError, match=key) as caught:
        Identity.load(tmp_path)
    assert caught.value.hint == f"chmod 600 {tmp_path / key}"


@pytest.mark.parametrize("key", ["tls.key", "sign.key"])
def test_symlinked_key_is_refused(tmp_path: Path, key: str) -> None:
    SITE_A.save(tmp_path)
    (tmp_path / key).rename(tmp_path / "elsewhere")
    (tmp_path / key).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        Identity.load(tmp_path)


def test_key_that_is_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    SITE_A.save(tmp_path)
    (tmp_path / "tls.key").unlink()
    os.mkfifo(tmp_path / "tls.key", 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        Identity.load(tmp_path)


@pytest.mark.parametrize("name", ["tls.key", "sign.key", "tls.crt"])
def test_missing_file_is_named(tmp_path: Path, name: str) -> None:
    SITE_A.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        Identity.load(tmp_path)


@pytest.mark.parametrize("name", ["tls.key", "sign.key"])
def test_key_of_another_site_is_refused(tmp_path: Path, name: str) -> None:
    SITE_A.save(tmp_path / "a")
    make_identity("site-b", NOW).save(tmp_path / "b")
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(ConfigError, match=name):
        Identity.load(tmp_path / "a")


def test_private_keys_are_not_printed() -> None:
    secret = SITE_A.tls_key_pem.decode().splitlines()[1]
    assert secret not in repr(SITE_A)
    assert "PRIVATE" not in repr(SITE_A)


# -- certificates ---------------------------------------------------------------------------------


def test_certificate_has_the_documented_fields() -> None:
    parsed = x509.load_der_x509_certificate(SITE_A.certificate.der)
    assert parsed.not_valid_before_utc == NOW - BACKDATED == NOW - timedelta(days=1)
    assert parsed.not_valid_after_utc == NOW + LIFETIME == SITE_A.certificate.expires
    san = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert san.get_values_for_type(x509.DNSName) == ["site-a"]
    assert san.get_values_for_type(x509.UniformResourceIdentifier) == [
        "lightyear-node:ed25519:" + SITE_A.certificate.signing_key.hex()
    ]
    assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_fingerprint_has_the_format_of_ssh() -> None:
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"
    assert SITE_A.fingerprint == fingerprint(SITE_A.certificate.der)


@pytest.mark.parametrize("name", ["", "Site-A", "-a", "a-", "a.b", "a/b", "a" * 64, "ä", "a\n"])
def test_impossible_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        make_identity(name, NOW)


def _certificate(
    *,
    curve: ec.EllipticCurve | None = None,
    ca: bool = False,
    cn: str = "site-a",
    san: list[x509.GeneralName] | None = None,
    identifiers: bool = True,
    issuer_id: bytes | None = None,
) -> bytes:
    """A self-signed certificate that differs from ours in one point."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cn)])
    names = san or [
        x509.DNSName("site-a"),
        x509.UniformResourceIdentifier("lightyear-node:ed25519:" + "ab" * 32),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    if identifiers:
        key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(key_id, critical=False).add_extension(
            x509.AuthorityKeyIdentifier(issuer_id or key_id.digest, None, None), critical=False
        )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_the_expected_form_is_accepted() -> None:
    assert Certificate.parse(_certificate()).name == "site-a"


@pytest.mark.parametrize(
    ("der", "complaint"),
    [
        (_certificate(curve=ec.SECP384R1()), "P-256"),
        (_certificate(ca=True), "issue further"),
        (_certificate(cn="site-b"), "alternative names"),
        (_certificate(cn="Site A"), "name"),
        (_certificate(identifiers=False), "SubjectKeyIdentifier"),
        (_certificate(issuer_id=b"another key"), "key identifiers"),
        (_certificate(san=[x509.DNSName("site-a")]), "alternative names"),
        (
            _certificate(
                san=[x509.DNSName("site-a"), x509.UniformResourceIdentifier("http:" + "ab" * 32)]
            ),
            "signing key",
        ),
        (b"", "not a certificate"),
        (SITE_A.certificate.der + b"\0", "not a certificate"),
        (bytes(5000), "5000 bytes"),
    ],
)
def test_certificates_of_another_form_are_refused(der: bytes, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Certificate.parse(der)


def test_names_that_the_library_cannot_read_are_refused() -> None:
    der = SITE_A.certificate.der
    dns, x400 = b"\x82\x06site-a", b"\xa3\x06site-a"
    assert der.count(dns) == 1
    with pytest.raises(ConfigError, match="not a certificate"):
        Certificate.parse(der.replace(dns, x400))


@given(st.integers(0, len(SITE_A.certificate.der) - 1), st.integers(1, 255))
def test_any_altered_byte_is_detected(position: int, flip: int) -> None:
    altered = bytearray(SITE_A.certificate.der)
    altered[position] ^= flip
    with pytest.raises(ConfigError):
        Certificate.parse(bytes(altered))


# -- join lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [ADDRESS, "10.8.0.4:1", "[2001:db8::1]:65535"])
def test_join_line_contains_name_address_and_certificate(address: str) -> None:
    line = invite_line(SITE_A, address)
    assert line.startswith(f"ly1/site-a/{address}/")
    assert "=" not in line
    joined = parse_invite(f"  {line}\n")
    assert (joined.name, joined.address) == ("site-a", address)
    assert joined.certificate == SITE_A.certificate


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "a b:1",
        "a/b:1",
        "h:00",
        "::1:7443",
        "[::1::]:1",
        "[::1]",
        "[1.2.3.4]:1",
    ],
)
def test_addresses_without_host_and_port_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        invite_line(SITE_A, address)


@given(st.data())
def test_a_truncated_line_is_refused_with_a_hint(data: st.DataObject) -> None:
    line = invite_line(SITE_A, ADDRESS)
    cut = line[: data.draw(st.integers(0, len(line) - 1))]
    with pytest.raises(ConfigError) as caught:
        parse_invite(cut)
    assert caught.value.hint


@given(st.data())
def test_an_altered_certificate_in_the_line_is_refused(data: st.DataObject) -> None:
    line = invite_line(SITE_A, ADDRESS)
    start = line.rindex("/") + 1
    position = data.draw(st.integers(start, len(line) - 1))
    letter = data.draw(st.sampled_from("ABCabc012-_"))
    altered = line[:position] + letter + line[position + 1 :]
    encoded = altered[start:]
    same = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)) == SITE_A.certificate.der
    if not same:
        with pytest.raises(ConfigError, match="cut short or altered"):
            parse_invite(altered)


def test_a_line_in_another_name_is_refused() -> None:
    line = invite_line(SITE_A, ADDRESS).replace("/site-a/", "/site-b/")
    with pytest.raises(ConfigError, match="site-b"):
        parse_invite(line)


@pytest.mark.parametrize("line", ["", "ly2/a/b:1/c", "ly1/a/b:1", "ly1/a/b:1/c/d", "ly1/a/b:1/ü"])
def test_other_text_is_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        parse_invite(line)


# -- signatures -----------------------------------------------------------------------------------


def test_signature_is_over_the_documented_layout() -> None:
    layout = manifest_layout(MANIFEST)
    assert layout == (
        b"\x00\x0achest-xray"
        + b"\x00\x06site-a"
        + (1).to_bytes(8, "big")
        + (7).to_bytes(8, "big")
        + (99).to_bytes(8, "big")
        + bytes.fromhex("ab" * 32)
        + bytes.fromhex("cd" * 32)
        + (1 << 20).to_bytes(8, "big")
        + (500).to_bytes(8, "big")
        + b"\x00\x40"
        + b"ef" * 32
        + b"\x00\x07float32"
    )
    signed = SITE_A.sign_manifest(MANIFEST)
    key = SITE_A.certificate.signing_key
    assert MANIFEST_DOMAIN == b"lightyear-node manifest 2\0"
    assert verify(key, MANIFEST_DOMAIN, layout, signed.signature)
    assert not verify(key, b"another purpose\0", layout, signed.signature)


@pytest.mark.parametrize(
    "changed",
    [
        dataclasses.replace(MANIFEST, federation="other"),
        dataclasses.replace(MANIFEST, lamport=100),
        dataclasses.replace(MANIFEST, schema=Digest("ce" * 32)),
        dataclasses.replace(MANIFEST, raw_bytes=2),
        dataclasses.replace(MANIFEST, samples=501),
        dataclasses.replace(MANIFEST, samples=-1),
        dataclasses.replace(MANIFEST, base=Digest("ab" * 32)),
        dataclasses.replace(MANIFEST, dtype="bfloat16"),
        *(
            dataclasses.replace(MANIFEST, update=dataclasses.replace(MANIFEST.update, **change))
            for change in (
                {"peer": PeerName("site-b")},
                {"generation": Generation(2)},
                {"round": Round(8)},
                {"digest": Digest("ac" * 32)},
                {"digest": Digest("not hex")},
            )
        ),
    ],
)
def test_every_field_is_signed(changed: Manifest) -> None:
    signed = SITE_A.sign_manifest(MANIFEST)
    key = SITE_A.certificate.signing_key
    assert verify_manifest(signed, key)
    assert not verify_manifest(dataclasses.replace(signed, manifest=changed), key)


def test_adjacent_strings_cannot_be_shifted() -> None:
    one = dataclasses.replace(MANIFEST, federation="ab")
    update = dataclasses.replace(MANIFEST.update, peer=PeerName("bsite-a"))
    two = dataclasses.replace(MANIFEST, federation="a", update=update)
    assert manifest_layout(one) != manifest_layout(two)


@given(st.integers(0, 511))
def test_any_altered_bit_of_a_signature_is_detected(bit: int) -> None:
    signed = SITE_A.sign_manifest(MANIFEST)
    altered = bytearray(signed.signature)
    altered[bit // 8] ^= 1 << bit % 8
    signed = dataclasses.replace(signed, signature=bytes(altered))
    assert not verify_manifest(signed, SITE_A.certificate.signing_key)


def test_signing_domains_cannot_be_prefixes_of_each_other() -> None:
    with pytest.raises(ValueError, match="zero byte"):
        SITE_A.sign(b"no end", b"message")
    with pytest.raises(ValueError, match="zero byte"):
        SITE_A.sign(b"two\0ends\0", b"message")
