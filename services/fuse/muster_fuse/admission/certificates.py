"""Adapter for the cryptography library: creates and reads the webhook's certificates.

Each certificate has its own certificate authority, whose key is discarded immediately. So no one
can issue another certificate that the API servers trust for the webhook.
"""

import contextlib
import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster_fuse.admission import renewal

_AUTHORITIES_MAX: Final = 8
_CURVE: Final = ec.SECP256R1()
_CA_USAGE: Final = x509.KeyUsage(
    key_cert_sign=True, crl_sign=False, digital_signature=False, content_commitment=False,
    key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
    decipher_only=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate with its key, and the authority that signed it, each as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


def issue(names: Sequence[str], *, at: float, lifetime_s: float) -> Issued:
    """Issue a certificate for the host names, valid until `lifetime_s` after `at`."""
    ca_key, key = ec.generate_private_key(_CURVE), ec.generate_private_key(_CURVE)
    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    # authorities that are trusted at the same time must have different names
    ca_name = _name(f"{names[0][:40]} CA {ca_id.digest.hex()[:8]}")
    begins_at, ends_at = at - renewal.BACKDATED_S, at + lifetime_s
    authority = (
        _builder(ca_name, ca_name, ca_key, begins_at, ends_at)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_CA_USAGE, critical=True)
        .add_extension(ca_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name(names[0][:60]), ca_name, key, begins_at, ends_at)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(map(x509.DNSName, names)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    return Issued(
        authority=authority.public_bytes(serialization.Encoding.PEM),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def validity(certificate: bytes, key: bytes, names: Sequence[str]) -> renewal.Validity | None:
    """Return a certificate's validity; None if unreadable, or not for this key and these names."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, password=None)
        san = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound):
        return None
    if private.public_key() != parsed.public_key():
        return None
    if not {*names} <= {*san.get_values_for_type(x509.DNSName)}:
        return None
    return _validity(parsed)


def trusted(authorities: Sequence[bytes], *, at: float) -> bytes:
    """Return the newest unexpired authorities as PEM, without duplicates, newest first."""
    valid: dict[bytes, float] = {}
    for pem in authorities:
        with contextlib.suppress(ValueError):
            for certificate in x509.load_pem_x509_certificates(pem):
                if at < _validity(certificate).ends_at:
                    encoded = certificate.public_bytes(serialization.Encoding.PEM)
                    valid[encoded] = _validity(certificate).begins_at
    newest = sorted(valid, key=lambda encoded: (-valid[encoded], encoded))
    return b"".join(newest[:_AUTHORITIES_MAX])


def _validity(certificate: x509.Certificate) -> renewal.Validity:
    return renewal.Validity(
        certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begins_at: float,
    ends_at: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.fromtimestamp(begins_at, dt.UTC))
        .not_valid_after(dt.datetime.fromtimestamp(ends_at, dt.UTC))
    )
