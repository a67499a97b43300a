"""A stand-in for a cluster that issues tokens of service accounts, valid and invalid ones."""

import functools
import json
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from muster.nats.auth import nkeys

ISSUER: Final = "https://kubernetes.default.svc.cluster.local"
AUDIENCE: Final = "muster-nats"

Claims = dict[str, Any]


@functools.cache
def rsa_key(name: str, bits: int = 2048) -> rsa.RSAPrivateKey:
    """Return the RSA key of a name; it is cached, because generating it takes long."""
    assert name
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@functools.cache
def curve_key(name: str) -> ec.EllipticCurvePrivateKey:
    """Return the elliptic-curve key of a name; it is cached."""
    assert name
    return ec.generate_private_key(ec.SECP256R1())


def jwk(name: str, algorithm: str) -> Claims:
    """Return a public key as a member of a key set; its id is its name."""
    if algorithm == "RS256":
        numbers = rsa_key(name).public_key().public_numbers()
        mine = {"kty": "RSA", "n": _number(numbers.n, 256), "e": _number(numbers.e, 3)}
    else:
        point = curve_key(name).public_key().public_numbers()
        mine = {"kty": "EC", "crv": "P-256", "x": _number(point.x, 32), "y": _number(point.y, 32)}
    return {"use": "sig", "kid": name, "alg": algorithm, **mine}


def key_set(*keys: Claims) -> bytes:
    """Return a key set in the format of /openid/v1/jwks."""
    return json.dumps({"keys": keys}).encode()


def claims(node: str, *, at: float, lasts_s: float = 3600, **changed: Any) -> Claims:
    """Return the claims of a projected token of the plugin; None in `changed` removes a claim."""
    bound = {
        "namespace": "muster",
        "node": {"name": node, "uid": "a4ec5bb8-8a3c-4f1c-9b0e-2d6f4d0d2f11"},
        "pod": {"name": "muster-plugin-x7x2p", "uid": "0fd8a9cc-3a0b-4c7f-8f6a-9b1f5b7c1e22"},
        "serviceaccount": {"name": "muster-plugin", "uid": "5c2d5b1e-6a55-4f3f-8a50-1f2f3c4d5e66"},
        "warnafter": int(at + 3607),
    }
    whole = {
        "aud": [AUDIENCE],
        "exp": int(at + lasts_s),
        "iat": int(at),
        "iss": ISSUER,
        "jti": "2c5b1e6a-5565-4f3f-8a50-1f2f3c4d5e66",
        "kubernetes.io": bound,
        "nbf": int(at),
        "sub": "system:serviceaccount:muster:muster-plugin",
        **changed,
    }
    return {name: value for name, value in whole.items() if value is not None}


def token(said: Claims | bytes, key: str = "k1", algorithm: str = "RS256", **header: Any) -> str:
    """Return signed claims, which need not be JSON; `header` overrides fields of the header."""
    head = {"alg": algorithm, "kid": key, **header}
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    parts = [nkeys.to_base64(part) for part in (json.dumps(head).encode(), body)]
    signed = ".".join(parts)
    return f"{signed}.{nkeys.to_base64(_signature(signed.encode(), key, algorithm))}"


def by_secret(said: Claims, secret: bytes, key: str = "k1") -> str:
    """Return claims signed with HS256; the secret may be a public key."""
    head = {"alg": "HS256", "kid": key, "typ": "JWT"}
    signed = ".".join(nkeys.to_base64(json.dumps(part).encode()) for part in (head, said))
    mac = hmac.HMAC(secret, hashes.SHA256())
    mac.update(signed.encode())
    return f"{signed}.{nkeys.to_base64(mac.finalize())}"


def _signature(signed: bytes, key: str, algorithm: str) -> bytes:
    match algorithm:
        case "RS256":
            return rsa_key(key).sign(signed, padding.PKCS1v15(), hashes.SHA256())
        case "ES256":
            mark = curve_key(key).sign(signed, ec.ECDSA(hashes.SHA256()))
            return b"".join(n.to_bytes(32) for n in utils.decode_dss_signature(mark))
        case _:
            return b""


def _number(number: int, size: int) -> str:
    return nkeys.to_base64(number.to_bytes(size))
