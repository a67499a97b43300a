"""The gate: which tokens it accepts, for which node and for how long; it refuses all others."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster.nats.auth import accounts, nkeys, permissions
from muster_gate import callout, config, tokens
from muster_gate.tokens import Reason, Refused
from tests.worlds import token_issuer
from tests.worlds.gate_requests import AUTH, PLUGINS, SERVER, SIGNING, USER, key, request

NOW = 1_800_000_000.0
RULES = config.Tokens()
KEYS = config.Keys()
SET = token_issuer.key_set(token_issuer.jwk("k1", "RS256"), token_issuer.jwk("e1", "ES256"))
PUBLIC = tokens.public_keys(SET)


def keyring_at(at: float) -> tokens.Keyring:
    """Return a keyring whose keys were fetched at this time."""
    return tokens.Keyring(issuer=token_issuer.ISSUER, keys=PUBLIC, fetched_at=at)


def decided(token: str, *, at: float = NOW, ring: tokens.Keyring | None = None) -> object:
    """Return the bearer of a token, or why it is refused; by default, the keys are up to date."""
    ring = ring or keyring_at(at)
    try:
        return tokens.verify(token, RULES, KEYS, ring=ring, at=at)
    except Refused as refusal:
        return refusal.reason


def claims(node: str = "node-a", **changed: Any) -> token_issuer.Claims:
    return token_issuer.claims(node, at=NOW, **changed)


def bound(**changed: Any) -> token_issuer.Claims:
    """Return claims with these changes in `kubernetes.io`."""
    whole = claims()
    return whole | {"kubernetes.io": whole["kubernetes.io"] | changed}


@pytest.mark.parametrize(("key", "algorithm"), [("k1", "RS256"), ("e1", "ES256")])
def test_a_valid_token_stands_for_its_pods_node_as_long_as_it_is_valid(
    key: str, algorithm: str
) -> None:
    token = token_issuer.token(claims("ip-10-0-0-1.eu.internal"), key, algorithm)
    assert decided(token, at=NOW + 600) == tokens.Bearer(
        account="muster-plugin",
        node="ip-10-0-0-1_eu_internal",
        pod="muster-plugin-x7x2p",
        lifetime_s=3000,
    )


def test_clocks_may_differ_by_the_leeway_and_no_more() -> None:
    token = token_issuer.token(claims())
    assert isinstance(decided(token, at=NOW - 30), tokens.Bearer)
    assert decided(token, at=NOW - 31) == Reason.NOT_YET
    late = decided(token, at=NOW + 3629)
    assert isinstance(late, tokens.Bearer)
    assert late.lifetime_s == 1
    assert decided(token, at=NOW + 3630) == Reason.EXPIRED


PEM = (
    token_issuer.rsa_key("k1")
    .public_key()
    .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
)


def deep(start: bytes) -> str:
    """Return an unsigned token whose header is nested too deeply to be parsed."""
    return f"{nkeys.to_base64(start + b'[' * 2300)}.e30.e30"


def tampered() -> str:
    """Return a token whose claims name another node than the signed claims."""
    head, _, mark = token_issuer.token(claims()).split(".")
    return f"{head}.{nkeys.to_base64(json.dumps(claims('node-b')).encode())}.{mark}"


WRONG: dict[str, tuple[str, Reason]] = {
    "nothing": ("", Reason.NO_TOKEN),
    "no token at all": ("password", Reason.MALFORMED),
    "four parts": (token_issuer.token(claims()) + ".x", Reason.MALFORMED),
    "too long": ("x" * 5000, Reason.MALFORMED),
    "padding": (token_issuer.token(claims()) + "==", Reason.MALFORMED),
    "alg none": (token_issuer.token(claims(), algorithm="none"), Reason.ALGORITHM),
    "alg None": (token_issuer.token(claims(), algorithm="None"), Reason.ALGORITHM),
    "public key as secret": (token_issuer.by_secret(claims(), PEM), Reason.ALGORITHM),
    "HS256 said to be RS256": (
        token_issuer.token(claims(), algorithm="HS256", alg="RS256"),
        Reason.SIGNATURE,
    ),
    "RSA key, ES256": (token_issuer.token(claims(), "k1", "ES256"), Reason.ALGORITHM),
    "curve key, RS256": (token_issuer.token(claims(), "e1", "RS256"), Reason.ALGORITHM),
    "curve, empty signature": (
        token_issuer.token(claims(), "e1", "none", alg="ES256"),
        Reason.SIGNATURE,
    ),
    "critical extension": (token_issuer.token(claims(), crit=["b64"]), Reason.MALFORMED),
    "key in the header": (
        token_issuer.token(claims(), "k2", jwk=token_issuer.jwk("k2", "RS256")),
        Reason.UNKNOWN_KEY,
    ),
    "no key id": (token_issuer.token(claims(), kid=""), Reason.UNKNOWN_KEY),
    "another cluster's key": (token_issuer.token(claims(), "k2", kid="k1"), Reason.SIGNATURE),
    "another cluster": (token_issuer.token(claims(), "k2"), Reason.UNKNOWN_KEY),
    "tampered": (tampered(), Reason.SIGNATURE),
    "issuer": (token_issuer.token(claims(iss="https://elsewhere")), Reason.ISSUER),
    "for the API server": (token_issuer.token(claims(aud=[token_issuer.ISSUER])), Reason.AUDIENCE),
    "audience alike": (token_issuer.token(claims(aud="muster-nats2")), Reason.AUDIENCE),
    "expired": (token_issuer.token(claims(lasts_s=-3600)), Reason.EXPIRED),
    "no expiry": (token_issuer.token(claims(exp=None)), Reason.MALFORMED),
    "expiry as text": (token_issuer.token(claims(exp="2099")), Reason.MALFORMED),
    "expiry beyond time": (token_issuer.token(claims(exp=1e300)), Reason.MALFORMED),
    "not yet": (token_issuer.token(claims(nbf=NOW + 60)), Reason.NOT_YET),
    "from the future": (token_issuer.token(claims(iat=NOW + 60)), Reason.NOT_YET),
    "subject": (
        token_issuer.token(claims(sub="system:serviceaccount:muster:other")),
        Reason.ACCOUNT,
    ),
    "account": (
        token_issuer.token(bound(serviceaccount={"name": "muster-health", "uid": "u"})),
        Reason.ACCOUNT,
    ),
    "namespace": (token_issuer.token(bound(namespace="default")), Reason.ACCOUNT),
    "no claims of Kubernetes": (
        token_issuer.token(claims() | {"kubernetes.io": {}}),
        Reason.ACCOUNT,
    ),
    "no pod": (token_issuer.token(bound(pod={})), Reason.NO_NODE),
    "no node": (token_issuer.token(bound(node={})), Reason.NO_NODE),
    "all nodes": (token_issuer.token(bound(node={"name": "*"})), Reason.NO_NODE),
    "the fleet": (token_issuer.token(bound(node={"name": "_fleet"})), Reason.NO_NODE),
    "a template": (token_issuer.token(bound(node={"name": "{{name()}}"})), Reason.NO_NODE),
    "header without end": (deep(b'{"alg":"RS256","x":'), Reason.MALFORMED),
    "header that is a list": (deep(b""), Reason.MALFORMED),
    "claims without end": (token_issuer.token(b"[" * 2000), Reason.MALFORMED),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_token_is_refused_for_the_right_reason(which: str) -> None:
    token, reason = WRONG[which]
    assert decided(token) == reason


@given(st.text(max_size=60), st.integers(0, 2), st.sampled_from([None, 1]))
def test_anything_in_place_of_a_token_gets_an_answer(text: str, part: int, whole: object) -> None:
    parts = token_issuer.token(claims(), "e1", "ES256").split(".")
    if whole is None:
        parts[part] = text
    assert isinstance(decided(text if whole else ".".join(parts)), Reason)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    ),
    st.sampled_from(sorted(claims())),
)
def test_whatever_a_signed_token_claims_gets_an_answer(value: object, claim: str) -> None:
    outcome = decided(token_issuer.token(claims() | {claim: value}, "e1", "ES256"))
    assert isinstance(outcome, (tokens.Bearer, Reason))


def test_of_two_keys_with_one_id_either_may_have_signed() -> None:
    other = token_issuer.jwk("k2", "RS256") | {"kid": "k1"}
    for both in (
        (token_issuer.jwk("k1", "RS256"), other),
        (other, token_issuer.jwk("k1", "RS256")),
    ):
        keys = tokens.public_keys(token_issuer.key_set(*both))
        ring = tokens.Keyring(issuer=token_issuer.ISSUER, keys=keys, fetched_at=NOW)
        assert isinstance(decided(token_issuer.token(claims()), ring=ring), tokens.Bearer)
        by_other = token_issuer.token(claims(), "k2", kid="k1")
        assert isinstance(decided(by_other, ring=ring), tokens.Bearer)


def test_while_the_api_server_is_unavailable_an_admitted_plugin_is_admitted_again() -> None:
    token = token_issuer.token(claims(lasts_s=720))
    assert decided(token, at=NOW + 800) == Reason.EXPIRED
    # the keys were fetched 800 s ago, when the token was valid for 720 s more
    outcome = decided(token, at=NOW + 800, ring=keyring_at(NOW))
    assert isinstance(outcome, tokens.Bearer)
    assert outcome.lifetime_s == 720
    assert decided(token, at=NOW + 800, ring=keyring_at(NOW + 790)) == Reason.EXPIRED
    # the API server may issue tokens though the gate cannot reach it
    new = token_issuer.token(token_issuer.claims("node-a", at=NOW + 800))
    assert isinstance(decided(new, at=NOW + 800, ring=keyring_at(NOW)), tokens.Bearer)
    old = KEYS.age_max_s + 1
    assert decided(token, at=NOW + old, ring=keyring_at(NOW)) == Reason.NO_KEYS


def test_a_key_set_is_read_without_what_is_no_use_and_refused_if_nothing_is() -> None:
    small = token_issuer.rsa_key("small", 1024).public_key().public_numbers()
    curve = token_issuer.jwk("e1", "ES256")
    useless: list[Any] = [
        {"kty": "oct", "kid": "s", "k": "c2VjcmV0"},
        {"kty": "OKP", "kid": "o", "crv": "Ed25519", "x": "AA"},
        {"kty": "EC", "kid": "p", "crv": "P-256", "x": "AA", "y": "AA"},
        token_issuer.jwk("k1", "RS256") | {"kid": "x", "use": "enc"},
        token_issuer.jwk("k1", "RS256") | {"kid": "y", "alg": "RS512"},
        token_issuer.jwk("k1", "RS256") | {"kid": ""},
        curve | {"kid": None},
        curve | {"kid": 7},
        curve | {"use": None},
        "key",
        {"kty": "RSA", "kid": "t", "e": "AQAB", "n": nkeys.to_base64(small.n.to_bytes(128))},
    ]
    assert set(
        tokens.public_keys(token_issuer.key_set(*useless, token_issuer.jwk("k1", "RS256")))
    ) == {"k1"}
    two = tokens.public_keys(
        token_issuer.key_set(token_issuer.jwk("k1", "RS256"), curve | {"kid": "k1"})
    )
    assert [key.algorithm for key in two["k1"]] == ["RS256", "ES256"]
    endless = b'{"keys":[],"x":' + b"[" * 3000
    for nothing in (
        token_issuer.key_set(*useless),
        token_issuer.key_set(),
        b"[]",
        b"\xff",
        b"",
        endless,
    ):
        with pytest.raises(tokens.BadKeys):
            tokens.public_keys(nothing)
    assert tokens.discovered_issuer(b'{"issuer":"i","jwks_uri":"x"}') == "i"
    with pytest.raises(tokens.BadKeys):
        tokens.discovered_issuer(b"{}")


def authorizer_with(**pace_: Any) -> callout.Authorizer:
    made = callout.Authorizer(config.Settings(pace=config.Pace(**pace_)), SIGNING)
    made.ring = keyring_at(NOW)
    return made


class Whole(msgspec.Struct):
    iss: str
    sub: str
    nats: dict[str, Any]
    aud: str = ""
    name: str = ""
    exp: int = 0


def test_an_admitted_plugin_is_a_user_of_the_nodes_scope_for_that_node_and_time() -> None:
    decision = authorizer_with().decide(request(token_issuer.token(claims())), at=NOW, now=0)
    assert isinstance(decision, callout.Admitted)
    assert (decision.node, decision.pod, decision.lifetime_s) == (
        "node-a",
        "muster-plugin-x7x2p",
        3600,
    )
    answer = nkeys.decode_jwt(decision.answer.decode(), Whole, nkeys.Kind.ACCOUNT)
    assert (answer.iss, answer.sub, answer.aud) == (
        SIGNING.answer.public,
        USER.public,
        SERVER.public,
    )
    user = nkeys.decode_jwt(answer.nats.pop("jwt"), Whole, nkeys.Kind.ACCOUNT)
    expected = {"type": "authorization_response", "version": 2, "issuer_account": AUTH.public}
    assert answer.nats == expected
    assert user == Whole(
        iss=SIGNING.node.public,
        sub=USER.public,
        name="plugin_node-a",
        exp=int(NOW + 3600),
        nats={
            "type": "user",
            "version": 2,
            "issuer_account": PLUGINS.public,
            "tags": ["node:node-a"],
        },
    )


def test_another_service_account_stands_for_its_own_names_alone() -> None:
    account = {"serviceaccount": {"name": "muster-fuse", "uid": "u"}}
    subject = {"sub": "system:serviceaccount:muster:muster-fuse"}
    of_broker = token_issuer.token(bound(**account) | subject)
    without_accounts = dataclasses.replace(SIGNING, auth="")
    authorizer = callout.Authorizer(config.Settings(), without_accounts)
    authorizer.ring = keyring_at(NOW)
    admitted = authorizer.decide(request(of_broker, "fuse-broker node-a"), at=NOW, now=0)
    assert isinstance(admitted, callout.Admitted)
    answer = nkeys.decode_jwt(admitted.answer.decode(), Whole, nkeys.Kind.ACCOUNT)
    user = nkeys.decode_jwt(answer.nats["jwt"], Whole, nkeys.Kind.ACCOUNT)
    assert user.nats["pub"]["allow"] == list(permissions.plugin("node-a", ["fuse-broker"]).publish)
    for token, name in (
        (of_broker, "device-plugin node-a"),
        (token_issuer.token(claims()), "fuse-broker node-a"),
    ):
        decision = authorizer.decide(request(token, name), at=NOW, now=0)
        assert refusal(decision) == (Reason.NAME, "muster-gate: name")


def test_names_of_another_service_account_are_names_of_plugins() -> None:
    others = {"muster-fuse": ("fuse.broker",)}
    with pytest.raises(ValueError, match=r"^tokens\.others\.muster-fuse: 'fuse\.broker' is not"):
        config.Settings(tokens=config.Tokens(others=others))


def refusal(decision: object) -> tuple[Reason, str]:
    assert isinstance(decision, callout.Denied)
    error = ""
    if decision.answer:
        error = nkeys.decode_jwt(decision.answer.decode(), Whole, nkeys.Kind.ACCOUNT).nats["error"]
    return decision.reason, error


def test_a_denial_has_the_reason_and_not_the_token() -> None:
    for token, reason in WRONG.values():
        if len(token) < 5000:
            decision = authorizer_with().decide(request(token), at=NOW, now=0)
            assert refusal(decision) == (reason, f"muster-gate: {reason}")
            assert not token or token not in repr(decision)


def test_a_connection_may_not_be_named_like_a_plugin_of_another_node() -> None:
    good = token_issuer.token(claims())
    for name in ("device-plugin node-a", "", "muster-health", "two words_here"):
        assert isinstance(
            authorizer_with().decide(request(good, name), at=NOW, now=0), callout.Admitted
        ), name
    for name in ("device-plugin node-b", "device-plugin _fleet", "x node-a.b"):
        decision = authorizer_with().decide(request(good, name), at=NOW, now=0)
        assert refusal(decision) == (Reason.NAME, "muster-gate: name")


def test_a_question_that_no_server_signed_gets_no_answer() -> None:
    other: dict[str, Any] = {"server_id": {"id": key(nkeys.Kind.SERVER, 9).public}}
    good = token_issuer.token(claims())
    for payload in (b"", b"x", b"\xff" * 9, request(good, **other), request(good, user_nkey="U")):
        assert refusal(authorizer_with().decide(payload, at=NOW, now=0)) == (Reason.UNREADABLE, "")


def test_a_node_may_connect_so_often_at_once_and_then_so_often_a_minute() -> None:
    authorizer = authorizer_with(burst=3, per_minute=6)

    def comes(node: str, now: float) -> bool:
        decision = authorizer.decide(request(token_issuer.token(claims(node)), ""), at=NOW, now=now)
        return isinstance(decision, callout.Admitted)

    assert [comes("node-a", 0) for _ in range(5)] == [True, True, True, False, False]
    assert comes("node-b", 0)
    assert [comes("node-a", at) for at in (9, 10, 11, 20)] == [False, True, False, True]


TOKENS = {node: token_issuer.token(claims(node)) for node in "abcdef"}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 30)), max_size=80))
def test_a_node_never_connects_more_often_than_allowed(arrivals: list[tuple[str, float]]) -> None:
    rules = config.Pace(burst=3, per_minute=6)
    authorizer = authorizer_with(burst=rules.burst, per_minute=rules.per_minute)
    now, admitted = 0.0, list[tuple[str, float]]()
    for node, after in arrivals:
        now += after
        decision = authorizer.decide(request(TOKENS[node], ""), at=NOW, now=now)
        if isinstance(decision, callout.Admitted):
            admitted.append((node, now))
    for number, (node, since) in enumerate(admitted):
        later = [at for name, at in admitted[number:] if name == node]
        for count, until in enumerate(later, start=1):
            assert count <= rules.burst + (until - since) * rules.per_minute / 60 + 1e-6


def test_a_bad_signing_file_is_reported_without_its_secret() -> None:
    accounts_ = {"auth": AUTH.public, "plugins": PLUGINS.public}
    seeds = {"answer_seed": SIGNING.answer.seed, "node_seed": SIGNING.node.seed}
    assert (
        callout.read_signing(json.dumps(accounts_ | seeds).encode()).node.public
        == SIGNING.node.public
    )
    for wrong in (
        accounts_,
        accounts_ | seeds | {"more": 1},
        accounts_ | seeds | {"node_seed": USER.seed},
    ):
        with pytest.raises(ValueError, match=r"^not ") as error:
            callout.read_signing(json.dumps(wrong).encode())
        assert USER.seed not in str(error.value)


def test_the_scope_of_nodes_is_what_permissions_say_of_one() -> None:
    template = permissions.each_plugin()
    of_node = permissions.plugin("node-a", ["device-plugin", "other"])
    for of, its in ((template.publish, of_node.publish), (template.subscribe, of_node.subscribe)):
        filled = [
            s.replace("{{tag(node)}}", "node-a")
            .replace("{{tag(plugin)}}", "other")
            .replace("{{name()}}", of_node.user)
            for s in of
        ]
        assert filled == list(its)
    claims = accounts.user(
        accounts.Role.NODE, "U", name=of_node.user, account="A", plugins=["other", "device-plugin"]
    )
    assert claims["nats"]["tags"] == ["node:node-a", "plugin:other"]  # type: ignore[index]


def test_plugins_may_publish_every_event_of_theirs_and_use_eight_names() -> None:
    types = [event.TYPE for event in vocabulary.EVENTS if issubclass(event, vocabulary.PluginEvent)]
    assert sorted((*permissions.PLUGIN_EVENTS, *permissions.FUSE_EVENTS)) == sorted(types)
    names = [f"p{number}" for number in range(9)]
    assert permissions.check_names(names[:8]) == tuple(names[:8])
    for wrong, text in (
        (names, "9 plugin names; expected 1 to 8"),
        ([], "0 plugin names"),
        (["a.b"], "'a.b' is not a plugin name"),
        (["*"], "is not a plugin name"),
        (["a" * 64], "is not a plugin name"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            permissions.check_names(wrong)


def test_the_page_names_every_reason() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/security.md").read_text("utf-8")
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| ", page, re.MULTILINE)
    named = {word.strip("` ") for row in rows for word in row.split(",")}
    assert {reason.value for reason in Reason} <= named
