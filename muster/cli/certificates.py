"""Adapter: OpenSSL: a certificate authority of our own, and a certificate for NATS.

For a laptop, and for a cluster without an issuer of certificates. The authority signs for NATS
only; its key stays beside the certificate, and belongs on no machine of the cluster.
"""

import ipaddress
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster.cli import keyfiles

_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SKEW = timedelta(minutes=5)
_AUTHORITY: Final = "muster's own authority"
_AUTHORITY_LASTS: Final = timedelta(days=20 * 365)


def make(directory: Path, hosts: Sequence[str], *, at: datetime, lasts: timedelta) -> list[str]:
    """Write ca.key, ca.crt, tls.crt and tls.key for these hosts; return the names.

    Raises OSError, BadDirectory for one that has an authority, and ValueError for what is no host.
    """
    names = [_name(host) for host in hosts]
    keyfiles.own(directory)
    for name in ("ca.crt", "ca.key", "tls.crt", "tls.key"):
        # clients trust it, and would trust no other
        if (directory / name).exists():
            raise keyfiles.BadDirectory(
                f"{directory}: has {name} already; `--renew` makes a new certificate"
            )
    authority = ec.generate_private_key(ec.SECP256R1())
    root = (
        _builder(_AUTHORITY, own=authority, at=at, lasts=_AUTHORITY_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA256())
    )
    keyfiles.write(directory / "ca.key", _secret(authority))
    keyfiles.write(directory / "ca.crt", _text(root))
    return ["ca.key", "ca.crt", *_certify(directory, authority, names, at=at, lasts=lasts)]


def renew(directory: Path, hosts: Sequence[str], *, at: datetime, lasts: timedelta) -> list[str]:
    """Write tls.crt and tls.key anew, by the authority that is there; return the names.

    Raises OSError, BadDirectory for one without an authority, and ValueError for what is no host.
    """
    names = [_name(host) for host in hosts]
    file = directory / "ca.key"
    try:
        authority = serialization.load_pem_private_key(file.read_bytes(), None)
        root = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    except ValueError as error:
        raise keyfiles.BadDirectory(f"{directory}: no authority of ours: {error}") from None
    if (
        not isinstance(authority, ec.EllipticCurvePrivateKey)
        or authority.public_key() != root.public_key()
    ):
        raise keyfiles.BadDirectory(f"{file}: not the key of ca.crt")
    if root.not_valid_after_utc < at + lasts:
        raise keyfiles.BadDirectory(
            f"{directory}: its authority ends on {root.not_valid_after_utc:%Y-%m-%d}, before that"
        )
    return _certify(directory, authority, names, at=at, lasts=lasts)


def _certify(
    directory: Path,
    authority: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    *,
    at: datetime,
    lasts: timedelta,
) -> list[str]:
    own = ec.generate_private_key(ec.SECP256R1())
    use = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(str(names[0].value)[:64], own=own, at=at, lasts=lasts)
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
    keyfiles.write(directory / "tls.crt", _text(certificate))
    keyfiles.write(directory / "tls.key", _secret(own))
    return ["tls.crt", "tls.key"]


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def _secret(key: ec.EllipticCurvePrivateKey) -> str:
    kind = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, kind, plain).decode("ascii")


def _builder(
    subject: str, *, own: ec.EllipticCurvePrivateKey, at: datetime, lasts: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)]))
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
            raise ValueError(f"--host: {host!r} is not a name or address of a host") from None
        return x509.DNSName(host)
