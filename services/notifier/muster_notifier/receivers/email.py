"""Adapter: sends e-mail through a relay, with one SMTP connection for each mail.

The subject is the notification's title; mails about the same group form one thread.
"""

import asyncio
import contextlib
import functools
import re
import socket
import ssl
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from email import message as messages
from email import policy, utils
from typing import Final

import aiohappyeyeballs
import aiosmtplib
import prometheus_client

from muster import blocking
from muster.service import logs
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import endpoint, headline, message, results
from muster_notifier.routing import notifications

_SUBJECT_MAX: Final = 200
_POLICY: Final = policy.SMTP.clone(max_line_length=998)
_OUTCOMES: Final = {
    454: results.Outcome.NOT_TRUSTED,
    530: results.Outcome.UNAUTHORIZED,
    534: results.Outcome.UNAUTHORIZED,
    535: results.Outcome.UNAUTHORIZED,
    552: results.Outcome.TOO_LARGE,
}
_SUCCESS: Final = 2
_TEMPORARY: Final = 4
_QUIT_S: Final = 1.0
"""How long a relay may take to answer QUIT after it has accepted the mail."""
_TLS_NOT_AVAILABLE: Final = 454
_DEFERRED_MAX: Final = 1_000

_RECIPIENTS_REFUSED = prometheus_client.Counter(
    "muster_notifier_recipients_refused_total",
    "Recipients that a mail relay refused permanently.",
    ["relay"],
)

_Refusal = aiosmtplib.SMTPResponseException


class Email:
    """Sends each notification as a mail to all recipients, through one relay."""

    def __init__(
        self,
        settings: receiver_settings.Email,
        *,
        password: str,
        composer: message.Composer,
    ) -> None:
        """Raise ValueError if the certificate file cannot be used."""
        self._settings = settings
        self._password = password
        self._composer = composer
        self._where = f"{settings.host}:{settings.port}"
        _RECIPIENTS_REFUSED.labels(self._where)
        self._deferred: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """The recipients that the relay may accept later, by the notification's id."""
        self._lookups = blocking.Serial()
        self._tls: ssl.SSLContext | None = None
        if settings.tls is not receiver_settings.Tls.NONE:
            try:
                self._tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                raise ValueError(f"ca_file: {error.strerror or error}") from None

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Send one mail to all recipients; the result names the recipients that were refused.

        A retry goes only to the recipients that the relay may accept later: greylisting, for
        example, refuses every first attempt.
        """
        recipients = self._deferred.get(notification.id, self._settings.to)
        text = self._composer.compose(notification)
        mail = encode_mail(notification, text, sender=self._settings.sender, to=self._settings.to)
        endpoint.record(f"SMTP {self._where} to {', '.join(recipients)}\n{text.text}")
        attempt = _Attempt(self._settings, self._tls, self._password)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                refused = await attempt.deliver(mail, recipients, await self._connect())
            await attempt.quit()
        except (aiosmtplib.SMTPException, OSError, EOFError, ValueError) as error:
            return self._failed(error, is_sent=attempt.is_sent)
        finally:
            attempt.abort()
        return self._accepted(notification.id, refused)

    async def _connect(self) -> socket.socket:
        """Return a socket to the address that answers first.

        Slow look-ups delay only this relay.
        """
        look_up = functools.partial(
            socket.getaddrinfo, self._settings.host, self._settings.port, type=socket.SOCK_STREAM
        )
        return await aiohappyeyeballs.start_connection(
            await self._lookups.run(look_up), happy_eyeballs_delay=0.25
        )

    def _failed(self, error: Exception, *, is_sent: bool) -> results.Result:
        if isinstance(error, _Refusal) and error.code != aiosmtplib.SMTPStatus.invalid_response:
            return self._result(_outcome(error.code), _text(error))
        return endpoint.unanswered(
            _reason(error),
            where=self._where,
            timeout_s=self._settings.timeout_s,
            protocol="SMTP",
            is_sent=is_sent,
        )

    def _accepted(self, notification_id: str, refused: Mapping[str, _Refusal]) -> results.Result:
        """Return the result of a mail that was accepted for some or all recipients."""
        later = tuple(to for to, why in refused.items() if why.code // 100 == _TEMPORARY)
        never = sorted(set(refused) - set(later))
        if never:
            _RECIPIENTS_REFUSED.labels(self._where).inc(len(never))
            logs.logger().error("recipients_refused", relay=self._where, recipients=never)
        if later:
            self._deferred[notification_id] = later
            if len(self._deferred) > _DEFERRED_MAX:
                self._deferred.popitem(last=False)
            texts = (f"{to}: {_text(refused[to])}" for to in later)
            return self._result(results.Outcome.SERVER_ERROR, "; ".join(texts))
        self._deferred.pop(notification_id, None)
        unknown = f"; recipients refused: {', '.join(never)}" if never else ""
        detail = f"accepted by {self._where}{unknown}"
        return results.Result(results.Outcome.ACCEPTED, detail)

    def _result(self, outcome: results.Outcome, text: str) -> results.Result:
        return results.Result(outcome, f"{self._where}: {headline.line(text)}")


class _Attempt:
    """One attempt to deliver a mail; `is_sent` means that the whole mail was sent."""

    def __init__(
        self, settings: receiver_settings.Email, tls: ssl.SSLContext | None, password: str
    ) -> None:
        self.is_sent = False
        self._settings = settings
        self._tls = tls
        self._password = password
        self._smtp: aiosmtplib.SMTP | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def deliver(
        self, mail: bytes, recipients: Sequence[str], connected: socket.socket
    ) -> dict[str, _Refusal]:
        """Deliver a mail to at least one recipient; return the recipients that were refused.

        Raises SMTPException, OSError and ValueError.
        """
        settings = self._settings
        smtp = aiosmtplib.SMTP(
            hostname=settings.host,
            sock=connected,
            use_tls=settings.tls is receiver_settings.Tls.IMPLICIT,
            start_tls=False,
            tls_context=self._tls,
            local_hostname="muster-notifier",
            timeout=None,
        )
        self._smtp = smtp
        await smtp.connect()
        self._transport = smtp.transport
        await smtp.ehlo()
        if settings.tls is receiver_settings.Tls.STARTTLS:
            if not smtp.supports_extension("starttls"):
                text = "the relay offers no STARTTLS; nothing was sent"
                raise _Refusal(_TLS_NOT_AVAILABLE, text)
            await smtp.starttls()
            self._transport = smtp.transport
            await smtp.ehlo()
        if settings.username:
            await smtp.auth_plain(settings.username, self._password)
        await smtp.mail(_bare(settings.sender), encoding="utf-8")
        refused: dict[str, _Refusal] = {}
        for recipient in recipients:
            try:
                await smtp.rcpt(_bare(recipient), encoding="utf-8")
            except aiosmtplib.SMTPRecipientRefused as refusal:
                refused[recipient] = refusal
        if len(refused) == len(recipients):
            # if any recipient may be accepted later, the mail is retried
            raise min(refused.values(), key=lambda refusal: refusal.code)
        started = await smtp.execute_command(b"DATA")
        if started.code != aiosmtplib.SMTPStatus.start_input:
            raise aiosmtplib.SMTPDataError(started.code, started.message)
        if smtp.protocol is None:
            raise aiosmtplib.SMTPServerDisconnected("Connection lost")
        # set only now: a relay that has not requested the mail cannot have accepted it
        self.is_sent = True
        smtp.protocol.write(_dotted(mail))
        accepted = await smtp.protocol.read_response()
        if accepted.code // 100 != _SUCCESS:
            raise aiosmtplib.SMTPDataError(accepted.code, accepted.message)
        return refused

    async def quit(self) -> None:
        """Send QUIT; a relay that has accepted the mail need not answer it."""
        if self._smtp is not None:
            with contextlib.suppress(aiosmtplib.SMTPException, OSError):
                await self._smtp.quit(timeout=_QUIT_S)

    def abort(self) -> None:
        """Close the connection, even if the relay does not read."""
        if isinstance(self._transport, asyncio.WriteTransport):
            self._transport.abort()


def encode_mail(
    notification: notifications.Notification,
    text: message.Message,
    *,
    sender: str,
    to: tuple[str, ...],
) -> bytes:
    """Return the mail to send; a repeated mail has the same Message-ID."""
    domain = sender.rpartition("@")[2].rstrip(">") or "muster"
    thread = f"<group-{notifications.token(notification.group)}@{domain}>"
    mail = messages.EmailMessage(policy=_POLICY)
    mail["From"] = sender
    mail["To"] = ", ".join(to)
    # an encoded word in the text would be decoded, and could add a line feed and a header
    mail["Subject"] = headline.line(text.title, _SUBJECT_MAX).replace("=?", "= ?")
    mail["Date"] = notification.at
    mail["Message-ID"] = f"<{notification.id}@{domain}>"
    mail["In-Reply-To"] = thread
    mail["References"] = thread
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(text.text + "\n", charset="utf-8", cte="base64")
    return mail.as_bytes()


def _dotted(mail: bytes) -> bytes:
    """Return a mail in the format of DATA: leading dots doubled, and the end mark appended."""
    return re.sub(rb"(?m)^\.", b"..", mail.rstrip(b"\r\n")) + b"\r\n.\r\n"


def _outcome(code: int) -> results.Outcome:
    """Return the outcome for a relay's refusal (RFC 5321 section 4.2.1, RFC 4954 section 6)."""
    is_temporary = code // 100 == _TEMPORARY
    default = results.Outcome.SERVER_ERROR if is_temporary else results.Outcome.REJECTED
    return _OUTCOMES.get(code, default)


def _text(refusal: _Refusal) -> str:
    return f"{refusal.code} {refusal.message}"


def _reason(error: Exception) -> Exception:
    """Return the error of the standard library that matches an error, or else the error itself."""
    match error:
        case aiosmtplib.SMTPTimeoutError():
            return TimeoutError(str(error))
        case aiosmtplib.SMTPConnectError() | aiosmtplib.SMTPServerDisconnected():
            cause = error.__cause__
            return cause if isinstance(cause, ssl.SSLError) else EOFError(str(error))
        case _:
            return error


def _bare(name: str) -> str:
    """Return the address inside a text such as `muster <muster@example.com>`, on one line."""
    return "".join(utils.parseaddr(name)[1].split())
