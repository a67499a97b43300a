"""Pure: What nats-server asks about a client, and how it is answered (nats-io/jwt v2, 2.15).

A question is signed by the server, an answer by us; the user in it by the key whose scope has the
rights of a plugin. The user's name is its inbox, and its tag its node.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from muster import vocabulary
from muster.nats.auth import accounts, jwts, nkeys, permissions
from muster.service import reading
from muster_gate import tokens
from muster_gate.reasons import Reason, Refused

_AUDIENCE: Final = "nats-authorization-request"


class _Server(msgspec.Struct, frozen=True):
    id: str
    name: str = ""


class _Client(msgspec.Struct, frozen=True):
    host: str = ""
    id: int = 0
    name: str = ""
    kind: str = ""


class _Options(msgspec.Struct, frozen=True):
    auth_token: str = ""
    name: str = ""


class _Request(msgspec.Struct, frozen=True):
    server_id: _Server
    user_nkey: str
    client_info: _Client = _Client()
    connect_opts: _Options = _Options()


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    aud: str
    nats: _Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Who wants to come in."""

    server: str
    user: str
    """The public key that the answer must be for."""
    token: str
    name: str
    """What the connection calls itself."""
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Signing:
    """What answers are signed with, and the accounts that they are for."""

    answer: nkeys.Key
    node: nkeys.Key
    auth: str
    plugins: str


class _Signing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    auth: str
    plugins: str
    answer_seed: str
    node_seed: str


def signing(document: bytes) -> Signing:
    """Return what is in gate.json. Raises ValueError, which repeats nothing of it."""
    try:
        told = msgspec.json.decode(document, type=_Signing)
    except reading.UNREADABLE:
        raise ValueError("not as `muster auth init` writes it") from None
    return Signing(
        answer=nkeys.Key.from_seed(told.answer_seed, nkeys.Kind.ACCOUNT),
        node=nkeys.Key.from_seed(told.node_seed, nkeys.Kind.ACCOUNT),
        auth=nkeys.check(told.auth, nkeys.Kind.ACCOUNT),
        plugins=nkeys.check(told.plugins, nkeys.Kind.ACCOUNT),
    )


def read(payload: bytes) -> Question:
    """Return what a server asks. Raises Refused, when nobody can be answered."""
    try:
        claims = jwts.decode(payload.decode("ascii"), _Claims, nkeys.Kind.SERVER)
        nkeys.check(claims.nats.user_nkey, nkeys.Kind.USER)
    except ValueError:
        raise Refused(Reason.UNREADABLE) from None
    if claims.aud != _AUDIENCE or claims.iss != claims.nats.server_id.id:
        raise Refused(Reason.UNREADABLE)
    asked = claims.nats
    return Question(
        server=asked.server_id.id,
        user=asked.user_nkey,
        token=asked.connect_opts.auth_token,
        name=asked.connect_opts.name,
        host=asked.client_info.host[:64],
    )


def speaks_for_itself(name: str, node: str) -> bool:
    """Tell whether a connection is not named like a plugin of another node: `<plugin> <node>`.

    Health knows from these names whose connection ended.
    """
    _, _, called = name.partition(" ")
    try:
        return vocabulary.node_token(called) == node
    except ValueError:
        return True


def admitted(asked: Question, who: tokens.Bearer, keys: Signing, *, at: float) -> bytes:
    """Return the answer that lets somebody in, for one node and a limited time."""
    user = accounts.user(
        accounts.Role.NODE,
        asked.user,
        name=permissions.plugin_user(who.node),
        account=keys.plugins,
        until=at + who.lifetime_s,
    )
    return _answer(asked, {"jwt": jwts.encode(user, keys.node, at=at)}, keys, at=at)


def refused(asked: Question, reason: Reason, keys: Signing, *, at: float) -> bytes:
    """Return the answer that lets nobody in; nats-server logs the reason, and does not tell it."""
    return _answer(asked, {"error": f"muster-gate: {reason}"}, keys, at=at)


def _answer(asked: Question, said: dict[str, str], keys: Signing, *, at: float) -> bytes:
    nats = said | {"type": "authorization_response", "version": 2, "issuer_account": keys.auth}
    claims = {"sub": asked.user, "aud": asked.server, "nats": nats}
    return jwts.encode(claims, keys.answer, at=at).encode()
