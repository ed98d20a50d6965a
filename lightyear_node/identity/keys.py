"""A site's keys, and the certificate that its peers pin.

Defines the only accepted form of a certificate.  It does not use the network, peers.yaml or a
clock: callers pass the time, and compare `expires` themselves.

A site has two keys.  The TLS key (ECDSA P-256, because gRPC's TLS refuses Ed25519 certificates)
authenticates connections; the signing key (Ed25519) authenticates updates, also later and to third
parties.  The certificate contains the public signing key, so one pin covers both.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.errors import ConfigError
from lightyear_node.identity.private_files import read_checked, write_private
from lightyear_node.protocol.signing import (
    HEAD_DOMAIN,
    MANIFEST_DOMAIN,
    head_layout,
    manifest_layout,
)
from lightyear_node.types import Digest, Fingerprint, Manifest, PeerName, SignedHead, SignedManifest

LIFETIME = timedelta(days=730)
BACKDATED = timedelta(days=1)
"""A certificate is valid from a day before it was made, to tolerate wrong clocks."""

CERTIFICATE_BYTES_MAX = 4096
"""Ours have about 500; larger input is not parsed."""

NEXT_DIR = "next"
"""Directory below the keys: the TLS key and certificate that a renewal has prepared."""

_SIGNING_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNING_KEY_URI = "lightyear-node:ed25519:"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate that passed every check which needs neither a clock nor a pin."""

    name: PeerName
    fingerprint: Fingerprint
    signing_key: bytes
    begins: datetime
    expires: datetime
    der: bytes = field(repr=False)

    @classmethod
    def parse(cls, der: bytes) -> Certificate:
        """Parse a certificate; refuse every form that `make_identity` does not produce."""
        if len(der) > CERTIFICATE_BYTES_MAX:
            raise ConfigError(f"certificate has {len(der)} bytes, at most {CERTIFICATE_BYTES_MAX}")
        try:
            parsed = x509.load_der_x509_certificate(der)
            name, signing_key = _names(parsed)
            # Self-signed: the signature proves that the certificate was not altered.
            parsed.verify_directly_issued_by(parsed)
            if not der.endswith(b"\0" + parsed.signature):
                # The byte before it counts unused bits; older libraries ignore it.
                raise ValueError("its signature has unused bits")
        except InvalidSignature:
            raise ConfigError("certificate was altered: its own signature does not fit") from None
        except Exception as error:
            # The library's exceptions for invalid input differ between versions, and include
            # KeyError.
            raise ConfigError(f"not a certificate of lightyear-node: {error}") from None
        begins, expires = parsed.not_valid_before_utc, parsed.not_valid_after_utc
        return cls(name, fingerprint(der), signing_key, begins, expires, der)

    @property
    def pem(self) -> bytes:
        return ssl.DER_cert_to_PEM_cert(self.der).encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """This site's certificate and private keys."""

    certificate: Certificate
    tls_key_pem: bytes = field(repr=False)
    signing_key: Ed25519PrivateKey = field(repr=False)

    @property
    def name(self) -> PeerName:
        return self.certificate.name

    @property
    def fingerprint(self) -> Fingerprint:
        return self.certificate.fingerprint

    @classmethod
    def load(cls, keys_dir: Path) -> Identity:
        """Read what `save` wrote; refuses keys that other users could read or replace."""
        prepared = keys_dir / NEXT_DIR
        # A renewal moves the key first.  If it was interrupted then, the certificate of the new
        # key is still in `next/`.
        interrupted = (prepared / "tls.crt").exists() and not (prepared / "tls.key").exists()
        certificate = (prepared if interrupted else keys_dir) / "tls.crt"
        return cls.load_pair(keys_dir, keys_dir / "tls.key", certificate)

    @classmethod
    def load_pair(cls, keys_dir: Path, tls_key_file: Path, certificate_file: Path) -> Identity:
        """Load another TLS key and certificate with the same signing key."""
        tls_key_pem = read_checked(tls_key_file, private=True)
        signing_pem = read_checked(keys_dir / "sign.key", private=True)
        certificate_pem = read_checked(certificate_file, private=False)
        try:
            der = x509.load_pem_x509_certificate(certificate_pem).public_bytes(
                serialization.Encoding.DER
            )
            tls_key = serialization.load_pem_private_key(tls_key_pem, password=None)
            signing_key = serialization.load_pem_private_key(signing_pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"unreadable key or certificate in {keys_dir}: {error}") from None
        certificate = Certificate.parse(der)
        certified = x509.load_der_x509_certificate(der).public_key()
        if tls_key.public_key() != certified:
            raise ConfigError(f"{tls_key_file} does not belong to {certificate_file}")
        if (
            not isinstance(signing_key, Ed25519PrivateKey)
            or signing_key.public_key().public_bytes_raw() != certificate.signing_key
        ):
            raise ConfigError(f"{keys_dir}/sign.key is not the one named in {certificate_file}")
        return cls(certificate, tls_key_pem, signing_key)

    def save(self, keys_dir: Path) -> None:
        """Write new keys; existing ones are never replaced, because peers have pinned them."""
        files = {
            "sign.key": _private_pem(self.signing_key),
            "tls.key": self.tls_key_pem,
            "tls.crt": self.certificate.pem,
        }
        present = [name for name in files if os.path.lexists(keys_dir / name)]
        if present:
            raise ConfigError(
                f"{keys_dir} already has {', '.join(present)}",
                hint="the peers know this site by these keys: `lightyear-node renew` makes a new"
                " certificate; move them away to start afresh",
            )
        try:
            keys_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, content in files.items():
                write_private(keys_dir / name, content)
        except OSError as error:
            raise ConfigError(f"cannot write keys to {keys_dir}: {error.strerror}") from error

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Sign for one purpose; `domain` ends in its only zero byte, so no two purposes overlap."""
        if not domain.endswith(b"\0") or b"\0" in domain[:-1]:
            raise ValueError("a signing domain ends in its only zero byte")
        return self.signing_key.sign(domain + message)

    def sign_manifest(self, manifest: Manifest) -> SignedManifest:
        return SignedManifest(manifest, self.sign(MANIFEST_DOMAIN, manifest_layout(manifest)))

    def sign_head(self, federation: str, seq: int, hash: Digest) -> SignedHead:
        layout = head_layout(federation, self.name, seq, hash)
        return SignedHead(seq, hash, self.sign(HEAD_DOMAIN, layout))


def make_identity(
    name: str, now: datetime, signing_key: Ed25519PrivateKey | None = None
) -> Identity:
    """Make keys and a certificate for a site; a renewal passes the existing signing key."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{name!r} cannot be a site's name",
            hint="lower-case letters, digits and inner hyphens, at most 63: for example site-a",
        )
    tls_key = ec.generate_private_key(ec.SECP256R1())
    signing_key = signing_key or Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    key_id = x509.SubjectKeyIdentifier.from_public_key(tls_key.public_key())
    signing_uri = _SIGNING_KEY_URI + signing_key.public_key().public_bytes_raw().hex()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(tls_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(name), x509.UniformResourceIdentifier(signing_uri)]
            ),
            critical=False,
        )
        # Without the key identifiers, TLS takes the first root of that name for the issuer, and
        # only one of two certificates pinned for a site would work.
        .add_extension(key_id, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), critical=False
        )
        .sign(tls_key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Identity(Certificate.parse(der), _private_pem(tls_key), signing_key)


def signing_keys(
    pins: Mapping[PeerName, tuple[Certificate, ...]],
) -> dict[PeerName, tuple[bytes, ...]]:
    """The signing key of every pinned certificate, by peer."""
    return {peer: tuple(one.signing_key for one in pinned) for peer, pinned in pins.items()}


def fingerprint(der: bytes) -> Fingerprint:
    digest = base64.b64encode(hashlib.sha256(der).digest()).decode().rstrip("=")
    return Fingerprint(f"SHA256:{digest}")


def _names(parsed: x509.Certificate) -> tuple[PeerName, bytes]:
    """The name and signing key in a certificate; raises ValueError if its form is not ours."""
    key = parsed.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("the key is not ECDSA P-256")
    extensions = parsed.extensions
    if extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
        raise ValueError("it could issue further certificates")
    key_id = extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    issuer = extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    if issuer.key_identifier != key_id:
        raise ValueError("its key identifiers differ")
    common_names = parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(parsed.subject) != 1 or len(common_names) != 1:
        raise ValueError("the subject is not one common name")
    name = str(common_names[0].value)
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(f"{name!r} cannot be a site's name")
    san = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = san.get_values_for_type(x509.UniformResourceIdentifier)
    if len(san) != 2 or san.get_values_for_type(x509.DNSName) != [name] or len(uris) != 1:
        raise ValueError("the alternative names are not the site's name and its signing key")
    signing_hex = uris[0].removeprefix(_SIGNING_KEY_URI)
    if signing_hex == uris[0] or not _SIGNING_KEY.fullmatch(signing_hex):
        raise ValueError("it names no Ed25519 signing key")
    return PeerName(name), bytes.fromhex(signing_hex)


def _private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
