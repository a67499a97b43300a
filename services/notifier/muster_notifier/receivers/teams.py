"""Adapter: Microsoft Teams: sends an adaptive card to a workflow.

Teams accepts 28 KB (learn.microsoft.com, format of connector cards and cards).
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from muster_notifier.config import receiver_settings
from muster_notifier.receivers import endpoint, message, results, webhook
from muster_notifier.routing import notifications

BODY_BYTES_MAX: Final = 27_000

Json = dict[str, object]


def card(notification: notifications.Notification, message_text: message.Message) -> bytes:
    """Return the body, with as much of the text as fits."""
    _, _, text = message_text.text.partition("\n")
    lines = text.split("\n") if text else []

    def encode(count: int) -> bytes:
        shown = lines[:count]
        if count < len(lines):
            shown = [*shown, f"… {len(lines) - count} more lines"]
        return msgspec.json.encode(_message(notification, message_text.title, shown))

    return webhook.encode_fitting(encode, len(lines), BODY_BYTES_MAX)


def _message(notification: notifications.Notification, title: str, lines: list[str]) -> Json:
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


class Workflow:
    """Sends to the URL of one workflow."""

    def __init__(self, to: endpoint.Endpoint, templates: receiver_settings.Templates) -> None:
        self._endpoint = to
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Post a card."""
        text = message.compose(notification, self._templates)
        return await self._endpoint.post_json(card(notification, text))
