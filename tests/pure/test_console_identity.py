"""Who may act in the console: sessions, forms, trusted headers, local users and ID tokens."""

from typing import Any

import jwt
import msgspec
import pytest

from muster_console import config, id_token, identities, rendering, sessions
from tests.worlds import token_issuer

AT = 1_800_000_000.0
KEY = b"k" * 32
SESSION = sessions.Session(id="0123456789abcdef", name="ann", ends_at=AT + 60)
ISSUER = "https://login.example.com"
RULE = config.Oidc(issuer=ISSUER, client_id="muster", emails=("*@example.com",), groups=("sre",))


def test_a_session_is_valid_until_it_ends_and_only_with_the_key_that_sealed_it() -> None:
    sealed = sessions.seal(SESSION, KEY)
    assert sessions.unseal(sealed, sessions.Session, KEY, at=AT) == SESSION
    assert sessions.unseal(sealed, sessions.Session, KEY, at=AT + 60) is None
    assert sessions.unseal(sealed, sessions.Session, b"x" * 32, at=AT) is None
    assert sessions.unseal(sealed, sessions.SignIn, KEY, at=AT) is None


def test_a_session_that_was_signed_out_stays_ended_also_when_there_are_too_many() -> None:
    ended = sessions.SignedOut(limit=2)
    a, b, c, d = (
        sessions.Session(id=f"{number:016x}", ends_at=AT + number) for number in range(1, 5)
    )
    for session in (c, b, b):
        ended.add(session)
    assert [session in ended for session in (a, b, c, d)] == [False, True, True, False]
    # above the limit, the sessions that expire first all count as signed out
    ended.add(d)
    assert [session in ended for session in (a, b, c, d)] == [True] * 4
    assert msgspec.structs.replace(a, ends_at=AT + 2.5) not in ended


@pytest.mark.parametrize("change", ["", ".", "a.b", "\N{SNOWMAN}.x", "x" * 5_000])
def test_what_nobody_sealed_is_no_session(change: str) -> None:
    assert sessions.unseal(change, sessions.Session, KEY, at=AT) is None


def test_every_changed_character_of_a_session_invalidates_it() -> None:
    sealed = sessions.seal(SESSION, KEY)
    for index, character in enumerate(sealed[:-1]):
        changed = "B" if character == "A" else "A"
        forged = sealed[:index] + changed + sealed[index + 1 :]
        assert sessions.unseal(forged, sessions.Session, KEY, at=AT) is None


def test_the_token_of_a_form_is_that_of_the_session_and_the_person() -> None:
    token = sessions.form_token(SESSION, "ann", KEY)
    other = msgspec.structs.replace(SESSION, id="fedcba9876543210")
    assert sessions.is_token(token, SESSION, "ann", KEY)
    assert not sessions.is_token(token, SESSION, "bob", KEY)
    assert not sessions.is_token(token, other, "ann", KEY)
    assert not sessions.is_token("", SESSION, "ann", KEY)


@pytest.mark.parametrize(
    ("headers", "is_ours"),
    [
        ({"origin": "https://muster.example.com"}, True),
        ({"origin": "https://Muster.example.com", "sec-fetch-site": "same-origin"}, True),
        ({}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://evil.example.com"}, False),
        ({"origin": "http://muster.example.com"}, False),
        ({"origin": "https://muster.example.com:8443"}, False),
        ({"origin": "https://muster.example.com", "sec-fetch-site": "same-site"}, False),
    ],
)
def test_a_form_must_come_from_our_own_origin(headers: dict[str, str], is_ours: bool) -> None:  # noqa: FBT001
    assert (sessions.foreign(headers, "https://muster.example.com") == "") is is_ours


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://muster.example.com", "https://muster.example.com"),
        ("https://Muster.example.com:443/fleet", "https://muster.example.com"),
        ("https://muster.example.com:8443/", "https://muster.example.com:8443"),
        ("https://muster.example.com:/", "https://muster.example.com"),
        ("http://localhost:80/", "http://localhost"),
        ("http://localhost:443/", "http://localhost:443"),
        ("https://[2001:DB8::1]:443/", "https://[2001:db8::1]"),
    ],
)
def test_the_origin_of_an_address_has_no_default_port(url: str, origin: str) -> None:
    assert config.origin(url) == origin
    assert sessions.foreign({"origin": origin}, config.origin(url)) == ""


@pytest.mark.parametrize(
    "url",
    [
        *("", "muster.example.com", "ftp://a.example", "https://", "https://a.example:port/"),
        *("https://a.example:99999", "https://[::1", "https://ann@a.example", "https://a example"),
        *("https://a\n.example", "https://a\\b.example", "https://a.example\N{SNOWMAN}"),
    ],
)
def test_what_is_no_address_of_a_page_is_refused(url: str) -> None:
    tree = {"url": url, "header": {"from": ["::1"]}}
    with pytest.raises(msgspec.ValidationError, match="url: must be the console's address"):
        msgspec.convert(tree, config.Writing)


HEADER = msgspec.convert(
    {"name": "X-Forwarded-User", "from": ["10.0.0.0/8", "::1"]}, config.TrustedHeader
)


def test_a_header_names_a_person_only_if_the_proxy_sends_it() -> None:
    named = [("x-forwarded-user", " ann@example.com\u202e ")]
    ann = identities.Identity("ann@example.com\ufffd", identities.Kind.HEADER)
    assert identities.by_header(named, "10.1.2.3", HEADER) == ann
    assert identities.by_header(named, "::ffff:10.1.2.3", HEADER) == ann
    for headers, peer in (
        (named, "192.0.2.1"),
        (named, "not an address"),
        ([], "10.1.2.3"),
        ([("x-forwarded-user", "")], "10.1.2.3"),
    ):
        with pytest.raises(identities.Unknown):
            identities.by_header(headers, peer, HEADER)


@pytest.mark.parametrize(
    "values",
    [("root", "ann"), ("root, ann",), ("root,ann",), ("ann,",), ("", "ann"), ("ann", "ann")],
)
def test_a_header_with_several_values_names_nobody(values: tuple[str, ...]) -> None:
    # if the proxy appends to the header, the first value is from the client
    headers = [("X-Forwarded-User", value) for value in values]
    with pytest.raises(identities.Unknown) as refused:
        identities.by_header(headers, "10.1.2.3", HEADER)
    assert str(refused.value) == (
        "X-Forwarded-User has several values: the proxy must replace this header, not append to it"
    )


TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:21B6 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 411 1
   1: 0100007F:9C40 0100007F:21B6 01 00000000:00000000 00:00000000 00000000  1001        0 412 1
   2: 0100007F:9C41 0100007F:21B6 06 00000000:00000000 03:000008B3 00000000     0        0 0 3
   3: garbage
"""
TABLE_6 = """\
  sl  local_address remote_address st
   0: 0000000000000000FFFF00000100007F:9C42 0000000000000000FFFF00000100007F:21B6 01 0 0 0 1002
"""


@pytest.mark.parametrize(
    ("table", "port", "owner"),
    [(TABLE, 40_000, 1001), (TABLE, 40_001, None), (TABLE, 8630, None), (TABLE_6, 40_002, 1002)],
)
def test_the_owner_of_a_connection_is_that_of_the_clients_end(
    table: str, port: int, owner: int | None
) -> None:
    client, server = identities.Place("127.0.0.1", port), identities.Place("127.0.0.1", 8630)
    assert identities.socket_owner(table, client, server) == owner


def keys(*names: str) -> jwt.PyJWKSet:
    return jwt.PyJWKSet.from_dict({"keys": [token_issuer.jwk(name, "RS256") for name in names]})


def claims(**changed: Any) -> dict[str, Any]:
    whole = {
        "iss": ISSUER,
        "sub": "u1",
        "aud": "muster",
        "exp": AT + 300,
        "iat": AT,
        "nonce": "n1",
        "email": "Ann@example.com",
        "email_verified": True,
        **changed,
    }
    return {name: value for name, value in whole.items() if value is not None}


def verify(said: dict[str, Any], key: str = "k1", nonce: str = "n1", **header: Any) -> str:
    token = token_issuer.token(said, key, **header)
    return id_token.verify(token, keys("k1"), RULE, nonce=nonce, at=AT).name


def test_a_token_names_a_person_by_a_verified_address_or_by_the_group() -> None:
    assert verify(claims()) == "Ann@example.com"
    assert verify(claims(aud=["muster", "other"], azp="muster")) == "Ann@example.com"
    assert verify(claims(email=None, groups=["sre"])) == "u1"
    assert verify(claims(exp=AT - 59)) == "Ann@example.com"


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://login.example.com.evil"},
        {"aud": "other"},
        {"aud": ["muster", "other"]},
        {"azp": "other"},
        {"exp": AT - 61},
        {"exp": None},
        {"iat": AT + 61},
        {"nbf": AT + 61},
        {"nonce": "n2"},
        {"nonce": None},
        {"sub": ""},
        {"email_verified": False},
        {"email": "ann@example.org"},
        {"email": None, "groups": ["dev"]},
        {"email": None, "groups": "sre"},
    ],
)
def test_a_token_for_another_purpose_names_nobody(changed: dict[str, Any]) -> None:
    with pytest.raises(identities.Unknown):
        verify(claims(**changed))


def test_a_token_that_the_issuer_did_not_sign_names_nobody() -> None:
    for header in ({"alg": "none"}, {"alg": "HS256"}, {"alg": "ES256"}, {"kid": "k2"}):
        with pytest.raises(identities.Unknown):
            verify(claims(), **header)
    with pytest.raises(identities.Unknown):
        verify(claims(), key="k2", kid="k1")
    with pytest.raises(identities.Unknown):
        verify(claims(), nonce="")
    for text in ("", "a.b.c", "x" * 20_000):
        with pytest.raises(identities.Unknown):
            id_token.verify(text, keys("k1"), RULE, nonce="n1", at=AT)


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"writing": {"local": True}, "http": {"host": "192.0.2.1"}}, "writing.local"),
        ({"writing": {"header": {"from": ["10.0.0.0/8"]}}}, "url:"),
        ({"writing": {"url": "http://muster.example.com", "header": {"from": ["::1"]}}}, "https"),
        ({"writing": {"header": {"from": ["proxy"]}}}, "from:"),
        (
            {"writing": {"oidc": {"issuer": ISSUER, "client_id": "x"}}},
            "list the people who may act",
        ),
        (
            {"writing": {"oidc": {"issuer": "http://x", "client_id": "x", "groups": ["a"]}}},
            "issuer: must begin with https",
        ),
        (
            {"writing": {"local": True, "header": {"from": ["::1"]}}},
            "set only one of them",
        ),
    ],
)
def test_settings_in_which_somebody_else_could_act_are_refused(
    tree: dict[str, Any], problem: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=problem):
        msgspec.convert(tree, config.Settings)


def test_nobody_may_act_unless_an_identity_is_configured() -> None:
    assert not config.Settings().writing.is_on


def test_every_way_of_knowing_a_person_has_words() -> None:
    assert set(rendering.IDENTITY_KINDS) == set(map(str, identities.Kind))
