"""Pure: A notification as Slack shows it: one message a group, and one line for each change of it.

Limits are Slack's (docs.slack.dev, Block Kit): 150 characters a header, 3,000 a section.
"""

from typing import Final

import msgspec

from muster import vocabulary
from muster_notifier import answers, message
from muster_notifier import notification as notifications

_HEADER_MAX: Final = 150
_SECTION_MAX: Final = 3000
_COLOURS: Final = {
    vocabulary.Severity.CRITICAL: "#d00000",
    vocabulary.Severity.WARNING: "#e8a317",
    vocabulary.Severity.INFO: "#439fe0",
}
_GOOD: Final = "#2eb67d"
_NO_ANSWER: Final = "this is no answer of its API"
_ERRORS: Final = {
    _NO_ANSWER: answers.Outcome.NONSENSE,
    "ratelimited": answers.Outcome.RATE_LIMITED,
    "internal_error": answers.Outcome.UNWELL,
    "fatal_error": answers.Outcome.UNWELL,
    "service_unavailable": answers.Outcome.UNWELL,
    "request_timeout": answers.Outcome.UNWELL,
    "invalid_auth": answers.Outcome.UNAUTHORIZED,
    "not_authed": answers.Outcome.UNAUTHORIZED,
    "token_revoked": answers.Outcome.UNAUTHORIZED,
    "channel_not_found": answers.Outcome.NOT_FOUND,
    "msg_too_long": answers.Outcome.TOO_LARGE,
}
"""All others are refusals too."""

_GONE: Final = frozenset(
    {"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found"}
)

Json = dict[str, object]


class Reply(msgspec.Struct, frozen=True):
    """What Slack's API answers."""

    ok: bool = False
    error: str = ""
    ts: str = ""
    channel: str = ""


def content(notification: notifications.Notification, words: message.Message) -> Json:
    """Return the message, for the API and for incoming webhooks alike."""
    _, _, rest = words.text.partition("\n")
    blocks: list[Json] = [
        {
            "type": "header",
            "text": {"type": "plain_text", "text": message.cut(words.title, _HEADER_MAX)},
        }
    ]
    if rest:
        # three of them in an alert's words would end the block
        shown = _escaped(rest).replace("```", "'''")
        text = "```" + message.cut(shown, _SECTION_MAX - 6) + "```"
        blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": text}})
    return {
        "text": _escaped(words.title),
        "attachments": [{"color": colour(notification), "blocks": blocks}],
    }


def colour(notification: notifications.Notification) -> str:
    """Return the colour of what still fires, or of good."""
    firing = [alert.severity for alert in notification.firing]
    order = tuple(vocabulary.Severity)
    return _COLOURS[min(firing, key=order.index)] if firing else _GOOD


def change(notification: notifications.Notification, words: message.Message) -> str:
    """Return the line in the thread that says what is new."""
    reasons = {
        vocabulary.NotificationReason.FIRST: "fires",
        vocabulary.NotificationReason.NEW_ALERTS: "more alerts fire",
        vocabulary.NotificationReason.NEW_RESOLVED: "some are resolved",
        vocabulary.NotificationReason.ALL_RESOLVED: "all is resolved",
        vocabulary.NotificationReason.REPEAT: "still fires",
        vocabulary.NotificationReason.ACKNOWLEDGED: "is silenced",
    }
    return f"{reasons[notification.reason]}: {_escaped(words.title)}"


def read(body: bytes) -> Reply:
    """Return the API's answer; an error if it is none."""
    try:
        return msgspec.json.decode(body, type=Reply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Reply(error=_NO_ANSWER)


def is_gone(reply: Reply) -> bool:
    """Tell whether the message that was to be edited is there no more."""
    return reply.error in _GONE


def meaning(reply: Reply) -> answers.Answer:
    """Return what the API's answer means."""
    if reply.ok:
        return answers.Answer(outcome=answers.Outcome.TAKEN, detail="ok")
    outcome = _ERRORS.get(reply.error, answers.Outcome.REJECTED)
    return answers.Answer(outcome=outcome, detail=f"Slack: {message.line(reply.error, 200)}")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
