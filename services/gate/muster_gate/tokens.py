"""Pure: verifies a projected service account token of Kubernetes, and returns its node.

This takes only the cluster's public keys: if ten thousand plugins reconnect at once, asking the API
server about each token would be ten thousand requests to a server that may be unavailable.

While the API server is unavailable no kubelet can renew a token. Tokens are then verified as of the
last fetch of the keys, so that a plugin that was admitted a minute ago is admitted again.
"""

import enum
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import jws, permissions
from muster_gate import config, keyring

_TOKEN_MAX: Final = 4096
"""nats-server accepts no longer line (max_control_line)."""
_LATEST: Final = 2**40
_MISSED_REFRESHES_MAX: Final = 2
"""After so many failed refreshes the API server counts as unavailable."""
_LIFETIME_MIN_S: Final = 1.0

Seconds = Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """Whose token it is."""

    node: str
    """As in subjects, not the node's name: `a.b` is `a_b`."""
    pod: str
    lifetime_s: float
    """How long it may stay connected before it must show a token again."""


class _Header(msgspec.Struct, frozen=True):
    alg: str
    kid: str = ""
    typ: str = "JWT"
    crit: list[str] = []


class _Named(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _Bound(msgspec.Struct, frozen=True):
    """What `kubernetes.io` holds (pkg/serviceaccount/claims.go; the node since 1.30)."""

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
    ring: keyring.Keyring | None,
    at: float,
) -> Bearer:
    """Return whose token this is; `at` is UTC. Raises Refused."""
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


def _parts(token: str) -> tuple[jws.Parts, _Header]:
    if not token:
        raise Refused(Reason.NO_TOKEN)
    if len(token) > _TOKEN_MAX:
        raise Refused(Reason.MALFORMED)
    try:
        parts = jws.split(token)
        header = msgspec.json.decode(parts.header, type=_Header)
    except (*codec.UNREADABLE, ValueError):
        raise Refused(Reason.MALFORMED) from None
    # RFC 7515, 4.1.11: critical headers that we do not understand
    if header.crit or header.typ.upper() != "JWT":
        raise Refused(Reason.MALFORMED)
    return parts, header


def _as_of(ring: keyring.Keyring, keys: config.Keys, at: float) -> float:
    """Return the moment at which a token must have been valid."""
    is_unavailable = at - ring.fetched_at > _MISSED_REFRESHES_MAX * keys.refresh_s
    # keys from a file do not show whether the API server is available
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
    account = (bound.namespace, bound.serviceaccount.name, claims.sub)
    expected = f"system:serviceaccount:{rules.namespace}:{rules.account}"
    if account != (rules.namespace, rules.account, expected):
        raise refused(Reason.ACCOUNT)
    if not (bound.pod.name and bound.pod.uid):
        raise refused(Reason.NO_NODE)
    try:
        node = vocabulary.node_token(bound.node.name)
        permissions.plugin(node)
    except ValueError:
        raise refused(Reason.NO_NODE) from None
    rest_s = max(claims.exp - as_of, _LIFETIME_MIN_S)
    return Bearer(node=node, pod=bound.pod.name, lifetime_s=min(rest_s, rules.lifetime_max_s))


class Reason(enum.StrEnum):
    """Why a connection is denied, in the order of the checks."""

    UNREADABLE = "unreadable"
    """Not a request of nats-server."""
    NO_TOKEN = "no_token"  # noqa: S105  # a word
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    """Not RS256 or ES256, or not what the key is for."""
    NO_KEYS = "no_keys"
    """We have none that is recent enough: the API server is unavailable."""
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    ACCOUNT = "account"
    """Not the service account of the plugins."""
    NO_NODE = "no_node"
    """Not bound to a pod on a node."""
    NAME = "name"
    """The connection is named like a plugin of another node."""
    TOO_OFTEN = "too_often"
    LATE = "late"
    """Requested so long ago that the client has given up: more connect than we can answer."""


class Refused(Exception):
    """A connection is denied; `subject` is whom the token names, if that was verified."""

    def __init__(self, reason: Reason, *, subject: str = "") -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.subject = subject
