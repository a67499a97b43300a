"""What `muster notify setup` writes: complete settings that the notifier accepts."""

import base64
from pathlib import Path
from typing import Any

import pytest

from muster.service import settings
from muster_notifier.config import files, receiver_settings, setup_plan
from muster_notifier.config.setup_plan import Plan

PUBLIC, PRIVATE = receiver_settings.Reach.PUBLIC, receiver_settings.Reach.PRIVATE
SECRET = {"file": "ops.secret"}
HOOK = "https://hooks.slack.com/services/T/B/x"
RELAY = setup_plan.Mail(
    host="smtp.example.com",
    port=587,
    sender="muster@example.com",
    to=("ops@example.com",),
    tls=receiver_settings.Tls.STARTTLS,
    username="",
)
RELAYED = {
    "host": "smtp.example.com",
    "port": 587,
    "sender": "muster@example.com",
    "to": ["ops@example.com"],
    "tls": "starttls",
}
LOGIN = setup_plan.Mail(
    **{**{key: getattr(RELAY, key) for key in RELAYED}, "tls": RELAY.tls, "username": "u"}
)


@pytest.mark.parametrize(
    ("plan", "expected", "secret"),
    [
        (
            setup_plan.slack("ops", HOOK, channel="", reach=PUBLIC),
            {"slack": {"webhook_from": SECRET}},
            HOOK,
        ),
        (
            setup_plan.slack("ops", "xoxb-1", channel="#a", reach=PRIVATE),
            {"slack": {"token_from": SECRET, "channel": "#a", "reach": "private"}},
            "xoxb-1",
        ),
        (
            setup_plan.pagerduty("ops", "R0", url="", reach=PUBLIC),
            {"pagerduty": {"routing_key_from": SECRET}},
            "R0",
        ),
        (
            setup_plan.pagerduty("ops", "R0", url="https://eu.example/v2", reach=PUBLIC),
            {"pagerduty": {"routing_key_from": SECRET, "url": "https://eu.example/v2"}},
            "R0",
        ),
        (setup_plan.email("ops", "", RELAY), {"email": RELAYED}, ""),
        (
            setup_plan.email("ops", "p", LOGIN),
            {"email": {**RELAYED, "username": "u", "password_from": SECRET}},
            "p",
        ),
        (
            setup_plan.teams("ops", "https://t.example", reach=PUBLIC),
            {"teams": {"url_from": SECRET}},
            "https://t.example",
        ),
        (
            setup_plan.webhook("ops", "https://w.example", url="", reach=PRIVATE),
            {"webhook": {"url_from": SECRET, "reach": "private"}},
            "https://w.example",
        ),
        (
            setup_plan.webhook("ops", "", url="https://w.example", reach=PUBLIC),
            {"webhook": {"url": "https://w.example"}},
            "",
        ),
        (
            setup_plan.webhook("ops", "k", url="https://w.example", reach=PUBLIC),
            {"webhook": {"url": "https://w.example", "secrets": [SECRET]}},
            "k",
        ),
    ],
    ids=str,
)
def test_each_kind_has_these_settings_and_the_notifier_reads_them(
    plan: Plan, expected: dict[str, Any], secret: str, tmp_path: Path
) -> None:
    assert plan == Plan(name="ops", settings=expected, secret=secret)
    texts = plan.files()
    assert set(texts) == {"ops.yaml"} | ({"ops.secret"} if secret else set())
    read = files.receiver(texts["ops.yaml"].encode(), name="ops", directory=tmp_path)
    assert list(expected) == [read.way]
    if secret:
        assert str(tmp_path / "ops.secret") in str(read)


def test_the_manifest_is_this_receivers_part_of_the_secret_under_its_own_manager() -> None:
    plan = setup_plan.teams("ops", "https://t.example", reach=PUBLIC)

    def encoded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    assert plan.manager == "muster-notify-ops"
    name = "gpus-notifier-receivers"
    assert plan.manifest(secret=name, namespace="gpus") == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": "gpus",
            "labels": {"app.kubernetes.io/part-of": "muster"},
        },
        "data": {
            "ops.yaml": encoded("teams:\n  url_from:\n    file: ops.secret\n"),
            "ops.secret": encoded("https://t.example"),
        },
    }


def test_a_receiver_replaces_another_only_if_it_is_told_to() -> None:
    plan = setup_plan.teams("ops", "https://t.example", reach=PUBLIC)
    own = {key: text.encode() for key, text in plan.files().items()}
    taken = "there is already a receiver ops: pass another --name, or --replace"
    other = {"pager.yaml": b"", "pager.secret": b""}
    for present, replaces, expected in (
        ({}, False, ""),
        (other, False, ""),
        (own | other, False, ""),
        (own | {"ops.secret": b"x"}, False, taken),
        ({"ops.yaml": b"x"}, False, taken),
        ({"ops.yaml": b"x"}, True, ""),
        ({"ops.secret": b"x"}, False, ""),
        (
            {f"r{number}.yaml": b"" for number in range(64)},
            False,
            "there are already 64 receivers, which is the maximum",
        ),
        ({f"r{number}.yaml": b"" for number in range(63)} | own, False, ""),
    ):
        assert plan.refusal(present, replaces=replaces) == expected


def test_what_the_model_refuses_is_said_by_the_model(tmp_path: Path) -> None:
    plan = setup_plan.slack("ops", "xoxb-1", channel="", reach=PUBLIC)
    with pytest.raises(settings.BadSettings, match="channel: required with token_from"):
        files.receiver(plan.files()["ops.yaml"].encode(), name="ops", directory=tmp_path)
