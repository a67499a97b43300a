"""Links from notifications to the console, by the setting `console_url`."""

import asyncio
import datetime as dt
import email
import email.policy
import urllib.parse
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import codec, vocabulary
from muster.vocabulary import AlertKind, AlertState
from muster_notifier import sample_message
from muster_notifier.config import receiver_settings, schema
from muster_notifier.receivers import (
    chat,
    console_links,
    headline,
    kubernetes_api,
    message,
    pagerduty,
    results,
    webhook,
)
from muster_notifier.receivers import email as mails
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, 12, 0, 0, tzinfo=dt.UTC)
CONSOLE = "https://muster.example.com/fleet/"
BASE = CONSOLE.rstrip("/")
COMPOSER = message.Composer(console_url=CONSOLE)


def alert(
    node: str, kind: AlertKind = AlertKind.STUCK, *, number: int = 0, over: bool = False
) -> vocabulary.AlertChanged:
    return vocabulary.AlertChanged(
        node=node,
        at=T0,
        plugin="device-plugin",
        kind=kind,
        severity=vocabulary.Severity.CRITICAL,
        state=AlertState.RESOLVED if over else AlertState.FIRING,
        fingerprint=f"{number:016x}",
        summary=f"{node} is broken",
        starts_at=T0,
        ends_at=T0 if over else None,
        runbook="https://runbooks.example/stuck.md",
    )


def notification(*alerts: vocabulary.AlertChanged, **labels: str) -> notifications.Notification:
    return notifications.create(
        after="",
        receiver="ops",
        group="{}:{}",
        labels=labels,
        reason=vocabulary.NotificationReason.FIRST,
        firing=[each for each in alerts if each.state is AlertState.FIRING],
        resolved=[each for each in alerts if each.state is AlertState.RESOLVED],
        send_resolved=True,
        at=T0,
    )


FLEET = alert(vocabulary.FLEET, AlertKind.STORM)
OWN = [alert(vocabulary.FLEET, kind) for kind in (AlertKind.DEAD_LETTERS, AlertKind.HEALTH_SILENT)]
LONG = {f"label{number}": "x" * 100 for number in range(5)}


def many(**labels: str) -> notifications.Notification:
    """Return a notification about more alerts of a node than the outbox stores."""
    alerts = (alert("node-a", number=number) for number in range(300))
    return notifications.decode(notifications.encode(notification(*alerts, **labels)))


@pytest.mark.parametrize(
    ("sent", "page"),
    [
        (notification(alert("node-a"), kind="stuck"), "node/node-a"),
        (notification(alert("node-a", over=True), kind="stuck"), "node/node-a"),
        (notification(alert("a"), alert("b"), kind="stuck"), "alerts?kind=stuck"),
        (notification(alert("a"), alert("b", over=True), kind="stuck"), "alerts?kind=stuck"),
        (notification(alert("a"), alert("b"), device="A&B C"), "alerts?device=A%26B%20C"),
        (notification(alert("a"), alert("b")), "alerts"),
        (notification(alert("a"), alert("b"), **LONG), "alerts"),
        (notification(FLEET, kind="storm", node="_fleet"), "alerts?kind=storm&node=_fleet"),
        (notification(OWN[0], kind="dead_letters", node="_fleet"), "alerts"),
        (notification(OWN[1], kind="health_silent", node="_fleet"), "alerts"),
        (many(node="node-a"), "node/node-a"),
        (many(kind="stuck"), "alerts?kind=stuck"),
        (msgspec.structs.replace(notification(alert("node-a")), is_test=True), "alerts"),
    ],
)  # fmt: skip
def test_a_notification_leads_to_its_node_or_to_the_alerts_of_its_group(
    sent: notifications.Notification, page: str
) -> None:
    words = COMPOSER.compose(sent)
    assert words.console == f"{BASE}/{page}"
    assert len(words.console) <= headline.LINE_MAX
    assert words.text.splitlines()[-1] == f"console: {BASE}/{page}"


def test_a_message_of_the_operators_own_text_leads_to_the_console_too() -> None:
    templates = receiver_settings.Templates(text="$summary")
    words = message.Composer(templates=templates, console_url=CONSOLE).compose(
        notification(alert("node-a"))
    )
    assert words.text == f"node-a is broken\nconsole: {BASE}/node/node-a"


def test_every_receiver_shows_the_link_in_its_own_way() -> None:
    link = f"{BASE}/alerts?kind=stuck&severity=critical"
    sent = notification(alert("a"), alert("b"), kind="stuck", severity="critical")
    words = COMPOSER.compose(sent)
    slack: Any = chat.slack_content(sent, words)
    assert slack["attachments"][0]["blocks"][1]["elements"] == [
        {"type": "mrkdwn", "text": "<https://runbooks.example/stuck.md|runbook of stuck>"},
        {"type": "mrkdwn", "text": f"<{link.replace('&', '&amp;')}|console>"},
    ]
    card = msgspec.json.decode(chat.teams_card(sent, words))["attachments"][0]["content"]
    assert card["actions"][1] == {"type": "Action.OpenUrl", "title": "console", "url": link}
    mail = mails.encode_mail(sent, words, sender="m@example.com", to=("o@example.com",))
    text = email.message_from_bytes(mail, policy=email.policy.default).get_content()
    assert text.splitlines()[-1] == f"console: {link}"
    event = msgspec.json.decode(pagerduty.encode(sent, words, routing_key="k"))
    assert event["links"] == [
        {"href": "https://runbooks.example/stuck.md", "text": "runbook"},
        {"href": link, "text": "console"},
    ]


def test_a_body_in_json_has_the_link_as_a_field() -> None:
    sent = notification(alert("a"), FLEET, kind="stuck")
    words = COMPOSER.compose(sent)
    formats = receiver_settings.Format
    body = msgspec.json.decode(webhook.encode_body(sent, words, format_=formats.CLOUDEVENTS))
    assert body["data"]["console"] == f"{BASE}/alerts?kind=stuck"
    body = msgspec.json.decode(webhook.encode_body(sent, words, format_=formats.ALERTMANAGER))
    assert body["externalURL"] == BASE
    links = [f"{BASE}/alerts?kind=storm&node=_fleet", f"{BASE}/node/a"]
    assert [each["generatorURL"] for each in body["alerts"]] == links
    pushed = webhook.encode_alerts(sent, lifetime=dt.timedelta(hours=1), console_url=CONSOLE)
    assert [each["generatorURL"] for each in msgspec.json.decode(pushed)] == links
    without = webhook.encode_alerts(sent, lifetime=dt.timedelta(hours=1))
    assert not any("generatorURL" in each for each in msgspec.json.decode(without))


def test_an_event_of_kubernetes_ends_with_the_link_however_long_its_note_is() -> None:
    long = msgspec.structs.replace(alert("node-a"), summary="é" * 5_000)
    for each in (alert("node-a"), long):
        (event,) = kubernetes_api.events(
            notification(each), receiver_settings.KubernetesEvents(), console_url=CONSOLE
        )
        note = str(event.body["note"])
        assert note.endswith(f"; console: {BASE}/node/node-a")
        assert len(note.encode()) <= 1_000


def test_a_test_message_leads_to_the_alerts_because_its_node_does_not_exist() -> None:
    sent: list[notifications.Notification] = []

    async def deliver(test: notifications.Notification) -> sample_message.Attempt:
        sent.append(test)
        taken = results.Outcome.ACCEPTED
        return sample_message.Attempt([], results.Kind.ACCEPTED, taken, "ok", None)

    asyncio.run(sample_message.send_by(deliver, "ops", "pagerduty", at=T0))
    assert [COMPOSER.compose(each).console for each in sent] == [f"{BASE}/alerts"] * 2
    (shown,) = sent[0].firing
    assert console_links.of_alert(CONSOLE, shown) == f"{BASE}/alerts"


@given(st.text(st.characters(codec="utf-8")))
def test_a_part_of_a_link_is_encoded_as_everywhere(text: str) -> None:
    assert console_links.quoted(text) == urllib.parse.quote(text, safe="")


@pytest.mark.parametrize(
    "url",
    [
        "muster.example.com",
        "ftp://muster.example.com",
        "https://",
        "https:///fleet",
        "https://me:secret@muster.example.com/",
        "https://muster.example.com/?a=b",
        "https://muster.example.com/#a",
        "https://muster.example.com/a b",
        "https://muster.example.com/\n",
        "https://muster.example.com:99999/",
        "https://[::1/",
        "javascript:alert(1)//https://x",
        "https://muster.example.com/<b>|x",
    ],
)
def test_an_address_of_the_console_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(codec.UNREADABLE, match=r"console_url: .* is not an address such as"):
        msgspec.convert({"console_url": url}, schema.Settings)


@pytest.mark.parametrize(
    "url", ["", "http://127.0.0.1:8080", "https://muster.example.com/", "http://[fd00::1]:80/a/b/"]
)
def test_an_address_of_the_console_is_http_with_or_without_a_path(url: str) -> None:
    assert msgspec.convert({"console_url": url}, schema.Settings).console_url == url


@pytest.mark.parametrize("in_cluster", [b"true", b"false"])
def test_a_notification_that_an_older_version_stored_is_read(in_cluster: bytes) -> None:
    sent = notification(alert("node-a"), kind="stuck")
    stored = notifications.encode(sent)[:-1] + b',"in_cluster":' + in_cluster + b"}"
    assert notifications.decode(stored) == sent
