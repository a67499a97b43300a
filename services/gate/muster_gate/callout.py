"""Pure: NATS auth callout: decides who may connect, and binds a plugin to its token's node.

Sources: nats-io/jwt v2, nats-server 2.15. The server signs requests, and we sign answers. The user
in an answer is signed with the key whose scope has the permissions of a plugin. The user's name is
its inbox prefix, and its tag is the node.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, pacing, vocabulary
from muster.nats.auth import accounts, nkeys, permissions
from muster_gate import config, rate_limiter, tokens
from muster_gate.tokens import Reason, Refused

_AUDIENCE: Final = "nats-authorization-request"
_NODES_MAX: Final = 200_000
"""The maximum number of nodes whose rate of new connections is tracked."""


class _Server(msgspec.Struct, frozen=True):
    id: str


class _Client(msgspec.Struct, frozen=True):
    host: str = ""


class _Options(msgspec.Struct, frozen=True):
    auth_token: str = ""
    name: str = ""
    """The connection's name, chosen by the client."""


class AuthRequest(msgspec.Struct, frozen=True):
    """A client's connection request, as nats-server forwards it."""

    server_id: _Server
    user_nkey: str
    """The public key that the answer must contain."""
    client_info: _Client = _Client()
    connect_opts: _Options = _Options()


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    aud: str
    nats: AuthRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """The keys that sign answers (`answer`) and users (`node`), and the accounts of both.

    In an installation with passwords, both keys are the same and `auth` is empty, and each answer
    lists the permissions of the plugin.
    """

    answer: nkeys.Key
    node: nkeys.Key
    auth: str
    plugins: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The decision to allow a connection."""

    answer: bytes
    node: str
    pod: str
    lifetime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The decision to deny a connection; `answer` is empty if no answer is possible."""

    answer: bytes
    reason: Reason
    name: str = ""
    host: str = ""
    subject: str = ""


class Authorizer:
    """Decides which clients may connect, and limits how often each node may connect."""

    def __init__(self, settings: config.Settings, signing: Signing) -> None:
        self.ring: tokens.Keyring | None = None
        self.signing = signing
        self.limiter = rate_limiter.RateLimiter(settings.rates)
        self._tokens = settings.tokens
        self._keys = settings.keys
        self._plugins = {
            **{account: frozenset(names) for account, names in settings.tokens.others.items()},
            settings.tokens.account: frozenset((permissions.PLUGIN, *settings.plugins)),
        }
        """The plugin names that the pods of each service account may use."""
        self._connects: pacing.KeyedBuckets[str] = pacing.KeyedBuckets(
            per_s=settings.pace.per_minute / 60, burst=settings.pace.burst, keys_max=_NODES_MAX
        )

    def decide(self, payload: bytes, *, at: float, now: float) -> Admitted | Denied:
        """Decide on a connection request; `at` is UTC, `now` monotonic."""
        try:
            request = read_request(payload)
        except Refused as refusal:
            return Denied(answer=b"", reason=refusal.reason)
        try:
            token = request.connect_opts.auth_token
            bearer = tokens.verify(token, self._tokens, self._keys, ring=self.ring, at=at)
            self._check(request, bearer, now)
        except Refused as refusal:
            return Denied(
                answer=deny(request, refusal.reason, self.signing, at=at),
                reason=refusal.reason,
                name=request.connect_opts.name[:256],
                host=request.client_info.host[:64],
                subject=refusal.subject,
            )
        return Admitted(
            answer=allow(
                request, bearer, self.signing, at=at, plugins=self._plugins[bearer.account]
            ),
            node=bearer.node,
            pod=bearer.pod,
            lifetime_s=bearer.lifetime_s,
        )

    def _check(self, request: AuthRequest, bearer: tokens.Bearer, now: float) -> None:
        if not is_named_for(request.connect_opts.name, bearer.node, self._plugins[bearer.account]):
            raise Refused(Reason.NAME, subject=bearer.node)
        if self.limiter.refused_s(bearer.node, now) > 0:
            raise Refused(Reason.NOISY, subject=bearer.node)
        if not self._connects.try_take(bearer.node, now):
            raise Refused(Reason.TOO_OFTEN, subject=bearer.node)


class _GateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    auth: str
    plugins: str
    answer_seed: str
    node_seed: str


def read_signing(document: bytes) -> Signing:
    """Return the keys in gate.json. Raises ValueError, whose message contains no key."""
    try:
        decoded = msgspec.json.decode(document, type=_GateFile)
    except codec.UNREADABLE:
        raise ValueError("not a file that `muster auth init` wrote") from None
    return Signing(
        answer=nkeys.Key.from_seed(decoded.answer_seed, nkeys.Kind.ACCOUNT),
        node=nkeys.Key.from_seed(decoded.node_seed, nkeys.Kind.ACCOUNT),
        auth=nkeys.check(decoded.auth, nkeys.Kind.ACCOUNT),
        plugins=nkeys.check(decoded.plugins, nkeys.Kind.ACCOUNT),
    )


def read_request(payload: bytes) -> AuthRequest:
    """Return a server's verified request. Raises Refused if the request cannot be answered."""
    try:
        claims = nkeys.decode_jwt(payload.decode("ascii"), _Claims, nkeys.Kind.SERVER)
        nkeys.check(claims.nats.user_nkey, nkeys.Kind.USER)
    except ValueError:
        raise Refused(Reason.UNREADABLE) from None
    if claims.aud != _AUDIENCE or claims.iss != claims.nats.server_id.id:
        raise Refused(Reason.UNREADABLE)
    return claims.nats


def is_named_for(name: str, node: str, plugins: Collection[str]) -> bool:
    """Return whether a plugin on this node may use this connection name.

    Health identifies closed connections by names of the form `<plugin> <node>`, so these must name
    this node and an allowed plugin. Health ignores all other names, so they are allowed.
    """
    plugin, _, named = name.partition(" ")
    try:
        return vocabulary.node_token(named) == node and plugin in plugins
    except ValueError:
        return True


def allow(
    request: AuthRequest,
    bearer: tokens.Bearer,
    keys: Signing,
    *,
    at: float,
    plugins: Collection[str],
) -> bytes:
    """Return the answer that allows a connection, for one node and a limited time."""
    until = at + bearer.lifetime_s
    if keys.auth:
        user = accounts.user(
            accounts.Role.NODE,
            request.user_nkey,
            name=permissions.plugin_user(bearer.node),
            account=keys.plugins,
            until=until,
            plugins=plugins,
        )
    else:
        grant = permissions.plugin(bearer.node, plugins)
        user = accounts.user_with_rights(grant, request.user_nkey, until=until)
    return _answer(request, {"jwt": nkeys.encode_jwt(user, keys.node, at=at)}, keys, at=at)


def deny(request: AuthRequest, reason: Reason, keys: Signing, *, at: float) -> bytes:
    """Return the answer that denies a connection; the client does not see the reason."""
    return _answer(request, {"error": f"muster-gate: {reason}"}, keys, at=at)


def _answer(request: AuthRequest, content: dict[str, str], keys: Signing, *, at: float) -> bytes:
    nats = content | {"type": "authorization_response", "version": 2}
    if keys.auth:
        nats["issuer_account"] = keys.auth
    claims = {"sub": request.user_nkey, "aud": request.server_id.id, "nats": nats}
    return nkeys.encode_jwt(claims, keys.answer, at=at).encode()
