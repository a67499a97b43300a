"""Pure: detects refusals in the bodies of HTTP responses whose status is a success.

Slack's API answers 200 with `ok: false`. An incoming webhook of Slack answers `ok`; compatible
services answer with an empty body or with JSON. A Teams connector reports an error as text in a 200
answer (learn.microsoft.com, rate limiting for connectors). A web page comes from a captive portal
or a proxy, so the message was not delivered.
"""

import re
from typing import Final

import msgspec

from muster import codec
from muster_notifier.receivers import headline, results

_NO_RESPONSE: Final = "not a response from its API"
_ERRORS: Final = {
    _NO_RESPONSE: results.Outcome.INVALID_RESPONSE,
    "ratelimited": results.Outcome.RATE_LIMITED,
    "rate_limited": results.Outcome.RATE_LIMITED,
    "internal_error": results.Outcome.SERVER_ERROR,
    "fatal_error": results.Outcome.SERVER_ERROR,
    "rollup_error": results.Outcome.SERVER_ERROR,
    "service_unavailable": results.Outcome.SERVER_ERROR,
    "request_timeout": results.Outcome.SERVER_ERROR,
    "invalid_auth": results.Outcome.UNAUTHORIZED,
    "invalid_token": results.Outcome.UNAUTHORIZED,
    "not_authed": results.Outcome.UNAUTHORIZED,
    "token_revoked": results.Outcome.UNAUTHORIZED,
    "channel_not_found": results.Outcome.NOT_FOUND,
    "no_service": results.Outcome.NOT_FOUND,
    "channel_is_archived": results.Outcome.GONE,
    "msg_too_long": results.Outcome.TOO_LARGE,
}
"""The outcome for each of Slack's error codes; codes that are not listed are refusals."""
_GONE: Final = frozenset(
    {"message_not_found", "cant_update_message", "edit_window_closed", "thread_not_found"}
)
_WORD: Final = re.compile(r"[a-z]+(?:_[a-z]+)+")
_CONNECTOR_ERROR: Final = re.compile(r"HTTP error (\d{3})")
_TAKEN: Final = frozenset({"", "ok", "1", "true"})
_SHOWN_MAX: Final = 200


class SlackReply(msgspec.Struct, frozen=True):
    """A response from Slack's API."""

    ok: bool = False
    error: str = ""
    ts: str = ""
    channel: str = ""


class _Json(msgspec.Struct, frozen=True):
    """The JSON fields with which services report that they did not accept a message."""

    ok: bool = True
    success: bool = True
    error: object = None
    errors: object = None


def read_slack_reply(body: bytes) -> SlackReply:
    """Return the API's response; an error response if the body is unreadable."""
    try:
        return msgspec.json.decode(body, type=SlackReply)
    except codec.UNREADABLE:
        return SlackReply(error=_NO_RESPONSE)


def is_gone(reply: SlackReply) -> bool:
    """Return whether the message to edit no longer exists, or can no longer be edited."""
    return reply.error in _GONE


def slack_result(reply: SlackReply) -> results.Result:
    """Return the result of an attempt from Slack's response."""
    if reply.ok:
        return results.Result(results.Outcome.ACCEPTED, "ok")
    outcome = _ERRORS.get(reply.error, results.Outcome.REJECTED)
    return results.Result(outcome, f"Slack: {headline.line(reply.error, _SHOWN_MAX)}")


def refusal(body: bytes, status: int) -> results.Result | None:
    """Return why a message was not accepted, from a 2xx answer; None if it was accepted."""
    text = body.decode("utf-8", "replace").strip()
    shown = headline.line(text, _SHOWN_MAX)
    if text.lower() in _TAKEN:
        return None
    if failed := _CONNECTOR_ERROR.search(text):
        result = results.of_status(int(failed[1]), {})
        return results.Result(result.outcome, f"answered {status} with: {shown}")
    if _WORD.fullmatch(text):
        outcome = _ERRORS.get(text, results.Outcome.REJECTED)
        return results.Result(outcome, f"answered {status} with: {shown}")
    try:
        answer = msgspec.json.decode(body, type=_Json)
    except codec.UNREADABLE:
        detail = f"answered {status}, but with an unexpected body: {shown}"
        return results.Result(results.Outcome.INVALID_RESPONSE, detail)
    if answer.ok and answer.success and not answer.error and not answer.errors:
        return None
    return results.Result(
        _ERRORS.get(str(answer.error), results.Outcome.REJECTED),
        f"answered {status} with: {shown}",
    )
