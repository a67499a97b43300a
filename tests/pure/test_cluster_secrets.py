"""Which passwords and keys of an installation are created, which are kept, and what is refused."""

import itertools
import secrets
from collections.abc import Mapping
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli import keyfiles
from muster.nats.auth import accounts, cluster_secrets, nkeys
from muster.nats.auth.cluster_secrets import Kind, Origin, Part, Step, Stored, Wanted

WANTED: Final = Wanted("muster")
KEYS: Final = WANTED.parts(production=True)
SEEDS: Final = Stored(keyfiles.new_seeds())
DERIVED: Final = cluster_secrets.derive(SEEDS, random=secrets.token_bytes, at=0)
PEM: Final = "-----BEGIN A KEY-----\nAAAA\nBBBB\n-----END A KEY-----\n"
FILES: Final = {
    **SEEDS.data,
    **DERIVED,
    **dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), PEM),
    "password": "p1234",
}


def stored(part: Part, *, version: str | None = None) -> Stored:
    return Stored({key: FILES[file] for key, file in part.files}, version)


def all_of(*parts: Part) -> dict[Part, Stored]:
    return {part: stored(part) for part in parts}


def plan(existing: Mapping[Part, Stored], *, production: bool = True) -> list[str]:
    steps = cluster_secrets.plan("muster", existing, production=production)
    return [f"{step.part}: {step.origin.name}" for step in steps]


def refused(existing: Mapping[Part, Stored], *, production: bool = True) -> str:
    with pytest.raises(cluster_secrets.Refused) as error:
        plan(existing, production=production)
    return str(error.value)


def test_without_production_each_user_of_nats_has_a_password() -> None:
    users = ("health", "labeler", "notifier", "reader", "console", "admin", "gate")
    names = [f"Secret muster-nats-{user}" for user in users]
    assert plan({}, production=False) == [f"{name}: PASSWORD" for name in names]
    gate = WANTED.passwords[-1]
    assert plan(all_of(*WANTED.passwords[:-1]), production=False) == [f"{gate}: PASSWORD"]
    assert plan(all_of(*WANTED.passwords), production=False) == []


def test_keys_come_first_and_all_else_from_them() -> None:
    first = ["Secret muster-keys: SEEDS", "Secret muster-nats-authority: AUTHORITY"]
    assert plan({}) == first
    assert plan(all_of(WANTED.seeds, WANTED.authority)) == [
        "ConfigMap muster-accounts: KEYS",
        "Secret muster-gate: KEYS",
        "Secret muster-health-creds: KEYS",
        "Secret muster-labeler-creds: KEYS",
        "Secret muster-notifier-creds: KEYS",
        "Secret muster-reader-creds: KEYS",
        "Secret muster-console-creds: KEYS",
        "Secret muster-admin-creds: KEYS",
        "Secret muster-nats-tls: CERTIFICATE",
    ]
    assert plan(all_of(*KEYS[:-1])) == ["ConfigMap muster-nats-ca: TRUST"]
    assert plan(all_of(*KEYS)) == []


def test_what_was_made_by_hand_stays_as_it_is() -> None:
    by_hand = all_of(*WANTED.needed, WANTED.certificate, WANTED.trust)
    assert plan(by_hand) == []
    # the user's own certificate, and keys that the Job creates
    assert plan(all_of(WANTED.certificate, WANTED.trust)) == ["Secret muster-keys: SEEDS"]


def test_other_rights_are_signed_again_with_the_same_keys() -> None:
    existing = all_of(*KEYS)
    for part in WANTED.signed:
        existing[part] = stored(part, version="before")
    assert plan(existing) == ["ConfigMap muster-accounts: KEYS", "Secret muster-gate: KEYS"]
    for part in WANTED.signed:
        existing[part] = stored(part, version=cluster_secrets.rights())
    assert plan(existing) == []


def test_an_older_installation_gets_the_keys_of_new_roles_first() -> None:
    older = all_of(*KEYS)
    data = {file: seed for file, seed in SEEDS.data.items() if file != "console.seed"}
    older[WANTED.seeds] = Stored(data)
    del older[WANTED.credentials(accounts.Role.CONSOLE)]
    for part in WANTED.signed:
        older[part] = stored(part, version="before")
    assert plan(older) == ["Secret muster-keys: SEEDS"]
    older[WANTED.seeds] = SEEDS
    assert plan(older) == [
        "ConfigMap muster-accounts: KEYS",
        "Secret muster-gate: KEYS",
        "Secret muster-console-creds: KEYS",
    ]
    # if the keys are kept outside the cluster, only a person can sign
    del older[WANTED.seeds]
    assert plan(older) == []
    older[WANTED.seeds] = Stored({**data, "console.seed": ""})
    assert refused(older) == (
        "Secret muster-keys: console.seed is empty; correct the value, or delete the object so "
        "that it is created again"
    )


@pytest.mark.parametrize("role", [accounts.Role.READER, accounts.Role.LABELER])
def test_credentials_of_a_role_that_has_moved_to_another_account_are_signed_again(
    role: accounts.Role,
) -> None:
    ring, user = cluster_secrets.ring(SEEDS), nkeys.Key(nkeys.Kind.USER, bytes(32))
    claims = accounts.user(role, user.public, name="x", account=ring["muster"][0].public)
    creds = nkeys.write_creds(nkeys.encode_jwt(claims, ring[role][0], at=0), user)
    older = all_of(*KEYS)
    older[WANTED.credentials(role)] = Stored({"nats.creds": creds})
    assert plan(older) == [f"Secret muster-{role}-creds: KEYS"]
    del older[WANTED.seeds]
    assert plan(older) == []


def test_parts_of_other_keys_are_no_beginning() -> None:
    for present in (WANTED.gate, WANTED.for_people[0]):
        text = refused(all_of(present))
        assert "the keys for ConfigMap muster-accounts" in text
        assert f"but these objects exist: {present}; run the commands that" in text


def test_clients_never_trust_an_authority_that_did_not_sign() -> None:
    text = refused(all_of(WANTED.trust))
    assert "there is no Secret muster-nats-tls, and clients trust an authority whose key" in text
    other = {
        **all_of(WANTED.trust),
        WANTED.authority: Stored({"ca.crt": PEM.replace("A", "B"), "ca.key": PEM}),
    }
    assert refused(other) == text


@pytest.mark.parametrize(
    ("part", "data", "problem"),
    [
        (WANTED.passwords[0], {}, "password is missing"),
        (WANTED.passwords[0], {"password": ""}, "password is empty"),
        (WANTED.passwords[0], {"password": "a\n"}, "such as a line feed"),
        (WANTED.passwords[0], {"password": "1234"}, "password is damaged: it is a number"),
        (WANTED.passwords[0], {"password": "a\ufffd"}, "password is damaged: "),
        (WANTED.passwords[0], {"password": "a@b"}, "cannot be part of an address"),
        (WANTED.gate, {"gate.json": DERIVED["gate.json"]}, "gate.creds is missing"),
        (
            WANTED.gate,
            {"gate.json": "{", "gate.creds": "xyz"},
            "gate.json is damaged: not JSON",
        ),
        (WANTED.gate, {"gate.json": "{}", "gate.creds": "xyz"}, "gate.json is damaged: not a"),
        (
            WANTED.gate,
            {"gate.json": DERIVED["gate.json"], "gate.creds": "xyz"},
            "gate.creds is damaged: no valid credentials",
        ),
        (
            WANTED.accounts_conf,
            {"accounts.conf": "\ufffdxyz"},
            "accounts.conf is damaged: not text",
        ),
        (WANTED.certificate, {"tls.crt": "xyz"}, "tls.crt is damaged: not PEM"),
        (WANTED.certificate, {"tls.crt": PEM, "tls.key": PEM[:-9]}, "tls.key is damaged: not PEM"),
        (WANTED.authority, {"ca.crt": PEM.replace("AAAA", "AAA")}, "its content is not base64"),
        (WANTED.needed[2], {"nats.creds": "x"}, "no valid credentials"),
        (WANTED.trust, {"ca.crt": "\n"}, "ca.crt is empty"),
        (WANTED.seeds, {**SEEDS.data, "gate.seed": "SU"}, "not a key"),
        (WANTED.seeds, {**SEEDS.data, "gate.seed": SEEDS.data["auth.seed"]}, "kind user"),
    ],
)
def test_what_has_another_form_is_named_and_not_replaced(
    part: Part, data: dict[str, str], problem: str
) -> None:
    production = part not in WANTED.passwords
    text = refused({part: Stored(data)}, production=production)
    assert text.startswith(f"{part}: ")
    assert problem in text
    assert not any(value in text for value in data.values() if len(value) > 2)


@given(st.sets(st.sampled_from(KEYS)))
def test_from_every_half_state_everything_is_there_in_the_end_or_it_is_refused(
    present: set[Part],
) -> None:
    existing = all_of(*present)
    try:
        for rounds in itertools.count(1):
            steps = cluster_secrets.plan("muster", existing, production=True)
            if not steps:
                break
            assert rounds < cluster_secrets.ROUNDS_MAX
            for step in steps:
                # no existing object is replaced
                assert step.part not in existing
                assert _can_be_made(step, existing)
                existing[step.part] = stored(step.part)
    except cluster_secrets.Refused:
        assert WANTED.seeds not in present or WANTED.authority not in present
        return
    needed = {*WANTED.needed, WANTED.certificate, WANTED.trust}
    assert needed <= set(existing)


def _can_be_made(step: Step, existing: Mapping[Part, Stored]) -> bool:
    needs = {
        Origin.KEYS: WANTED.seeds,
        Origin.CERTIFICATE: WANTED.authority,
        Origin.TRUST: WANTED.certificate,
    }
    return step.origin not in needs or needs[step.origin] in existing


def test_nats_includes_what_clients_are_told() -> None:
    assert WANTED.accounts_conf.kind is Kind.CONFIG_MAP
    assert cluster_secrets.hosts("gpus", "ml")[:4] == (
        *("gpus-nats", "*.gpus-nats", "gpus-nats.ml"),
        "*.gpus-nats.ml.svc.cluster.local",
    )
