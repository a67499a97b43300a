"""Adapter: chat: Slack, Microsoft Teams, and many other services through Apprise.

In Slack, a group is one root message, edited in place, with a thread of changes; with an incoming
webhook instead of a bot token, every change is a separate message. Slack's limits are 150
characters for a header and 3,000 for a section (docs.slack.dev, Block Kit). Teams gets an adaptive
card of up to 28 KB (learn.microsoft.com, format of connector cards and cards).

Teams and many services of Apprise read Markdown, so texts from other systems are made `inert`.

Apprise reports failures without their cause: every failure counts as temporary, messages may be
repeated, and back-off is imprecise. It blocks and sleeps, so it runs in a separate thread.
"""

import asyncio
import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from muster import blocking, codec, commands, vocabulary
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import endpoint, message, results, webhook
from muster_notifier.routing import notifications

TEAMS_BYTES_MAX: Final = 27_000
_HEADER_MAX: Final = 150
_SECTION_MAX: Final = 3000
_COLOURS: Final = {
    vocabulary.Severity.CRITICAL: "#d00000",
    vocabulary.Severity.WARNING: "#e8a317",
    vocabulary.Severity.INFO: "#439fe0",
}
_RESOLVED: Final = "#2eb67d"
_NO_RESPONSE: Final = "not a response from its API"
_ERRORS: Final = {
    _NO_RESPONSE: results.Outcome.NONSENSE,
    "ratelimited": results.Outcome.RATE_LIMITED,
    "internal_error": results.Outcome.UNWELL,
    "fatal_error": results.Outcome.UNWELL,
    "service_unavailable": results.Outcome.UNWELL,
    "request_timeout": results.Outcome.UNWELL,
    "invalid_auth": results.Outcome.UNAUTHORIZED,
    "not_authed": results.Outcome.UNAUTHORIZED,
    "token_revoked": results.Outcome.UNAUTHORIZED,
    "channel_not_found": results.Outcome.NOT_FOUND,
    "msg_too_long": results.Outcome.TOO_LARGE,
}
"""What Slack's errors mean; errors that are not listed are refusals too."""

_GONE: Final = frozenset(
    {"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found"}
)

Json = dict[str, object]
_OK: Final = 200
_NO_PREVIEWS: Final[Json] = {"unfurl_links": False, "unfurl_media": False}
"""Slack would otherwise fetch any address in a text and show the picture that is there."""


class SlackReply(msgspec.Struct, frozen=True):
    """A response from Slack's API."""

    ok: bool = False
    error: str = ""
    ts: str = ""
    channel: str = ""


def slack_content(notification: notifications.Notification, words: message.Message) -> Json:
    """Return the message content, for the API and for incoming webhooks."""
    _, _, rest = words.text.partition("\n")
    blocks: list[Json] = [
        {
            "type": "header",
            "text": {"type": "plain_text", "text": message.cut(words.title, _HEADER_MAX)},
        }
    ]
    if rest:
        # three backquotes in an alert's text would end the code block
        shown = _escaped(rest).replace("```", "'''")
        text = "```" + message.cut(shown, _SECTION_MAX - 6) + "```"
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": text}})
    return {
        "text": _escaped(words.title),
        **_NO_PREVIEWS,
        "attachments": [{"color": colour(notification), "blocks": blocks}],
    }


def colour(notification: notifications.Notification) -> str:
    """Return the colour of the most urgent firing alert, or that of resolved alerts."""
    firing = [alert.severity for alert in notification.firing]
    order = tuple(vocabulary.Severity)
    return _COLOURS[min(firing, key=order.index)] if firing else _RESOLVED


def change_line(notification: notifications.Notification, text: message.Message) -> str:
    """Return the line about a change, for the thread."""
    reasons = {
        vocabulary.NotificationReason.FIRST: "firing",
        vocabulary.NotificationReason.NEW_ALERTS: "more alerts firing",
        vocabulary.NotificationReason.NEW_RESOLVED: "some resolved",
        vocabulary.NotificationReason.ALL_RESOLVED: "all resolved",
        vocabulary.NotificationReason.REPEAT: "still firing",
        vocabulary.NotificationReason.ACKNOWLEDGED: "silenced",
    }
    return f"{reasons[notification.reason]}: {_escaped(text.title)}"


def read_slack_reply(body: bytes) -> SlackReply:
    """Return the API's response; an error response if the body is unreadable."""
    try:
        return msgspec.json.decode(body, type=SlackReply)
    except codec.UNREADABLE:
        return SlackReply(error=_NO_RESPONSE)


def is_gone(reply: SlackReply) -> bool:
    """Return whether the message to edit no longer exists."""
    return reply.error in _GONE


def slack_result(reply: SlackReply) -> results.Result:
    """Return the result for a response."""
    if reply.ok:
        return results.Result(results.Outcome.TAKEN, "ok")
    outcome = _ERRORS.get(reply.error, results.Outcome.REJECTED)
    return results.Result(outcome, f"Slack: {message.line(reply.error, 200)}")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def encode_slack(notification: notifications.Notification, text: message.Message) -> bytes:
    """Return the body for an incoming webhook, which cannot edit messages."""
    return msgspec.json.encode(slack_content(notification, text))


class SlackChannel:
    """Sends to one channel with a bot token."""

    def __init__(
        self,
        to: endpoint.Endpoint,
        *,
        token: str,
        channel: str,
        templates: receiver_settings.Templates,
        pace_s: float,
    ) -> None:
        """`to` is the API, such as https://slack.com/api; wait `pace_s` between requests."""
        self._endpoint = to
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json; charset=utf-8",
        }
        self._channel = channel
        self._templates = templates
        self._pace_s = pace_s

    async def send(
        self, notification: notifications.Notification, data: Mapping[str, str]
    ) -> results.Result:
        """Post the group's message, or edit it and post the change in its thread."""
        text = message.compose(notification, self._templates)
        content = slack_content(notification, text)
        if "ts" not in data:
            return await self._begin(content)
        where = {"channel": data.get("channel", self._channel), "ts": data["ts"]}
        reply = await self._call("chat.update", {**where, **content})
        if isinstance(reply, results.Result):
            return reply
        if is_gone(reply):
            await asyncio.sleep(self._pace_s)
            return replace(await self._begin(content), requests=2)
        if not reply.ok:
            return slack_result(reply)
        await asyncio.sleep(self._pace_s)
        thread_reply = await self._call(
            "chat.postMessage",
            {
                "channel": where["channel"],
                "thread_ts": where["ts"],
                "text": change_line(notification, text),
                **_NO_PREVIEWS,
            },
        )
        answer = (
            thread_reply if isinstance(thread_reply, results.Result) else slack_result(thread_reply)
        )
        return replace(answer, data=where, requests=2)

    async def _begin(self, content: Json) -> results.Result:
        reply = await self._call("chat.postMessage", {"channel": self._channel, **content})
        if isinstance(reply, results.Result):
            return reply
        data = {"channel": reply.channel or self._channel, "ts": reply.ts} if reply.ts else {}
        return replace(slack_result(reply), data=data)

    async def _call(self, method: str, body: Json) -> SlackReply | results.Result:
        answer = await self._endpoint.request(
            "POST", below=f"/{method}", headers=self._headers, body=msgspec.json.encode(body)
        )
        if isinstance(answer, results.Result):
            return answer
        if answer.status != _OK:
            return results.of_status(answer.status, answer.headers)
        return read_slack_reply(answer.body)


def teams_card(notification: notifications.Notification, message_text: message.Message) -> bytes:
    """Return the body, with as much of the text as fits."""
    _, _, text = message_text.text.partition("\n")
    lines = text.split("\n") if text else []

    def encode(count: int) -> bytes:
        shown = lines[:count]
        if count < len(lines):
            shown = [*shown, f"… {len(lines) - count} more lines"]
        return msgspec.json.encode(_teams_message(notification, message_text.title, shown))

    return webhook.encode_fitting(encode, len(lines), TEAMS_BYTES_MAX)


def _teams_message(notification: notifications.Notification, title: str, lines: list[str]) -> Json:
    colour = "Attention" if notification.firing_ids else "Good"
    head: Json = {
        "type": "TextBlock",
        "text": title,
        "weight": "Bolder",
        "size": "Medium",
        "color": colour,
        "wrap": True,
    }
    rest: list[Json] = [
        {
            "type": "TextBlock",
            "text": line,
            "fontType": "Monospace",
            "wrap": True,
            "spacing": "None",
        }
        for line in lines
    ]
    content: Json = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [head, *rest],
    }
    attachment: Json = {
        "contentType": "application/vnd.microsoft.card.adaptive",
        "contentUrl": None,
        "content": content,
    }
    return {"type": "message", "attachments": [attachment]}


class Apprise:
    """Sends to one Apprise URL."""

    def __init__(
        self, url: str, *, timeout_s: float, templates: receiver_settings.Templates
    ) -> None:
        """Raise ValueError if Apprise is not installed or does not support the URL."""
        try:
            apprise: Any = importlib.import_module("apprise")
        except ImportError:
            raise ValueError(
                f"apprise is not installed: {commands.how_to_install('apprise')}"
            ) from None
        self._apprise: Any = apprise.Apprise()
        if not self._apprise.add(url):
            raise ValueError("apprise: this kind of URL is not supported")
        self._blocking = blocking.Serial()
        self._timeout_s = timeout_s
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Send one message."""
        text = message.compose(message.inert(notification), self._templates)
        kind = "failure" if notification.firing_ids else "success"
        try:
            async with asyncio.timeout(self._timeout_s):
                is_taken = await self._blocking.run(
                    functools.partial(
                        self._apprise.notify,
                        body=text.text,
                        title=text.title,
                        notify_type=kind,
                        # Apprise then escapes it for a service that shows HTML
                        body_format="text",
                    )
                )
        except TimeoutError:
            detail = f"apprise: no answer within {self._timeout_s:g} s"
            return results.Result(results.Outcome.TIMED_OUT, detail, is_unknown=True)
        if is_taken:
            return results.Result(results.Outcome.TAKEN, "apprise: sent")
        return results.Result(results.Outcome.FAILED, "apprise: not sent", is_unknown=True)
