"""Pure: A projected token of Kubernetes: whether it is believed, and for which node it speaks.

It is checked here, with the cluster's public keys, and nobody is asked: ten thousand plugins that
come back at once would be ten thousand requests to an API server that may be away.

While the API server is away no kubelet can renew a token. Tokens are then judged as of the moment
at which it was last heard, so that who was let in a minute ago is let in again.
"""

import enum
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import jws, permissions
from muster_gate import config, keyring

_TOKEN_MAX: Final = 4096
"""nats-server takes no longer line than that (max_control_line)."""
_LATEST: Final = 2**40
_AWAY_REFRESHES: Final = 2
"""After so many periods without an answer the API server is taken for away."""
_LIFETIME_MIN_S: Final = 1.0

Seconds = Annotated[float, msgspec.Meta(ge=0, le=_LATEST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """Who shows a token that is to be believed."""

    node: str
    """The token in subjects, not the name: `a.b` is `a_b`."""
    pod: str
    lifetime_s: float
    """For how long it may be connected before it shows a token again."""


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


def bearer(
    token: str,
    rules: config.Tokens,
    keys: config.Keys,
    *,
    ring: keyring.Keyring | None,
    at: float,
) -> Bearer:
    """Return who shows a token at this moment, in UTC. Raises Refused."""
    parts, header = _parts(token)
    if ring is None or at - ring.heard_at > keys.age_max_s:
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
    return _believed(claims, rules, issuer=ring.issuer, at=at, as_of=_as_of(ring, keys, at))


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
    # RFC 7515, 4.1.11: what we do not understand and must, we refuse
    if header.crit or header.typ.upper() != "JWT":
        raise Refused(Reason.MALFORMED)
    return parts, header


def _as_of(ring: keyring.Keyring, keys: config.Keys, at: float) -> float:
    """Return the moment at which a token must have been good."""
    is_away = at - ring.heard_at > _AWAY_REFRESHES * keys.refresh_s
    # keys from a file tell nothing about the API server
    return ring.heard_at if is_away and keys.file is None else at


def _believed(
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
    who = (bound.namespace, bound.serviceaccount.name, claims.sub)
    expected = f"system:serviceaccount:{rules.namespace}:{rules.account}"
    if who != (rules.namespace, rules.account, expected):
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
    """What is wrong with who asks, or with us; the order is that of the questions."""

    UNREADABLE = "unreadable"
    """Not a request of nats-server's."""
    NO_TOKEN = "no_token"  # noqa: S105  # a word
    MALFORMED = "malformed"
    ALGORITHM = "algorithm"
    """Not RS256 or ES256, or not what the key is for."""
    NO_KEYS = "no_keys"
    """We have none that is young enough: the API server is away, or was never there."""
    UNKNOWN_KEY = "unknown_key"
    SIGNATURE = "signature"
    ISSUER = "issuer"
    AUDIENCE = "audience"
    EXPIRED = "expired"
    NOT_YET = "not_yet"
    ACCOUNT = "account"
    """Another service account than the plugins'."""
    NO_NODE = "no_node"
    """Not bound to a pod on a node."""
    NAME = "name"
    """The connection is named like a plugin of another node."""
    TOO_OFTEN = "too_often"
    LATE = "late"
    """Asked so long ago that nobody waits for the answer: more come than we can let in."""


class Refused(Exception):
    """Who asks is not let in; `subject` is whom the token names, where that could be checked."""

    def __init__(self, reason: Reason, *, subject: str = "") -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.subject = subject
