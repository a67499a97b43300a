"""Adapter: sends to Slack, to Microsoft Teams and, through Apprise, to many other services.

In Slack, a group is one root message, edited in place, with a thread of changes; with an incoming
webhook instead of a bot token, every change is a separate message. Slack's limit is 3,000
characters for a section (docs.slack.dev, Block Kit). Teams gets an adaptive card of up to 28 KB
(learn.microsoft.com, format of connector cards and cards).

Teams and many services of Apprise read Markdown, so texts from other systems are made `inert`.

Apprise reports failures without their cause. So every failure counts as temporary, messages may be
repeated, and back-off is imprecise. Apprise blocks and sleeps, so it runs in a separate thread.
"""

import asyncio
import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec

from muster import blocking, commands, vocabulary, wording
from muster_notifier.receivers import answers, endpoint, headline, message, results, webhook
from muster_notifier.routing import notifications

TEAMS_BYTES_MAX: Final = 27_000
_SECTION_MAX: Final = 3000
_COLOURS: Final = {
    vocabulary.Severity.CRITICAL: "#d00000",
    vocabulary.Severity.WARNING: "#e8a317",
    vocabulary.Severity.INFO: "#439fe0",
}
_RESOLVED: Final = "#2eb67d"
Json = dict[str, object]
_OK: Final = 200
_NO_PREVIEWS: Final[Json] = {"unfurl_links": False, "unfurl_media": False}
"""The fields that keep Slack from fetching the URLs in a text to show previews."""


def slack_content(notification: notifications.Notification, words: message.Message) -> Json:
    """Return the message content, for the API and for incoming webhooks.

    The title is the message's text, which a lock screen shows as well; the attachment has the body
    and the links.
    """
    blocks: list[Json] = []
    if words.body:
        # three backquotes in an alert's text would end the code block
        shown = _escaped(words.body).replace("```", "'''")
        text = "```" + headline.cut(shown, _SECTION_MAX - 6) + "```"
        blocks.append({"type": "section", "text": _markdown(text)})
    links = [_slack_link(link) for link in words.links]
    links += [f"<{_escaped(words.console)}|console>"] if words.console else []
    if links:
        blocks.append({"type": "context", "elements": [_markdown(link) for link in links]})
    attachments: list[Json] = [{"color": colour(notification), "blocks": blocks}] if blocks else []
    return {"text": _escaped(words.title), **_NO_PREVIEWS, "attachments": attachments}


def _markdown(text: str) -> Json:
    return {"type": "mrkdwn", "text": text}


def _slack_link(link: str) -> str:
    """Return a link in Slack's format; other text, such as a path, is shown as code."""
    shown = _escaped(link)
    return f"<{shown}|{_link_name(link)}>" if message.is_link(link) else f"runbook: `{shown}`"


def _link_name(link: str) -> str:
    """Return the text of a link to a runbook: `runbook of stuck`."""
    name = link.rpartition("/")[2].partition(".")[0].partition("#")[0]
    if name in {"README", "index"}:
        return "all runbooks"
    return f"runbook of {name}" if name.replace("_", "").isalnum() else "runbook"


def colour(notification: notifications.Notification) -> str:
    """Return the colour of the most urgent firing alert, or the colour for resolved alerts."""
    firing = [alert.severity for alert in notification.firing]
    order = tuple(vocabulary.Severity)
    return _COLOURS[min(firing, key=order.index)] if firing else _RESOLVED


def change_line(notification: notifications.Notification, text: message.Message) -> str:
    """Return the line about a change, for the thread of the group's message."""
    changes = {
        vocabulary.NotificationReason.NEW_ALERTS: "more alerts: ",
        vocabulary.NotificationReason.NEW_RESOLVED: "some resolved: ",
        vocabulary.NotificationReason.REPEAT: "still: ",
    }
    return f"{changes.get(notification.reason, '')}{_escaped(text.title)}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def encode_slack(notification: notifications.Notification, text: message.Message) -> bytes:
    """Return the body for an incoming webhook, which cannot edit messages."""
    return msgspec.json.encode(slack_content(notification, text))


class SlackChannel:
    """Sends notifications to one Slack channel with a bot token."""

    def __init__(
        self,
        to: endpoint.Endpoint,
        *,
        token: str,
        channel: str,
        composer: message.Composer,
        pace_s: float,
    ) -> None:
        """`to` is the API, such as https://slack.com/api; `pace_s` is the pause after a request."""
        self._endpoint = to
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json; charset=utf-8",
        }
        self._channel = channel
        self._composer = composer
        self._pace_s = pace_s

    async def send(
        self, notification: notifications.Notification, data: Mapping[str, str]
    ) -> results.Result:
        """Post the group's message, or edit it and post the change in its thread."""
        text = self._composer.compose(notification)
        content = slack_content(notification, text)
        if "ts" not in data:
            return await self._begin(content)
        where = {"channel": data.get("channel", self._channel), "ts": data["ts"]}
        reply = await self._call("chat.update", {**where, **content})
        if isinstance(reply, results.Result):
            return reply
        if answers.is_gone(reply):
            await asyncio.sleep(self._pace_s)
            return replace(await self._begin(content), requests=2)
        if not reply.ok:
            return answers.slack_result(reply)
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
            thread_reply
            if isinstance(thread_reply, results.Result)
            else answers.slack_result(thread_reply)
        )
        return replace(answer, data=where, requests=2)

    async def _begin(self, content: Json) -> results.Result:
        reply = await self._call("chat.postMessage", {"channel": self._channel, **content})
        if isinstance(reply, results.Result):
            return reply
        data = {"channel": reply.channel or self._channel, "ts": reply.ts} if reply.ts else {}
        return replace(answers.slack_result(reply), data=data)

    async def _call(self, method: str, body: Json) -> answers.SlackReply | results.Result:
        answer = await self._endpoint.request(
            "POST", below=f"/{method}", headers=self._headers, body=msgspec.json.encode(body)
        )
        if isinstance(answer, results.Result):
            return answer
        if answer.status != _OK:
            return results.of_status(answer.status, answer.headers)
        return answers.read_slack_reply(answer.body)


def teams_card(notification: notifications.Notification, message_text: message.Message) -> bytes:
    """Return the adaptive card, with as much of the text as fits."""
    lines = message_text.body.split("\n") if message_text.body else []

    def encode(count: int) -> bytes:
        shown = lines[:count]
        if count < len(lines):
            shown = [*shown, f"… {wording.counted(len(lines) - count, 'more line')}"]
        return msgspec.json.encode(_teams_message(notification, message_text, shown))

    return webhook.encode_fitting(encode, len(lines), TEAMS_BYTES_MAX)


def _teams_message(
    notification: notifications.Notification, words: message.Message, lines: list[str]
) -> Json:
    colour = "Attention" if notification.firing_ids else "Good"
    head: Json = {
        "type": "TextBlock",
        "text": words.title,
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
        for line in (
            *lines,
            *(f"runbook: {link}" for link in words.links if not message.is_link(link)),
        )
    ]
    actions: list[Json] = [
        {"type": "Action.OpenUrl", "title": _link_name(link), "url": link}
        for link in words.links
        if message.is_link(link)
    ]
    if words.console:
        actions.append({"type": "Action.OpenUrl", "title": "console", "url": words.console})
    content: Json = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [head, *rest],
        **({"actions": actions} if actions else {}),
    }
    attachment: Json = {
        "contentType": "application/vnd.microsoft.card.adaptive",
        "contentUrl": None,
        "content": content,
    }
    return {"type": "message", "attachments": [attachment]}


class Apprise:
    """Sends notifications to one Apprise URL."""

    def __init__(self, url: str, *, timeout_s: float, composer: message.Composer) -> None:
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
        self._composer = composer

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Send one notification."""
        text = self._composer.compose(message.inert(notification))
        kind = "failure" if notification.firing_ids else "success"
        try:
            async with asyncio.timeout(self._timeout_s):
                is_taken = await self._blocking.run(
                    functools.partial(
                        self._apprise.notify,
                        body=text.text,
                        title=text.title,
                        notify_type=kind,
                        # with this format, Apprise escapes the text for services that show HTML
                        body_format="text",
                    )
                )
        except TimeoutError:
            detail = f"apprise: no answer within {self._timeout_s:g} s"
            return results.Result(results.Outcome.TIMED_OUT, detail, is_unknown=True)
        if is_taken:
            return results.Result(results.Outcome.ACCEPTED, "apprise: sent")
        return results.Result(results.Outcome.FAILED, "apprise: not sent", is_unknown=True)
