"""Door to OpenSSL: an authority of one's own, and a certificate for NATS from it.

For a laptop, and for a cluster that has nobody to issue certificates. The authority's key is used
once and never written: nobody can issue another certificate that its clients would believe.
"""

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SKEW = timedelta(minutes=5)


def make(directory: Path, hosts: Sequence[str], *, at: datetime, lasts: timedelta) -> list[str]:
    """Write ca.crt, tls.crt and tls.key for these hosts; return their names.

    Raises OSError, and ValueError for what is no host.
    """
    names = [_name(host) for host in hosts]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = (
        _builder(
            "muster's own authority", "muster's own authority", own=authority, at=at, lasts=lasts
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA256())
    )
    use = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(hosts[0][:64], "muster's own authority", own=own, at=at, lasts=lasts)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        # servers of one cluster are clients of one another
        .add_extension(x509.ExtendedKeyUsage(use), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    key = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    made = {
        "ca.crt": root.public_bytes(pem),
        "tls.crt": certificate.public_bytes(pem),
        "tls.key": key,
    }
    for name, text in made.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as written:
            written.write(text)
    return list(made)


def _builder(
    subject: str, issuer: str, *, own: ec.EllipticCurvePrivateKey, at: datetime, lasts: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(at - _SKEW)
        .not_valid_after(at + lasts)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"--host: {host!r} is no name or address of a host") from None
        return x509.DNSName(host)
