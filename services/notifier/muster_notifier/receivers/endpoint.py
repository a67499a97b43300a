"""Adapter: sends requests to a receiver's URL, protected against request forgery (SSRF).

Every address of the URL's host is checked (`addresses`), and redirects are not followed.
"""

import contextvars
import dataclasses
import functools
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Final

import muster
from muster import http
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import addresses, answers, message, results
from muster_notifier.routing import notifications

_REFUSAL_CHARS_MAX: Final = 300

RECORDED: Final = contextvars.ContextVar[list[str] | None]("RECORDED", default=None)
"""The requests of this task, recorded for `muster notify test`."""


class Endpoint:
    """One URL; `reach` limits the addresses to which it may lead."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        reach: receiver_settings.Reach,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Raise ValueError if `url` is not an HTTP URL."""
        self._http = http.Endpoint(
            url,
            timeout_s=timeout_s,
            user_agent=f"muster-notifier/{muster.__version__}",
            check=functools.partial(addresses.refusal, reach=reach),
            tls=tls,
        )
        self._timeout_s = timeout_s
        self.where = self._http.where

    async def request(
        self,
        method: str,
        *,
        below: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        read: http.Read = http.Read.BODY,
    ) -> http.Response | results.Result:
        """Send one request; return the response, or a Result with the reason if there is none.

        `below` is added to the URL's path.
        """
        target = f"{method} {self.where}{self._http.path.rstrip('/')}{below}"
        record(f"{target}\n{body.decode('utf-8', 'replace')}")
        try:
            return await self._http.request(
                method, below=below, headers=headers, body=body, read=read
            )
        except http.ForbiddenAddress as error:
            return results.Result(results.Outcome.FORBIDDEN_ADDRESS, f"{self.where}: {error}")
        except http.Unanswered as error:
            return unanswered(
                error.reason,
                where=self.where,
                timeout_s=self._timeout_s,
                protocol="HTTP",
                is_sent=error.is_sent,
            )

    async def post_json(
        self,
        body: bytes,
        *,
        below: str = "",
        headers: Mapping[str, str] | None = None,
        reads_success: bool = False,
    ) -> results.Result:
        """Post JSON and return the result, including the text of an error response.

        With `reads_success`, a 2xx response whose body reports an error counts as a failure.
        """
        response = await self.request(
            "POST",
            below=below,
            headers={"Content-Type": "application/json", **(headers or {})},
            body=body,
            read=http.Read.BRIEF if reads_success else http.Read.REFUSAL,
        )
        if isinstance(response, results.Result):
            return response
        result = results.of_status(response.status, response.headers)
        if result.kind is results.Kind.ACCEPTED:
            refused = answers.refusal(response.body, response.status) if reads_success else None
            return refused or result
        text = " ".join(response.body[:_REFUSAL_CHARS_MAX].decode("utf-8", "replace").split())
        return dataclasses.replace(result, detail=f"{result.detail} {text}".strip())


class JsonReceiver:
    """A receiver that gets one JSON body for each notification; `encode` writes the body.

    `prepare` makes texts from other systems safe for this receiver.
    """

    def __init__(
        self,
        to: Endpoint,
        composer: message.Composer,
        encode: Callable[[notifications.Notification, message.Message], bytes],
        *,
        prepare: Callable[[notifications.Notification], notifications.Notification] | None = None,
    ) -> None:
        self._endpoint = to
        self._composer = composer
        self._encode = encode
        self._prepare = prepare

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Post one notification."""
        if self._prepare is not None:
            notification = self._prepare(notification)
        text = self._composer.compose(notification)
        body = self._encode(notification, text)
        return await self._endpoint.post_json(body, reads_success=True)


def record(request: str) -> None:
    """Add a request to `RECORDED`, if recording is on."""
    requests = RECORDED.get()
    if requests is not None:
        requests.append(request)


def unanswered(
    error: Exception, *, where: str, timeout_s: float, protocol: str, is_sent: bool
) -> results.Result:
    """Return the result of a request without a response, which is always a temporary failure.

    `is_sent` means that the whole request had been sent.
    """
    match error:
        case TimeoutError():
            outcome, detail = results.Outcome.TIMED_OUT, f"no answer within {timeout_s:g} s"
        case ssl.SSLCertVerificationError():
            outcome = results.Outcome.NOT_TRUSTED
            detail = f"its certificate is not trusted: {error.verify_message}"
        case ssl.SSLError():
            outcome, detail = results.Outcome.NOT_TRUSTED, f"TLS: {error.reason or error}"
        case socket.gaierror():
            outcome, detail = results.Outcome.NO_SUCH_HOST, error.strerror or str(error)
        case EOFError() | ConnectionResetError() | BrokenPipeError():
            outcome, detail = results.Outcome.CLOSED, "closed the connection without an answer"
        case OSError():
            outcome, detail = results.Outcome.UNREACHABLE, error.strerror or str(error)
        case _:
            outcome, detail = results.Outcome.INVALID_RESPONSE, f"the answer is not {protocol}"
    return results.Result(outcome, f"{where}: {detail}", is_unknown=is_sent)
