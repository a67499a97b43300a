"""Requests of nats-server to the gate, with keys that are the same in every test."""

from typing import Any, Final

from muster.nats.auth import nkeys
from muster_gate import callout, tokens
from tests.worlds import token_issuer

NOW: Final = 1_800_000_000.0
RING: Final = tokens.Keyring(
    issuer=token_issuer.ISSUER,
    keys=tokens.public_keys(token_issuer.key_set(token_issuer.jwk("e1", "ES256"))),
    fetched_at=NOW,
)


def key(kind: nkeys.Kind, number: int) -> nkeys.Key:
    return nkeys.Key(kind, bytes([number]) * 32)


SERVER, USER = key(nkeys.Kind.SERVER, 1), key(nkeys.Kind.USER, 2)
AUTH, PLUGINS = key(nkeys.Kind.ACCOUNT, 3), key(nkeys.Kind.ACCOUNT, 4)
SIGNING = callout.Signing(
    answer=key(nkeys.Kind.ACCOUNT, 5),
    node=key(nkeys.Kind.ACCOUNT, 6),
    auth=AUTH.public,
    plugins=PLUGINS.public,
)


def request(token: str, name: str = "device-plugin node-a", **changed: Any) -> bytes:
    """Return an authorization request of nats-server 2.15.1, shortened."""
    server = {"name": "n", "host": "127.0.0.1", "id": SERVER.public, "version": "2.15.1"}
    request = {
        "server_id": server,
        "user_nkey": USER.public,
        "client_info": {"host": "10.0.0.7", "id": 11, "name": name, "kind": "Client"},
        "connect_opts": {"jwt": "eyJ", "auth_token": token, "name": name, "protocol": 1},
        "type": "authorization_request",
        "version": 2,
        **changed,
    }
    claims = {"aud": "nats-authorization-request", "sub": AUTH.public, "nats": request}
    return nkeys.encode_jwt(claims, SERVER, at=NOW).encode()


def token(node: str) -> str:
    """Return the token of a plugin's pod on a node."""
    return token_issuer.token(token_issuer.claims(node, at=NOW), "e1", "ES256")
