"""Pure: One question, one answer: who is let in, and why another is not."""

from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.nats.auth import accounts, nkeys, permissions
from muster_gate import config, keyring, tokens
from muster_gate.tokens import Reason, Refused

_AUDIENCE: Final = "nats-authorization-request"
_NODES_MAX: Final = 200_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Somebody may come in."""

    answer: bytes
    node: str
    pod: str
    lifetime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """Somebody may not, and why; `answer` is empty where nobody can be answered."""

    answer: bytes
    reason: Reason
    name: str = ""
    host: str = ""
    subject: str = ""


class Doorkeeper:
    """Holds the keys of the cluster and our own, which its door renews, and who came how often."""

    def __init__(self, settings: config.Settings, signing: Signing) -> None:
        self.ring: keyring.Keyring | None = None
        self.signing = signing
        self._tokens = settings.tokens
        self._keys = settings.keys
        self._pace = Pace(settings.pace)

    def decide(self, payload: bytes, *, at: float, now: float) -> Admitted | Turned:
        """Return the answer to a question of nats-server's; `at` is UTC, `now` monotonic."""
        try:
            asked = read_question(payload)
        except Refused as refusal:
            return Turned(answer=b"", reason=refusal.reason)
        try:
            who = tokens.bearer(asked.token, self._tokens, self._keys, ring=self.ring, at=at)
            self._check(asked, who, now)
        except Refused as refusal:
            return Turned(
                answer=refused(asked, refusal.reason, self.signing, at=at),
                reason=refusal.reason,
                name=asked.name[:256],
                host=asked.host,
                subject=refusal.subject,
            )
        return Admitted(
            answer=admitted(asked, who, self.signing, at=at),
            node=who.node,
            pod=who.pod,
            lifetime_s=who.lifetime_s,
        )

    def _check(self, asked: Question, who: tokens.Bearer, now: float) -> None:
        if not speaks_for_itself(asked.name, who.node):
            raise Refused(Reason.NAME, subject=who.node)
        if not self._pace.takes(who.node, now):
            raise Refused(Reason.TOO_OFTEN, subject=who.node)


class _SigningFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    auth: str
    plugins: str
    answer_seed: str
    node_seed: str


def signing(document: bytes) -> Signing:
    """Return what is in gate.json. Raises ValueError, which repeats nothing of it."""
    try:
        told = msgspec.json.decode(document, type=_SigningFile)
    except codec.UNREADABLE:
        raise ValueError("not as `muster auth init` writes it") from None
    return Signing(
        answer=nkeys.Key.from_seed(told.answer_seed, nkeys.Kind.ACCOUNT),
        node=nkeys.Key.from_seed(told.node_seed, nkeys.Kind.ACCOUNT),
        auth=nkeys.check(told.auth, nkeys.Kind.ACCOUNT),
        plugins=nkeys.check(told.plugins, nkeys.Kind.ACCOUNT),
    )


def read_question(payload: bytes) -> Question:
    """Return what a server asks. Raises Refused, when nobody can be answered."""
    try:
        claims = nkeys.decode_jwt(payload.decode("ascii"), _Claims, nkeys.Kind.SERVER)
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
    """Return whether a connection is not named like a plugin of another node: `<plugin> <node>`.

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
    return _answer(asked, {"jwt": nkeys.encode_jwt(user, keys.node, at=at)}, keys, at=at)


def refused(asked: Question, reason: Reason, keys: Signing, *, at: float) -> bytes:
    """Return the answer that lets nobody in; nats-server logs the reason, and does not tell it."""
    return _answer(asked, {"error": f"muster-gate: {reason}"}, keys, at=at)


def _answer(asked: Question, said: dict[str, str], keys: Signing, *, at: float) -> bytes:
    nats = said | {"type": "authorization_response", "version": 2, "issuer_account": keys.auth}
    claims = {"sub": asked.user, "aud": asked.server, "nats": nats}
    return nkeys.encode_jwt(claims, keys.answer, at=at).encode()


class Pace:
    """A bucket for each node that came of late; one that is full again is forgotten."""

    def __init__(self, rules: config.Pace) -> None:
        self._burst = float(rules.burst)
        self._per_s = rules.per_minute / 60
        self._spent: dict[str, tuple[float, float]] = {}
        """By node, oldest first: how much was spent, when."""

    def takes(self, node: str, now: float) -> bool:
        """Return whether this node may connect once more now, and count it if so."""
        spent, since = self._spent.pop(node, (0.0, now))
        spent = max(0.0, spent - (now - since) * self._per_s)
        is_free = spent + 1 <= self._burst
        self._spent[node] = (spent + is_free, now)
        self._forget(now)
        return is_free

    def _forget(self, now: float) -> None:
        """Drop what is full again, or too much, from the oldest on: more a call than come."""
        for _ in range(2):
            node, (spent, since) = next(iter(self._spent.items()))
            if spent > (now - since) * self._per_s and len(self._spent) <= _NODES_MAX:
                return
            del self._spent[node]
            if not self._spent:
                return
