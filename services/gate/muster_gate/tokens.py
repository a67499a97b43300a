"""Pure: verifies a projected Kubernetes service account token with the cluster's public keys.

Only the cluster's public keys are needed. Checking each token with the API server would cause ten
thousand requests when ten thousand plugins reconnect at the same time, perhaps while the API server
is unavailable. The keys are a JSON Web Key Set (RFC 7517); Kubernetes signs with RSA or with
elliptic curves (pkg/serviceaccount/jwt.go, signerFromPrivateKey; 1.36). Each key is used with one
algorithm only; the algorithm in a token is compared with it, never trusted.

While the API server is unavailable, kubelets cannot renew tokens. Tokens are then verified as of
the last fetch of the keys, so that a plugin that was admitted a minute ago is admitted again.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import msgspec
from cryptography import exceptions
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils

from muster import codec, vocabulary
from muster.nats.auth import nkeys, permissions
from muster_gate import config

RSA_BITS_MIN: Final = 2048
_RSA_BITS_MAX: Final = 8192
_KEYS_MAX: Final = 64
_COORDINATE_BYTES: Final = 32

Check: TypeAlias = Callable[[bytes, bytes], None]
"""A function that raises InvalidSignature unless the second argument signs the first."""
_TOKEN_MAX: Final = 4096
"""The maximum length of a token: nats-server rejects longer lines (max_control_line)."""
_LATEST: Final = 2**40
_MISSED_REFRESHES_MAX: Final = 2
"""The API server counts as unavailable after this many refresh periods without fetched keys."""
_LIFETIME_MIN_S: Final = 1.0
Seconds = Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


class BadKeys(ValueError):
    """The document is invalid, or contains no usable key or issuer."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, and the only algorithm with which it may be used."""

    algorithm: str
    check: Check

    def is_signed(self, signed: bytes, signature: bytes) -> bool:
        """Return whether the signature was made with this key."""
        try:
            self.check(signed, signature)
        except (exceptions.InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """The keys by id, their issuer, and when they were fetched, in UTC."""

    issuer: str
    keys: Mapping[str, Sequence[PublicKey]]
    """Keys by id; if a cluster uses an id twice, either key may have signed a token."""
    fetched_at: float


class _Key(msgspec.Struct, frozen=True):
    kty: str
    kid: str = ""
    alg: str = ""
    use: str = "sig"
    crv: str = ""
    n: str = ""
    e: str = ""
    x: str = ""
    y: str = ""


class _Keys(msgspec.Struct, frozen=True):
    keys: list[msgspec.Raw]


class _Discovery(msgspec.Struct, frozen=True):
    issuer: str


def discovered_issuer(document: bytes) -> str:
    """Return the issuer in /.well-known/openid-configuration. Raises BadKeys."""
    try:
        name = msgspec.json.decode(document, type=_Discovery).issuer
    except codec.UNREADABLE as error:
        raise BadKeys(f"not an OpenID configuration: {error}") from None
    if not name:
        raise BadKeys("the OpenID configuration contains no issuer")
    return name


def public_keys(document: bytes) -> dict[str, list[PublicKey]]:
    """Return the usable keys of a set by id. Raises BadKeys."""
    try:
        entries = msgspec.json.decode(document, type=_Keys).keys
    except codec.UNREADABLE as error:
        raise BadKeys(f"not a key set: {error}") from None
    keys: dict[str, list[PublicKey]] = {}
    for raw in entries[:_KEYS_MAX]:
        try:
            entry = msgspec.json.decode(raw, type=_Key)
            key = _key(entry)
        except (*codec.UNREADABLE, ValueError):
            continue
        if entry.kid and entry.use == "sig" and entry.alg in {"", key.algorithm}:
            keys.setdefault(entry.kid, []).append(key)
    if not keys:
        raise BadKeys(f"none of {len(entries)} keys has an id and is for RS256 or ES256")
    return keys


def _key(entry: _Key) -> PublicKey:
    if entry.kty == "RSA":
        return _rsa(_integer(entry.n), _integer(entry.e))
    if (entry.kty, entry.crv) == ("EC", "P-256"):
        return _curve(_integer(entry.x), _integer(entry.y))
    raise ValueError("unsupported kind of key")


def _rsa(modulus: int, exponent: int) -> PublicKey:
    if not RSA_BITS_MIN <= modulus.bit_length() <= _RSA_BITS_MAX:
        raise ValueError("too short or too long")
    public = rsa.RSAPublicNumbers(exponent, modulus).public_key()
    return PublicKey(
        "RS256",
        lambda signed, mark: public.verify(mark, signed, padding.PKCS1v15(), hashes.SHA256()),
    )


def _curve(x: int, y: int) -> PublicKey:
    public = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()

    def check(signed: bytes, mark: bytes) -> None:
        # RFC 7518, 3.4: a signature is two numbers in sequence, not ASN.1
        if len(mark) != 2 * _COORDINATE_BYTES:
            raise exceptions.InvalidSignature
        halves = mark[:_COORDINATE_BYTES], mark[_COORDINATE_BYTES:]
        two = utils.encode_dss_signature(*(int.from_bytes(half) for half in halves))
        public.verify(two, signed, ec.ECDSA(hashes.SHA256()))

    return PublicKey("ES256", check)


def _integer(text: str) -> int:
    return int.from_bytes(nkeys.from_base64(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """The pod and node that a token was issued to, and the service account of the pod."""

    account: str
    node: str
    """The node in the form used in subjects, not its name: `a_b` for `a.b`."""
    pod: str
    lifetime_s: float
    """How long the client may stay connected before it must present a token again."""


class _Header(msgspec.Struct, frozen=True):
    alg: str
    kid: str = ""
    typ: str = "JWT"
    crit: list[str] = []


class _Named(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _Bound(msgspec.Struct, frozen=True):
    """The claim `kubernetes.io` (pkg/serviceaccount/claims.go; with the node since 1.30)."""

    namespace: str = ""
    serviceaccount: _Named = _Named()
    pod: _Named = _Named()
    node: _Named = _Named()


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    sub: str
    exp: Seconds
    aud: str | list[str]
    nbf: Seconds = 0.0
    iat: Seconds = 0.0
    bound: _Bound = msgspec.field(name="kubernetes.io", default=_Bound())


def verify(
    token: str,
    rules: config.Tokens,
    keys: config.Keys,
    *,
    ring: Keyring | None,
    at: float,
) -> Bearer:
    """Verify a token; return its bearer. `at` is UTC. Raises Refused."""
    parts, header = _parts(token)
    if ring is None or at - ring.fetched_at > keys.age_max_s:
        raise Refused(Reason.NO_KEYS)
    named = ring.keys.get(header.kid, ())
    keys_ = [key for key in named if key.algorithm == header.alg]
    if header.alg not in {"RS256", "ES256"} or (named and not keys_):
        raise Refused(Reason.ALGORITHM)
    if not keys_:
        raise Refused(Reason.UNKNOWN_KEY)
    if not any(key.is_signed(parts.signed, parts.signature) for key in keys_):
        raise Refused(Reason.SIGNATURE)
    try:
        claims = msgspec.json.decode(parts.claims, type=_Claims)
    except codec.UNREADABLE:
        raise Refused(Reason.MALFORMED) from None
    return _verified(claims, rules, issuer=ring.issuer, at=at, as_of=_as_of(ring, keys, at))


def _parts(token: str) -> tuple[nkeys.Parts, _Header]:
    if not token:
        raise Refused(Reason.NO_TOKEN)
    if len(token) > _TOKEN_MAX:
        raise Refused(Reason.MALFORMED)
    try:
        parts = nkeys.split_token(token)
        header = msgspec.json.decode(parts.header, type=_Header)
    except (*codec.UNREADABLE, ValueError):
        raise Refused(Reason.MALFORMED) from None
    # RFC 7515, 4.1.11: refuse critical headers, because none is supported
    if header.crit or header.typ.upper() != "JWT":
        raise Refused(Reason.MALFORMED)
    return parts, header


def _as_of(ring: Keyring, keys: config.Keys, at: float) -> float:
    """Return the time as of which a token must not have expired."""
    is_unavailable = at - ring.fetched_at > _MISSED_REFRESHES_MAX * keys.refresh_s
    # for keys from a file, it is unknown whether the API server is available
    return ring.fetched_at if is_unavailable and keys.file is None else at


def _verified(
    claims: _Claims, rules: config.Tokens, *, issuer: str, at: float, as_of: float
) -> Bearer:
    def refused(reason: Reason) -> Refused:
        return Refused(reason, subject=claims.sub[:256])

    if claims.iss != issuer:
        raise refused(Reason.ISSUER)
    if rules.audience not in ([claims.aud] if isinstance(claims.aud, str) else claims.aud):
        raise refused(Reason.AUDIENCE)
    if claims.exp + rules.leeway_s <= as_of:
        raise refused(Reason.EXPIRED)
    if max(claims.nbf, claims.iat) > at + rules.leeway_s:
        raise refused(Reason.NOT_YET)
    bound = claims.bound
    account = bound.serviceaccount.name
    expected = f"system:serviceaccount:{rules.namespace}:{account}"
    if account not in {rules.account, *rules.others} or (bound.namespace, claims.sub) != (
        rules.namespace,
        expected,
    ):
        raise refused(Reason.ACCOUNT)
    if not (bound.pod.name and bound.pod.uid):
        raise refused(Reason.NO_NODE)
    try:
        node = vocabulary.node_token(bound.node.name)
        permissions.plugin(node)
    except ValueError:
        raise refused(Reason.NO_NODE) from None
    rest_s = max(claims.exp - as_of, _LIFETIME_MIN_S)
    lifetime_s = min(rest_s, rules.lifetime_max_s)
    return Bearer(account=account, node=node, pod=bound.pod.name, lifetime_s=lifetime_s)


class Reason(enum.StrEnum):
    """Why a connection is denied, or why its request is not answered (`LATE`)."""

    UNREADABLE = "unreadable"
    """The request is invalid, or does not come from nats-server."""
    NO_TOKEN = "no_token"  # noqa: S105  # a word
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    """The algorithm is not RS256 or ES256, or not the key's algorithm."""
    NO_KEYS = "no_keys"
    """No keys have been fetched yet, or they are older than `keys.age_max_s`."""
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    ACCOUNT = "account"
    """The token belongs to a service account that is not configured for plugins."""
    NO_NODE = "no_node"
    """The token is not bound to a pod on a node."""
    NAME = "name"
    """The connection's name contains another node, or a plugin name that the pod may not use."""
    NOISY = "noisy"
    """The node exceeded its rate limit and is refused for a while (`rate_limiter`)."""
    TOO_OFTEN = "too_often"
    LATE = "late"
    """The request waited too long, or the queue was full: too many clients are connecting."""


class Refused(Exception):
    """A connection is denied; `subject` is the token's subject or its node, if known."""

    def __init__(self, reason: Reason, *, subject: str = "") -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.subject = subject
