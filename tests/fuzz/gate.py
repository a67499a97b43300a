"""Fuzz targets for authentication: tokens, key sets, callout requests, keys and credentials."""

import asyncio
import json
import types
from collections.abc import Iterator
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec

from muster import vocabulary
from muster.nats.auth import accounts, nkeys
from muster_gate import callout, config, rate_limiter, tokens, traffic_monitor
from tests.fuzz.target import compact, split, target
from tests.worlds import token_issuer

_NOW: Final = 1_800_000_000.0
_KID: Final = "e1"
_CLAIMS: Final = tuple(
    f'"{name}":'
    for name in ("iss", "sub", "aud", "exp", "nbf", "iat", "kubernetes.io", "node", "pod")
)
_SERVER: Final = nkeys.Key(nkeys.Kind.SERVER, b"\x01" * 32)
_USER: Final = nkeys.Key(nkeys.Kind.USER, b"\x02" * 32)
_ACCOUNT: Final = nkeys.Key(nkeys.Kind.ACCOUNT, b"\x03" * 32)
_SIGNING: Final = callout.Signing(
    answer=_ACCOUNT, node=_ACCOUNT, auth=_ACCOUNT.public, plugins=_ACCOUNT.public
)


def _ring() -> tokens.Keyring:
    keys = tokens.public_keys(token_issuer.key_set(token_issuer.jwk(_KID, "ES256")))
    return tokens.Keyring(issuer=token_issuer.ISSUER, keys=keys, fetched_at=_NOW)


def _tokens() -> Iterator[bytes]:
    claims = token_issuer.claims("node-a", at=_NOW)
    yield b"signed\n" + compact(claims)
    yield b"signed\n" + compact(claims | {"aud": "muster-nats", "nbf": _NOW, "iat": 0})
    yield b"header\n" + compact({"alg": "ES256", "kid": _KID, "typ": "JWT", "crit": []})
    yield b"raw\n" + token_issuer.token(b"{}", _KID, "none").encode()
    yield b"raw\neyJhbGciOiJFUzI1NiIsImtpZCI6ImUxIn0.e30." + b"A" * 86


def _signed(body: bytes) -> str:
    return token_issuer.token(body, _KID, "ES256")


def _with_header(header: bytes) -> str:
    claims = nkeys.to_base64(compact(token_issuer.claims("node-a", at=_NOW)))
    return f"{nkeys.to_base64(header)}.{claims}.{nkeys.to_base64(bytes(64))}"


_FORMS: Final = {
    "signed": _signed,
    "header": _with_header,
    "raw": lambda text: text.decode("utf-8", "replace"),
}


@target(seeds=_tokens, words=(*_CLAIMS, '"alg":', '"none"', '"kid":', '"crit":', "muster-plugin"))
def service_account_tokens(data: bytes) -> None:
    """Check that a token is refused, or is signed and gives a node and a bounded lifetime."""
    form, rest = split(data, _FORMS)
    if form is None:
        return
    try:
        bearer = tokens.verify(
            form(rest), config.Tokens(), config.Keys(), ring=_ring_of_run(), at=_NOW
        )
    except tokens.Refused as refused:
        assert len(refused.subject) <= 256
        return
    assert form is _signed
    assert vocabulary.node_token(bearer.node.replace("_", ".")) == bearer.node
    assert 0 < bearer.lifetime_s <= config.Tokens().lifetime_max_s


_RINGS: Final[list[tokens.Keyring]] = []


def _ring_of_run() -> tokens.Keyring:
    if not _RINGS:
        _RINGS.append(_ring())
    return _RINGS[0]


def _key_sets() -> Iterator[bytes]:
    yield token_issuer.key_set(token_issuer.jwk("k1", "RS256"), token_issuer.jwk(_KID, "ES256"))
    point = ec.derive_private_key(7, ec.SECP256R1()).public_key().public_numbers()
    size = 32
    x, y = (nkeys.to_base64(number.to_bytes(size)) for number in (point.x, point.y))
    yield token_issuer.key_set({"kty": "EC", "crv": "P-256", "kid": "p", "x": x, "y": y})
    yield b'{"issuer":"https://kubernetes.default.svc","jwks_uri":"https://x/openid/v1/jwks"}'


@target(
    seeds=_key_sets,
    words=(
        '"keys":',
        '"kty":',
        '"RSA"',
        '"EC"',
        '"P-256"',
        '"n":',
        '"e":',
        '"x":',
        '"use":',
        "AQAB",
    ),
    long=lambda size: token_issuer.key_set(*[token_issuer.jwk(_KID, "ES256")] * size),
)
def key_sets(data: bytes) -> None:
    """Check that a key set is refused, or its keys reject a wrong signature without an error."""
    try:
        keys = tokens.public_keys(data)
    except tokens.BadKeys:
        keys = {}
    for listed in keys.values():
        for key in listed:
            assert key.algorithm in {"RS256", "ES256"}
            assert not key.is_signed(b"signed", b"\x01" * 64)
    try:
        assert tokens.discovered_issuer(data)
    except tokens.BadKeys:
        return


def _request(token: str, **changed: Any) -> bytes:
    return compact(
        {
            "aud": "nats-authorization-request",
            "sub": _ACCOUNT.public,
            "nats": {
                "server_id": {"name": "n", "host": "127.0.0.1", "id": _SERVER.public},
                "user_nkey": _USER.public,
                "client_info": {"host": "10.0.0.7", "id": 11, "name": "p node-a", "kind": "Client"},
                "connect_opts": {"auth_token": token, "name": "p node-a", "protocol": 1},
                **changed,
            },
        }
    )


def _requests() -> Iterator[bytes]:
    yield b"signed\n" + _request(
        token_issuer.token(token_issuer.claims("node-a", at=_NOW), _KID, "ES256")
    )
    yield b"signed\n" + _request("")
    yield b"signed\n" + _request("x", user_nkey="U")
    yield b"raw\n" + nkeys.encode_jwt({"aud": "x"}, _SERVER, at=_NOW).encode()


def _from_server(body: bytes) -> bytes:
    try:
        claims = json.loads(body)
    except (ValueError, RecursionError):
        return b""
    if not isinstance(claims, dict):
        return b""
    return nkeys.encode_jwt(claims, _SERVER, at=_NOW).encode()


@target(
    seeds=_requests, words=(*_CLAIMS, '"nats":', '"server_id":', '"connect_opts":', '"auth_token":')
)
def callout_requests(data: bytes) -> None:
    """Check that a request to connect gets no answer, or one of bounded size."""
    form, rest = split(data, {"signed": _from_server, "raw": bytes})
    if form is None:
        return
    authorizer = callout.Authorizer(config.Settings(), _SIGNING)
    authorizer.ring = _ring_of_run()
    decision = authorizer.decide(form(rest), at=_NOW, now=0.0)
    assert isinstance(decision, callout.Admitted | callout.Denied)
    if decision.answer:
        assert b"." in decision.answer
        assert len(decision.answer) <= 64 * 1024


def _credentials() -> Iterator[bytes]:
    user = nkeys.encode_jwt(
        accounts.user(accounts.Role.NODE, _USER.public, name="plugin_a", account=_ACCOUNT.public),
        _ACCOUNT,
        at=_NOW,
    )
    creds = nkeys.write_creds(user, _USER)
    yield creds.encode()
    yield creds.replace("\n", "\r\n").encode()
    yield _USER.seed.encode()
    yield _USER.public.encode()
    yield compact(
        {
            "auth": _ACCOUNT.public,
            "plugins": _ACCOUNT.public,
            "answer_seed": _ACCOUNT.seed,
            "node_seed": _ACCOUNT.seed,
        }
    )


@target(
    seeds=_credentials,
    words=("-----BEGIN NATS USER JWT-----", "------END NATS USER JWT------", "\\x0d\\x0a", ".e30."),
)
def credentials(data: bytes) -> None:
    """Check that keys and credentials are refused with a short message, or survive a round trip."""
    text = data.decode("utf-8", "replace")
    try:
        read = nkeys.read_creds(text)
    except nkeys.BadCredentials as refused:
        assert len(str(refused)) < 200
    else:
        again = nkeys.read_creds(
            nkeys.write_creds(read.jwt, nkeys.Key.from_seed(read.seed, nkeys.Kind.USER))
        )
        assert again == read
        assert read.sign("nonce")
    for kind in nkeys.Kind:
        try:
            key = nkeys.Key.from_seed(text, kind)
        except nkeys.BadKey:
            continue
        assert key.seed == text.strip()
    for kind in nkeys.Kind:
        try:
            assert nkeys.check(text, kind) == text
        except nkeys.BadKey:
            continue
    try:
        callout.read_signing(data)
    except ValueError as refused:
        assert len(str(refused)) < 200


def _reports() -> Iterator[bytes]:
    at = {"start": "2026-01-02T00:00:00Z", "stop": "2026-01-02T00:00:05Z"}
    connections = [
        {"cid": number, "start": at["start"], "in_msgs": 10**6, "authorized_user": "plugin_node-a"}
        for number in range(3)
    ]
    traffic = {"server_id": "N", "now": "2026-01-02T00:01:00Z", "connections": connections}
    yield b"read\n" + compact({"data": traffic})
    client = {"id": 7, "user": "U", "tags": ["node:node-a"], **at}
    sent = {"msgs": 10**6, "bytes": 10**9}
    yield b"closed\n" + compact({"server": {"id": "N"}, "client": client, "sent": sent})
    yield b"penalties\n" + compact([{"node": "node-a", "rest_s": 9.0}])


@target(
    seeds=_reports,
    words=('"cid":', '"in_msgs":', '"tags":', '"node:', '"rest_s":'),
)
def traffic_reports(data: bytes) -> None:
    """Check that reports of servers and other gates are ignored, or lead to bounded penalties."""
    rates = config.Rates()
    watch = rate_limiter.RateLimiter(rates)
    monitor = traffic_monitor.TrafficMonitor(watch, rates)
    handlers = {
        "read": monitor._read,
        "closed": monitor._read_closed,
        "penalties": monitor._adopt_penalties,
    }

    async def replay() -> None:
        for part in data.split(b"\n\n")[:4]:
            handler, body = split(part, handlers)
            if handler is not None:
                await handler(types.SimpleNamespace(data=body))
        for penalty in watch.penalties(asyncio.get_running_loop().time()):
            assert 0 < penalty.rest_s <= rates.refuse_s + 1

    asyncio.run(replay())
