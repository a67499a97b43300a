"""Adapter for files: creates the cluster's CA, its certificates, and a kubeconfig for each user."""

import base64
import datetime as dt
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scripts.cluster import layout

VALID: Final = dt.timedelta(days=365)
USERS: Final = {
    "admin": ("muster-cluster-admin", "system:masters"),
    "scheduler": ("system:kube-scheduler", ""),
    "controller-manager": ("system:kube-controller-manager", ""),
    "kubelet": (f"system:node:{layout.NODE}", "system:nodes"),
    "kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
    "proxy": ("system:kube-proxy", ""),
    "dns": ("coredns", "system:masters"),
    "kwok": ("kwok-controller", "system:masters"),
}
"""The user and group in each client certificate, by file name."""


def make() -> None:
    """Create the CA, the certificates and the kubeconfigs, unless they exist already."""
    layout.CERTIFICATES.mkdir(parents=True, exist_ok=True)
    # written last
    if layout.KUBECONFIG.exists():
        return
    authority = _Authority()
    _write("sa.key", _private(ec.generate_private_key(ec.SECP256R1())))
    here = ["localhost", layout.NODE, "127.0.0.1", layout.NODE_IP]
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    authority.issue("apiserver", "kube-apiserver", "", [*here, *names, layout.API_IP])
    authority.issue("kubelet-server", f"system:node:{layout.NODE}", "system:nodes", here)
    for name, (user, group) in USERS.items():
        authority.issue(name, user, group)
        kubeconfig(name, layout.CERTIFICATES / f"{name}.kubeconfig")
    kubeconfig("admin", layout.KUBECONFIG)


def kubeconfig(name: str, target: Path) -> None:
    """Write the kubeconfig of a user."""
    target.touch(mode=0o600)
    cluster = {"server": layout.API, "certificate-authority-data": _data("ca.crt")}
    user = {
        "client-certificate-data": _data(f"{name}.crt"),
        "client-key-data": _data(f"{name}.key"),
    }
    context = {"cluster": layout.CGROUP, "user": name}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": layout.CGROUP, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": layout.CGROUP, "context": context}],
        "current-context": layout.CGROUP,
    }
    target.write_text(json.dumps(document))


class _Authority:
    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "muster-cluster")])
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        _write("ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
        _write("ca.key", _private(self._key))

    def issue(self, name: str, user: str, group: str, hosts: Sequence[str] = ()) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
        if group:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usage = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = _builder(x509.Name(attributes), self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage([usage]), critical=False
        )
        if hosts:
            alternatives = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write(f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM))
        _write(f"{name}.key", _private(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _write(name: str, content: bytes) -> None:
    file = layout.CERTIFICATES / name
    file.touch(mode=0o600)
    file.write_bytes(content)


def _data(name: str) -> str:
    return base64.b64encode((layout.CERTIFICATES / name).read_bytes()).decode()
