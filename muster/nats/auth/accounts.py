"""Pure: writes nats-server's accounts from `permissions`, for clients with keys.

An operator signs the accounts; an account names the keys that may sign its users. Each role has its
own signing key with a scope: the key's owner can create users of that role only, and the account,
not the user, defines the role's rights (nats-io/jwt v2, scoped signing keys).

A client with a token instead of credentials is assigned to the account AUTH, for which nats-server
asks the gate.
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from muster.nats.auth import exports, nkeys, permissions

Claims: TypeAlias = exports.Claims
Random: TypeAlias = Callable[[int], bytes]
"""Returns the requested number of random secret bytes."""
Keyring: TypeAlias = Mapping[str, Sequence[nkeys.Key]]
"""The keys of an installation by their names in `KINDS`; all listed keys are valid, newest first.
"""

_CONNECTIONS: Final = "$SYS.REQ.ACCOUNT.{}.CONNZ"
_DISCONNECT: Final = "$SYS.REQ.SERVER.*.KICK"
PLUGIN_TAG: Final = "plugin"
_NO_LIMIT: Final = -1
_VERSION: Final = 2
_READERS_LIMITS: Final[Claims] = {
    "payload": permissions.READER_PAYLOAD_MAX,
    "subs": permissions.READER_SUBSCRIPTIONS_MAX,
}
_OF_CLIENTS: Final = ("CONNECT", "DISCONNECT")
_OF_SERVERS: Final = ("LAMEDUCK", "SHUTDOWN")


class Role(enum.StrEnum):
    """The roles on the bus; each has a signing key."""

    NODE = "node"
    READER = "reader"
    HEALTH = "health"
    LABELER = "labeler"
    NOTIFIER = "notifier"
    CONSOLE = "console"
    ADMIN = "admin"


CENTRAL: Final = (Role.HEALTH, Role.LABELER, Role.NOTIFIER, Role.CONSOLE, Role.ADMIN)
"""The roles with a single user."""
ADDED: Final = ("readers", "labelers", Role.CONSOLE.value)
"""The names of keys that the first version did not have; they are added to its installations."""
ANSWER: Final = "answer"
CHANGEABLE: Final = (ANSWER, *Role)
"""The names of the signing keys that can be replaced: accounts.conf lists their public keys."""
KINDS: Final[Mapping[str, nkeys.Kind]] = {
    "operator": nkeys.Kind.OPERATOR,
    "system": nkeys.Kind.ACCOUNT,
    "auth": nkeys.Kind.ACCOUNT,
    "muster": nkeys.Kind.ACCOUNT,
    "plugins": nkeys.Kind.ACCOUNT,
    "readers": nkeys.Kind.ACCOUNT,
    "labelers": nkeys.Kind.ACCOUNT,
    "gate": nkeys.Kind.USER,
    ANSWER: nkeys.Kind.ACCOUNT,
    **{role.value: nkeys.Kind.ACCOUNT for role in Role},
}
"""The kind of every key of an installation, by the key's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The key pairs of the operator and the accounts, and the public keys that accounts name."""

    operator: nkeys.Key
    system: nkeys.Key
    auth: nkeys.Key
    muster: nkeys.Key
    plugins: nkeys.Key
    readers: nkeys.Key
    labelers: nkeys.Key
    gate: str
    """The public key of the gate's user in the account AUTH."""
    answers: Sequence[str]
    """The public keys that verify the gate's answers; several during a rotation."""
    roles: Mapping[Role, Sequence[str]]
    """The public keys that verify users, by role; several during a rotation."""


def read_seeds(name: str, text: str) -> list[nkeys.Key]:
    """Return the key pairs of the seeds in a text; `name` is in `KINDS`. Raises ValueError."""
    keys = [nkeys.Key.from_seed(seed, KINDS[name]) for seed in text.split()]
    if not keys:
        raise ValueError("empty")
    return keys


def derive(ring: Keyring, *, random: Random, at: float) -> dict[str, str]:
    """Return accounts.conf, the gate's files and the credentials of `CENTRAL`, by file name.

    `random` returns the requested number of secret bytes.
    """
    newest = {name: keys[0] for name, keys in ring.items()}
    keys = Keys(
        operator=newest["operator"],
        system=newest["system"],
        auth=newest["auth"],
        muster=newest["muster"],
        plugins=newest["plugins"],
        readers=newest["readers"],
        labelers=newest["labelers"],
        gate=newest["gate"].public,
        answers=[key.public for key in ring[ANSWER]],
        roles={role: [key.public for key in ring[role]] for role in Role},
    )
    signing = {
        "auth": keys.auth.public,
        "plugins": keys.plugins.public,
        "answer_seed": newest[ANSWER].seed,
        "node_seed": newest[Role.NODE].seed,
    }
    gate_jwt = nkeys.encode_jwt(gate_user(keys.gate), keys.auth, at=at)
    made = {
        "accounts.conf": configuration(keys, _new_user(random).public, at=at),
        "gate.json": msgspec.json.encode(signing).decode() + "\n",
        "gate.creds": nkeys.write_creds(gate_jwt, newest["gate"]),
    }
    for role in CENTRAL:
        made[f"{role}.creds"] = credentials(ring, role, name=role, random=random, at=at)
    return made


def owner(role: Role) -> str:
    """Return the name of the account that a role's users belong to."""
    owners = {Role.NODE: "plugins", Role.READER: "readers", Role.LABELER: "labelers"}
    return owners.get(role, "muster")


def credentials(
    ring: Keyring,
    role: Role,
    *,
    name: str,
    random: Random,
    at: float,
    until: float | None = None,
    plugins: Collection[str] = (),
) -> str:
    """Return the .creds file of a new user, signed with the newest key of the role."""
    key, account = _new_user(random), ring[owner(role)][0].public
    claims = user(role, key.public, name=name, account=account, until=until, plugins=plugins)
    return nkeys.write_creds(nkeys.encode_jwt(claims, ring[role][0], at=at), key)


def user(
    role: Role,
    public: str,
    *,
    name: str,
    account: str,
    until: float | None = None,
    plugins: Collection[str] = (),
) -> Claims:
    """Return the claims of the user `name`, which a key of the user's role must sign.

    If a role has a single user, `name` is the name of the role. The token must not list
    rights, because the scope of the signing key defines them. `plugins` are names that a node's
    plugins may use besides `permissions.PLUGIN`.
    """
    nats: Claims = {"type": "user", "version": _VERSION, "issuer_account": account}
    claims: Claims = {"sub": public, "name": name, "nats": nats}
    if role is Role.NODE:
        node = name.removeprefix(permissions.plugin_user(""))
        names = sorted(set(plugins) - {permissions.PLUGIN})
        nats["tags"] = [permissions.node_tag(node), *(f"{PLUGIN_TAG}:{plugin}" for plugin in names)]
    return claims if until is None else claims | {"exp": round(until)}


def user_with_rights(grant: permissions.Grant, public: str, *, until: float) -> Claims:
    """Return a user's claims for a nats-server that uses passwords and the gate, but no scopes.

    The account is named as the audience (server/auth_callout.go; 2.15).
    """
    claims = {"sub": public, "name": grant.user, "aud": grant.account, "exp": round(until)}
    return claims | {"nats": _kind("user") | _rights(grant)}


def gate_user(public: str) -> Claims:
    """Return the claims of the gate itself, for the account AUTH to sign."""
    grant = permissions.gate()
    return {"sub": public, "name": grant.user, "nats": _kind("user") | _rights(grant)}


def configuration(keys: Keys, sentinel: str, *, at: float) -> str:
    """Return accounts.conf for nats-server; it contains no secrets.

    `sentinel` is the public key of a user without rights: a client with a token but no credentials
    is treated as that user until the gate has answered.
    """
    accounts = (
        (keys.system, _system()),
        (keys.auth, _auth(keys)),
        (keys.plugins, _plugins(keys)),
        (keys.readers, _readers(keys)),
        (keys.labelers, _labeler(keys)),
        (keys.muster, _muster(keys)),
    )
    operator = {"type": "operator", "version": _VERSION, "system_account": keys.system.public}
    nobody = _unlimited() | {"bearer_token": True, "pub": {"deny": [">"]}, "sub": {"deny": [">"]}}
    signed = {
        key.public: nkeys.encode_jwt({"sub": key.public, **claims}, keys.operator, at=at)
        for key, claims in accounts
    }
    operator_jwt = nkeys.encode_jwt(
        {"sub": keys.operator.public, "name": "muster", "nats": operator}, keys.operator, at=0
    )
    lines = [
        "# made by `muster auth`; its content is signed, and not secret",
        # nats-server refuses any reload once this text has changed (server/reload.go; 2.15)
        f"operator: {operator_jwt}",
        f"system_account: {keys.system.public}",
        "resolver: MEMORY",
        "resolver_preload {",
        *(f"  {public}: {text}" for public, text in signed.items()),
        "}",
        "default_sentinel: "
        + nkeys.encode_jwt(
            {"sub": sentinel, "name": "sentinel", "nats": _kind("user") | nobody}, keys.auth, at=at
        ),
        f"authorization {{ timeout: {permissions.CALLOUT_S} }}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _system() -> Claims:
    # the accounts name the accounts that import this, and only the operator can write them
    subjects = [f"$SYS.ACCOUNT.*.{what}" for what in _OF_CLIENTS]
    subjects += [f"$SYS.SERVER.*.{what}" for what in _OF_SERVERS]
    exported = [exports.stream(subject) for subject in subjects]
    # every server answers
    connections = exports.service(_CONNECTIONS.format("*")) | {"response_type": "Stream"}
    exported += [connections, exports.service(_DISCONNECT)]
    return {"name": "SYS", "nats": _kind("account") | {"limits": _limits(), "exports": exported}}


def _auth(keys: Keys) -> Claims:
    connections = _CONNECTIONS.format(keys.plugins.public)
    closed = f"$SYS.ACCOUNT.{keys.plugins.public}.DISCONNECT"
    asks = {"auth_users": [keys.gate], "allowed_accounts": [keys.plugins.public]}
    held = {
        "limits": _limits(),
        "signing_keys": list(keys.answers),
        "authorization": asks,
        "exports": [exports.stream(permissions.LIMITED)],
        "imports": [
            exports.imported(keys.system, exports.service(connections), to=permissions.CONNECTIONS),
            exports.imported(
                keys.system, exports.service(_DISCONNECT), to=f"{permissions.DISCONNECT}.$1"
            ),
            exports.imported(keys.system, exports.stream(closed), to=permissions.CLOSED),
        ],
    }
    return {"name": permissions.AUTH, "nats": _kind("account") | held}


def _plugins(keys: Keys) -> Claims:
    # a user's own limits are ignored if the gate has admitted it (server/auth_callout.go; 2.15)
    each = {
        "payload": permissions.PLUGIN_PAYLOAD_MAX,
        "subs": permissions.PLUGIN_SUBSCRIPTIONS_MAX,
    }
    held = {
        "limits": _limits() | each,
        "exports": [exports.service("muster.rpc.>")],
        "imports": [
            exports.imported(keys.muster, exports.service(subject))
            for subject in permissions.REPORTS
        ],
        "signing_keys": _signers(keys, [Role.NODE]),
    }
    return {"name": permissions.PLUGINS, "nats": _kind("account") | held}


def _labeler(keys: Keys) -> Claims:
    held = {
        "limits": _limits(),
        "imports": [
            exports.imported(keys.muster, exports.service(permissions.LABELS)),
            *exports.imported_requests(keys.muster, permissions.LABELER),
        ],
        "signing_keys": _signers(keys, [Role.LABELER]),
    }
    return {"name": permissions.LABELER, "nats": _kind("account") | held}


def _readers(keys: Keys) -> Claims:
    held = {
        "limits": _limits() | _READERS_LIMITS,
        "exports": [exports.service(permissions.HEARTBEATS)],
        "imports": exports.imported_requests(keys.muster, permissions.READERS),
        "signing_keys": _signers(keys, [Role.READER]),
    }
    return {"name": permissions.READERS, "nats": _kind("account") | held}


def _muster(keys: Keys) -> Claims:
    stored = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), _NO_LIMIT)
    imports = [
        exports.imported(
            keys.system,
            exports.stream(f"$SYS.ACCOUNT.{account.public}.{what}"),
            to=f"muster.nats.{what.lower()}",
        )
        for account in (keys.muster, keys.plugins)
        for what in _OF_CLIENTS
    ]
    imports += [
        exports.imported(
            keys.system,
            exports.stream(f"$SYS.SERVER.*.{what}"),
            to=f"muster.nats.{what.lower()}.$1",
        )
        for what in _OF_SERVERS
    ]
    imports += [
        exports.imported(keys.plugins, exports.service("muster.rpc.>")),
        exports.imported(keys.readers, exports.service(permissions.HEARTBEATS)),
        exports.imported(keys.auth, exports.stream(permissions.LIMITED)),
    ]
    held = {
        "limits": _limits() | stored,
        "exports": [
            *map(exports.service, (*permissions.REPORTS, permissions.LABELS)),
            *map(exports.request, permissions.imported_requests(permissions.READERS)),
        ],
        "imports": imports,
        "signing_keys": _signers(keys, [role for role in Role if owner(role) == "muster"]),
    }
    return {"name": permissions.ACCOUNT, "nats": _kind("account") | held}


def _signers(keys: Keys, roles: Collection[Role]) -> list[Claims]:
    return [
        {"kind": "user_scope", "key": key, "role": role, "template": _template(role)}
        for role in roles
        for key in keys.roles.get(role, ())
    ]


def _template(role: Role) -> Claims:
    claims = _rights(_grant(role))
    if role is Role.READER:
        claims |= _READERS_LIMITS
    return claims


def _rights(grant: permissions.Grant) -> Claims:
    claims = _unlimited() | {
        "pub": _allowed(grant.publish, grant.publish_denied),
        "sub": _allowed(grant.subscribe, grant.subscribe_denied),
        "allowed_connection_types": ["STANDARD"],
    }
    if grant.answers:
        claims["resp"] = {"max": 1, "ttl": permissions.ANSWER_S * 10**9}
    return claims


def _grant(role: Role) -> permissions.Grant:
    if role is Role.NODE:
        return permissions.each_plugin()
    if role is Role.READER:
        return permissions.each_reader()
    return {grant.user: grant for grant in permissions.central()}[role]


def _allowed(allowed: Collection[str], denied: Collection[str]) -> Claims:
    claims: Claims = {"allow": list(allowed)}
    return claims | {"deny": list(denied)} if denied else claims


def _new_user(random: Random) -> nkeys.Key:
    return nkeys.Key(nkeys.Kind.USER, random(nkeys.SECRET_BYTES))


def _kind(of: str) -> Claims:
    return {"type": of, "version": _VERSION}


def _unlimited() -> Claims:
    return {"subs": _NO_LIMIT, "data": _NO_LIMIT, "payload": _NO_LIMIT}


def _limits() -> Claims:
    counted = ("imports", "exports", "conn", "leaf")
    return _unlimited() | dict.fromkeys(counted, _NO_LIMIT) | {"wildcards": True}
