"""A plugin's text stays plain text in every receiver: it links, mentions and fetches nothing."""

import datetime as dt
import email
import email.policy
import json
import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from muster import vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import chat, kubernetes_api, message, pagerduty, webhook
from muster_notifier.receivers import email as mails
from muster_notifier.routing import notifications

T0: Final = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)
HOSTILE: Final = {
    "link": "[sign in](https://evil.example)",
    "image": "![x](https://evil.example/x.png)",
    "reference": "[a][b] [b]: https://evil.example",
    "mention": "@everyone <!channel> <@U123> <at>all</at> @channel",
    "Slack link": "<https://evil.example|sign in>",
    "code": "``` ` ''' `x`",
    "HTML": "<a href='https://evil.example'>x</a><script>x</script><img src=x>&lt;b&gt;",
    "function": "{{DATE(2026-01-01T00:00:00Z, SHORT)}}",
    "lines": "a\r\nBcc: x@evil.example\r\n\r\n.\r\nQUIT\n[FIRING] node_down on node-b",
    "controls": "\x1b[2J \x9b31m \x00 \x7f \u202e \u2066 \u2028",
    "encoded word": "=?utf-8?q?=0aBcc=3a?=",
    "variables": "$runbook ${title} $$ %s {0}",
}
MARKUP: Final = re.compile(r"\]\(|\]\[|\]:|!\[|<[\w/!@]|\{\{|@\w")


def hostile(text: str) -> notifications.Notification:
    """Return a notification with the text in every field that can contain a plugin's text."""
    alert = vocabulary.AlertChanged(
        node="node-a",
        at=T0,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.DEVICE_UNHEALTHY,
        severity=vocabulary.Severity.CRITICAL,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary=text,
        starts_at=T0,
        resource=text,
        devices=(text[:63],),
        pods=(text,),
        evidence=(vocabulary.Evidence(source=text, observed=text),),
        advice=text,
        runbook=text,
    )
    return notifications.create(
        after="",
        receiver="r",
        group=f'{{}}:{{resource="{text}"}}',
        labels={"resource": text},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[alert],
        resolved=[],
        send_resolved=True,
        at=T0,
    )


def texts(tree: Any) -> list[str]:
    match tree:
        case str():
            return [tree]
        case dict():
            return [text for value in tree.values() for text in texts(value)]
        case list():
            return [text for value in tree for text in texts(value)]
    return []


def slack(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(notification)
    content: Any = chat.slack_content(notification, words)
    (attachment,) = content.pop("attachments")
    section, context = attachment["blocks"]
    code = section["text"]["text"]
    assert code.startswith("```")
    assert code.endswith("```")
    assert "```" not in code[3:-3]
    (link,) = context["elements"]
    for text in (code, link["text"], content["text"], chat.change_line(notification, words)):
        assert not set("<>") & set(text)
        assert re.fullmatch("[^&]*(&(amp|lt|gt);[^&]*)*", text)
    # Slack fetches nothing for a preview
    assert (content["unfurl_links"], content["unfurl_media"]) == (False, False)


def teams(notification: notifications.Notification) -> None:
    prepared = message.inert(notification)
    card = json.loads(chat.teams_card(prepared, message.PLAIN.compose(prepared)))
    (attachment,) = card["attachments"]
    assert "entities" not in attachment["content"]["msteams"]
    for block in attachment["content"]["body"]:
        assert block["type"] == "TextBlock"
        assert not MARKUP.search(block["text"])
        assert block["text"].isprintable()


def apprise(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(message.inert(notification))
    assert not MARKUP.search(words.text)
    assert not MARKUP.search(words.title)


def mail(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(notification)
    body = mails.encode_mail(notification, words, sender="m@example.com", to=("a@example.com",))
    read = email.message_from_bytes(body, policy=email.policy.default)
    assert read.get_content_type() == "text/plain"
    assert {"bcc", "cc"}.isdisjoint(name.lower() for name in read)
    assert read["To"] == "a@example.com"
    assert "\n" not in read["Subject"]


def incident(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(notification)
    event = json.loads(pagerduty.encode(notification, words, routing_key="k"))
    assert event["links"] == []
    whole = event["payload"]["custom_details"].pop("text")
    assert all(text.isprintable() for text in (*texts(event), *whole.split("\n")))


def program(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(notification)
    for layout in receiver_settings.Format:
        body = json.loads(webhook.encode_body(notification, words, format_=layout))
        if layout is receiver_settings.Format.CLOUDEVENTS:
            # the data for programs contains the reported text unchanged
            assert body["data"].pop("alerts")[0]["summary"] == notification.firing[0].summary
            del body["data"]["groupKey"], body["data"]["groupLabels"]
        else:
            del body["groupKey"]
        assert all(line.isprintable() for text in texts(body) for line in text.split("\n"))


def kubernetes(notification: notifications.Notification) -> None:
    for event in kubernetes_api.events(notification, receiver_settings.KubernetesEvents()):
        assert str(event.body["note"]).isprintable()
        assert event.namespace == "default"


def people(notification: notifications.Notification) -> None:
    words = message.PLAIN.compose(notification)
    assert words.title.isprintable()
    assert all(line.isprintable() for line in words.text.split("\n"))
    # no line begins with a plugin's text: its source comes first
    lines = words.text.split("\n")
    assert [line for line in lines if line.startswith(("Resolved", "[FIRING]", "Bcc"))] == []


@pytest.mark.parametrize(
    "receiver", [slack, teams, apprise, mail, incident, program, kubernetes, people]
)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_receiver_acts_on_the_text_of_a_plugin(
    text: str, receiver: Callable[[notifications.Notification], None]
) -> None:
    receiver(hostile(text))


def test_the_links_of_the_operators_templates_stay_links() -> None:
    notification = message.inert(hostile("[a](https://evil.example)"))
    templates = receiver_settings.Templates(title="[board](https://own.example) $summary")
    assert message.Composer(templates=templates).compose(notification).title == (
        "[board](https://own.example) [a] (https://evil.example)"
    )


def test_honest_texts_stay_as_they_are() -> None:
    text = "XID 79 on 0000:3b:00.0 [fallen off the bus]: a < b, <= 3, a @ b, a[0], {x}, f(x), i! "
    plain = text.rstrip().replace("]:", "] :")
    assert message.inert(hostile(text)).firing[0].summary == plain
