"""Pure: A notification as an adaptive card, for a workflow of Microsoft Teams.

Teams takes 28 KB (learn.microsoft.com, format of connector cards and cards).
"""

from typing import Final

import msgspec

from muster_notifier import bodies, message
from muster_notifier import notification as notifications

BODY_BYTES_MAX: Final = 27_000

Json = dict[str, object]


def card(notification: notifications.Notification, words: message.Message) -> bytes:
    """Return the body, with as much of the text as fits."""
    _, _, text = words.text.partition("\n")
    lines = text.split("\n") if text else []

    def made(count: int) -> bytes:
        shown = lines[:count]
        if count < len(lines):
            shown = [*shown, f"… {len(lines) - count} more lines"]
        return msgspec.json.encode(_message(notification, words.title, shown))

    return bodies.fitting(made, len(lines), BODY_BYTES_MAX)


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
