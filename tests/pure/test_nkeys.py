"""Keys, tokens and credentials of NATS: written as NATS' own tools write them, read strictly."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.nats.auth import accounts, nkeys, permissions

KINDS = st.sampled_from(list(nkeys.Kind))
SECRETS = st.binary(min_size=32, max_size=32)
ONE = nkeys.Key(nkeys.Kind.ACCOUNT, bytes(range(32)))
USER = nkeys.Key(nkeys.Kind.USER, bytes(range(32)))


def test_keys_are_spelled_as_nats_spells_them() -> None:
    # nats-server 2.15.1 accepted these
    assert (USER.public, USER.seed) == (
        "UAB2CB576PHBBPQ5ODORRZ2LYCMWPZGWGCN2KDK7DXOIMZASKUY3RLKK",
        "SUAAAAICAMCAKBQHBAEQUCYMBUHA6EARCIJRIFIWC4MBSGQ3DQOR4H776Y",
    )
    assert (ONE.public[0], ONE.seed[:2]) == ("A", "SA")
    other = [nkeys.Key(kind, bytes(32)) for kind in nkeys.Kind]
    assert {key.public[0] + key.seed[:2] for key in other} == {"ASA", "NSN", "OSO", "USU"}


@given(KINDS, SECRETS, st.binary(max_size=50))
def test_a_seed_is_the_whole_key(kind: nkeys.Kind, secret: bytes, message: bytes) -> None:
    key = nkeys.Key(kind, secret)
    again = nkeys.Key.from_seed(f"{key.seed}\n", kind)
    assert again.public == key.public
    assert nkeys.is_signed(key.public, kind, message, again.sign(message))
    assert not nkeys.is_signed(key.public, kind, message + b"x", again.sign(message))


@given(KINDS, SECRETS, st.integers(0, 57), st.characters(codec="ascii"))
def test_a_misspelled_key_is_refused(
    kind: nkeys.Kind, secret: bytes, place: int, letter: str
) -> None:
    key = nkeys.Key(kind, secret)
    for text, read in ((key.public, nkeys.check), (key.seed, nkeys.Key.from_seed)):
        at = place % len(text)
        wrong = text[:at] + letter + text[at + 1 :]
        if wrong.strip() != text:
            with pytest.raises(nkeys.BadKey) as error:
                read(wrong, kind)
            assert text not in str(error.value)


def test_a_key_of_another_kind_is_refused() -> None:
    with pytest.raises(nkeys.BadKey):
        nkeys.Key.from_seed(USER.seed, nkeys.Kind.ACCOUNT)
    with pytest.raises(nkeys.BadKey):
        nkeys.check(USER.public, nkeys.Kind.ACCOUNT)
    assert not nkeys.is_signed(USER.public, nkeys.Kind.ACCOUNT, b"m", USER.sign(b"m"))


class Claims(msgspec.Struct):
    sub: str
    nats: dict[str, Any]
    iat: int


TEXT = nkeys.encode_jwt({"sub": "x", "nats": {"type": "user"}}, ONE, at=9.5)


def test_a_signed_token_is_decoded() -> None:
    decoded = nkeys.decode_jwt(TEXT, Claims, nkeys.Kind.ACCOUNT)
    assert decoded == Claims(sub="x", nats={"type": "user"}, iat=9)


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_no_letter_of_a_token_can_be_another(place: int, letter: str) -> None:
    wrong = TEXT[:place] + letter + TEXT[place + 1 :]
    if wrong != TEXT:
        with pytest.raises(nkeys.BadToken):
            nkeys.decode_jwt(wrong, Claims, nkeys.Kind.ACCOUNT)


def test_other_algorithms_and_other_kinds_of_signer_are_refused() -> None:
    with pytest.raises(nkeys.BadToken):
        nkeys.decode_jwt(TEXT, Claims, nkeys.Kind.SERVER)
    claims = TEXT.split(".")[1]
    for head in ({"typ": "JWT", "alg": "none"}, {"typ": "JWT", "alg": "ed25519"}, {}):
        signed = f"{nkeys.to_base64(json.dumps(head).encode())}.{claims}"
        mark = nkeys.to_base64(ONE.sign(signed.encode()))
        with pytest.raises(nkeys.BadToken):
            nkeys.decode_jwt(f"{signed}.{mark}", Claims, nkeys.Kind.ACCOUNT)


def test_credentials_are_read_as_written_and_with_text_around() -> None:
    claims = {"sub": USER.public, "name": "reader_x", "nats": {"issuer_account": "A"}}
    jwt = nkeys.encode_jwt(claims, ONE, at=1)
    text = nkeys.write_creds(jwt, USER)
    decoded = nkeys.read_creds(f"# mine\n{text.replace(chr(10), chr(13) + chr(10))}\nimport x\n")
    assert decoded == nkeys.Credentials(jwt=jwt, seed=USER.seed, name="reader_x", account="A")
    mark = nkeys.from_base64(decoded.sign("nonce").decode())
    assert nkeys.is_signed(USER.public, nkeys.Kind.USER, b"nonce", mark)


def test_credentials_that_cannot_be_used_are_refused_without_repeating_them() -> None:
    other = nkeys.Key(nkeys.Kind.USER, bytes(32))
    jwt = nkeys.encode_jwt({"sub": USER.public}, ONE, at=1)
    whole = nkeys.write_creds(jwt, USER)
    wrong = ("", whole[:-60], whole.replace(jwt, "x"), nkeys.write_creds(jwt, other))
    for text in wrong:
        with pytest.raises(nkeys.BadCredentials, match=r"^no valid credentials") as error:
            nkeys.read_creds(text)
        assert USER.seed not in str(error.value)
        assert jwt not in str(error.value)


class Account(msgspec.Struct):
    sub: str
    nats: dict[str, Any]


def test_each_role_has_its_scope_and_an_old_key_only_during_a_rotation() -> None:
    keys = {role: [f"A{role}1", f"A{role}2"] for role in accounts.Role}
    six = [nkeys.Key(nkeys.Kind.ACCOUNT, bytes([number]) * 32) for number in range(6)]
    held = accounts.Keys(
        operator=nkeys.Key(nkeys.Kind.OPERATOR, bytes(32)),
        system=six[0],
        auth=six[1],
        muster=six[2],
        plugins=six[3],
        readers=six[4],
        labelers=six[5],
        gate=USER.public,
        answers=["AX"],
        roles=keys,
    )
    text = accounts.configuration(held, USER.public, at=1)
    decoded = [
        nkeys.decode_jwt(line.split()[1], Account, nkeys.Kind.OPERATOR)
        for line in text.splitlines()
        if line.startswith("  A")
    ]
    assert not any(key.seed in text for key in six)
    *_, plugins, readers, labelers, muster = (
        account.nats.get("signing_keys", []) for account in decoded
    )
    assert {s["role"] for s in plugins} == {"node"}
    assert {s["role"] for s in readers} == {"reader"}
    assert {s["role"] for s in labelers} == {"labeler"}
    signers = plugins + readers + muster + labelers
    assert sorted((s["role"], s["key"]) for s in signers) == sorted(
        (role.value, key) for role in accounts.Role for key in keys[role]
    )
    by_role = {s["role"]: s["template"] for s in signers}
    for role in accounts.CENTRAL:
        (grant,) = [g for g in permissions.central() if g.user == role]
        assert by_role[role]["pub"]["allow"] == list(grant.publish)
        assert by_role[role]["pub"].get("deny", []) == list(grant.publish_denied)
        assert by_role[role]["sub"]["allow"] == list(grant.subscribe)
        assert by_role[role]["sub"].get("deny", []) == list(grant.subscribe_denied)
