"""Adapter for files: writes the directories of keys for the bus and of certificates for NATS.

A `.seed` file has one seed per line, the newest first: while a key is being changed both keys are
valid. Everything else is derived from the seeds: accounts.conf for nats-server, credentials, the
gate's keys.

The certificates are for a laptop, or for a cluster without a certificate issuer: the authority
signs only for NATS. Its key is stored beside the certificate, and must not be copied to any machine
in the cluster.
"""

import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from muster.nats.auth import accounts, nkeys

_OTHERS_WRITE: Final = 0o022


class BadDirectory(Exception):
    """The directory is unusable; the text is the reason."""


class BadAuthority(ValueError):
    """The authority cannot sign this certificate; the text is the reason."""


def make(directory: Path, *, at: float) -> list[str]:
    """Create all keys and the derived files; return the names of the derived files.

    Raises BadDirectory and OSError, as the functions below that read or write files do.
    """
    own(directory)
    # new keys that were created by mistake would lock out all clients
    if any(directory.glob("*.seed")):
        raise BadDirectory(f"{directory}: already has keys; change one with `muster auth rotate`")
    for name, text in new_seeds().items():
        write(directory / name, text)
    return derive(directory, at=at)


def new_seeds() -> dict[str, str]:
    """Return new keys of an installation, by file name."""
    return {f"{name}.seed": f"{_new(kind).seed}\n" for name, kind in accounts.KINDS.items()}


def own(directory: Path) -> None:
    """Create a directory, if absent, that only this user can write to.

    Raises BadDirectory if others can write to an existing one, and OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) & _OTHERS_WRITE:
        raise BadDirectory(
            f"{directory}: other users can write to it; run chmod 700, or choose another"
        )
    if not any(directory.iterdir()):
        directory.chmod(0o700)


def derive(directory: Path, *, at: float) -> list[str]:
    """Write accounts.conf, gate.json and the credentials of services and admin; return the names.

    Raises BadDirectory.
    """
    ring = {name: _keys(directory, name) for name in accounts.KINDS}
    made = accounts.derive(ring, random=secrets.token_bytes, at=at)
    return _put_all(directory, made)


def user(
    directory: Path,
    role: accounts.Role,
    *,
    name: str,
    at: float,
    until: float | None = None,
    plugins: Collection[str] = (),
) -> str:
    """Return the credentials of a new user. Raises BadDirectory."""
    ring = {key: _keys(directory, key) for key in (role, accounts.owner(role))}
    random = secrets.token_bytes
    return accounts.credentials(
        ring, role, name=name, random=random, at=at, until=until, plugins=plugins
    )


def rotate(directory: Path, name: str, *, at: float) -> list[str]:
    """Start signing with a new key, and keep the old one valid; return the derived files' names.

    Raises BadDirectory.
    """
    seeds = [key.seed for key in _keys(directory, name)]
    _put(directory, name, [_new(accounts.KINDS[name]).seed, *seeds])
    return derive(directory, at=at)


def drop(directory: Path, name: str, *, at: float) -> list[str]:
    """Drop all keys except the newest; return the derived files' names. Raises BadDirectory."""
    _put(directory, name, [_newest(directory, name).seed])
    return derive(directory, at=at)


def write(file: Path, text: str) -> None:
    """Write a secret that only this user can read; a crash leaves either the old or the new secret.

    Raises OSError.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as written:
        written.write(text)
    beside.replace(file)


def _put(directory: Path, name: str, seeds: Sequence[str]) -> None:
    write(directory / f"{name}.seed", "".join(f"{seed}\n" for seed in seeds))


def _newest(directory: Path, name: str) -> nkeys.Key:
    return _keys(directory, name)[0]


def _keys(directory: Path, name: str) -> list[nkeys.Key]:
    """Return the keys of this name; create one if the directory is older than this kind of key."""
    file = directory / f"{name}.seed"
    try:
        return accounts.read_seeds(name, file.read_text("ascii"))
    except FileNotFoundError:
        if name in accounts.ADDED and (directory / "operator.seed").exists():
            _put(directory, name, [_new(accounts.KINDS[name]).seed])
            return _keys(directory, name)
        raise BadDirectory(
            f"{file}: does not exist; create all keys with `muster auth init {directory}`"
        ) from None
    except ValueError as error:
        raise BadDirectory(f"{file}: {error}") from None


def _new(kind: nkeys.Kind) -> nkeys.Key:
    return nkeys.Key(kind, secrets.token_bytes(nkeys.SECRET_BYTES))


_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SKEW = timedelta(minutes=5)
_AUTHORITY: Final = "muster's own authority"
_AUTHORITY_LASTS: Final = timedelta(days=20 * 365)


def make_certificates(
    directory: Path, hosts: Sequence[str], *, at: datetime, lasts: timedelta
) -> list[str]:
    """Write ca.key, ca.crt, tls.crt and tls.key for these hosts; return the names.

    Raises OSError, BadDirectory if one of these files exists already, and ValueError for an invalid
    host.
    """
    for host in hosts:
        _name(host)
    own(directory)
    for name in ("ca.crt", "ca.key", "tls.crt", "tls.key"):
        # clients trust this authority, and would not trust another
        if (directory / name).exists():
            raise BadDirectory(
                f"{directory}: already has {name}; `--renew` creates a new certificate"
            )
    authority = new_authority(at=at)
    return _put_all(directory, authority | certificate(authority, hosts, at=at, lasts=lasts))


def renew_certificate(
    directory: Path, hosts: Sequence[str], *, at: datetime, lasts: timedelta
) -> list[str]:
    """Write new tls.crt and tls.key, signed by the existing authority; return the names.

    Raises OSError, also if there is no authority, BadDirectory if the authority cannot sign this
    certificate, and ValueError for an invalid host.
    """
    authority = {name: (directory / name).read_text() for name in ("ca.key", "ca.crt")}
    try:
        made = certificate(authority, hosts, at=at, lasts=lasts)
    except BadAuthority as error:
        raise BadDirectory(f"{directory}: {error}") from None
    return _put_all(directory, made)


def new_authority(*, at: datetime) -> dict[str, str]:
    """Return a new authority: ca.crt and ca.key."""
    authority = ec.generate_private_key(ec.SECP256R1())
    root = (
        _builder(_AUTHORITY, own=authority, at=at, lasts=_AUTHORITY_LASTS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority, hashes.SHA256())
    )
    return {"ca.key": _secret(authority), "ca.crt": _text(root)}


def certificate(
    signer: Mapping[str, str], hosts: Sequence[str], *, at: datetime, lasts: timedelta
) -> dict[str, str]:
    """Return tls.crt and tls.key for these hosts, signed by an authority's ca.key and ca.crt.

    Raises BadAuthority, and ValueError for an invalid host.
    """
    names = [_name(host) for host in hosts]
    try:
        authority = serialization.load_pem_private_key(signer["ca.key"].encode(), None)
        root = x509.load_pem_x509_certificate(signer["ca.crt"].encode())
    except ValueError as error:
        raise BadAuthority(f"not an authority that muster created: {error}") from None
    if (
        not isinstance(authority, ec.EllipticCurvePrivateKey)
        or authority.public_key() != root.public_key()
    ):
        raise BadAuthority("ca.key is not the key of ca.crt")
    if root.not_valid_after_utc < at + lasts:
        raise BadAuthority(
            f"its authority expires on {root.not_valid_after_utc:%Y-%m-%d}, before the new "
            "certificate would"
        )
    own = ec.generate_private_key(ec.SECP256R1())
    use = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signed = (
        _builder(str(names[0].value)[:64], own=own, at=at, lasts=lasts)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        # servers of one cluster are also clients of each other
        .add_extension(x509.ExtendedKeyUsage(use), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA256())
    )
    return {"tls.crt": _text(signed), "tls.key": _secret(own)}


def _put_all(directory: Path, made: Mapping[str, str]) -> list[str]:
    for name, text in made.items():
        write(directory / name, text)
    return list(made)


def _text(signed: x509.Certificate) -> str:
    return signed.public_bytes(serialization.Encoding.PEM).decode("ascii")


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
            raise ValueError(f"--host: {host!r} is not a host name or address") from None
        return x509.DNSName(host)
