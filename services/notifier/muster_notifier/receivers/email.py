"""Adapter: e-mail through a relay: one SMTP connection for each mail.

The subject names state and group; mails of one group are one thread.
"""

import asyncio
import base64
import contextlib
import re
import ssl
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email import message as messages
from email import policy, utils
from typing import Final

import prometheus_client

from muster.service import logs
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import http, message, result
from muster_notifier.routing import notifications

_SUBJECT_MAX: Final = 200
_POLICY: Final = policy.SMTP.clone(max_line_length=998)


def mail(
    notification: notifications.Notification,
    words: message.Message,
    *,
    sender: str,
    to: tuple[str, ...],
) -> bytes:
    """Return the mail as it is sent; the same news has the same Message-ID."""
    domain = sender.rpartition("@")[2].rstrip(">") or "muster"
    thread = f"<group-{notifications.token(notification.group)}@{domain}>"
    made = messages.EmailMessage(policy=_POLICY)
    made["From"] = sender
    made["To"] = ", ".join(to)
    made["Subject"] = message.line(words.title, _SUBJECT_MAX)
    made["Date"] = notification.at
    made["Message-ID"] = f"<{notification.id}@{domain}>"
    made["In-Reply-To"] = thread
    made["References"] = thread
    made["Auto-Submitted"] = "auto-generated"
    made.set_content(words.text + "\n", charset="utf-8", cte="base64")
    return made.as_bytes()


_LINE_BYTES_MAX: Final = 8192
_LINES_MAX: Final = 100
_GOOD: Final = {2, 3}
_CODES: Final = {
    454: result.Outcome.NOT_TRUSTED,
    530: result.Outcome.UNAUTHORIZED,
    534: result.Outcome.UNAUTHORIZED,
    535: result.Outcome.UNAUTHORIZED,
    552: result.Outcome.TOO_LARGE,
}
_TEMPORARY: Final = 4
_LEFT_MAX: Final = 1_000

_NOBODY = prometheus_client.Counter(
    "muster_notifier_addressees_refused_total",
    "Addressees that a mail relay did not know.",
    ["relay"],
)


class _Refused(Exception):
    """The relay said no; `code` is SMTP's."""

    def __init__(self, code: int, said: str) -> None:
        super().__init__(f"{code} {said}")
        self.code = code


class Relay:
    """One relay and the people behind it."""

    def __init__(
        self,
        settings: receiver_settings.Email,
        *,
        password: str,
        templates: receiver_settings.Templates,
    ) -> None:
        """Raise ValueError if the file of certificates cannot be used."""
        self._settings = settings
        self._password = password
        self._templates = templates
        self._left: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._names = http.Host(settings.host, settings.port)
        self._tls: ssl.SSLContext | None = None
        if settings.tls is not receiver_settings.Tls.NONE:
            try:
                self._tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                raise ValueError(f"ca_file: {error.strerror or error}") from None

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> result.Result:
        """Send one mail to everybody; whoever the relay does not know is named.

        Whom it may take later (greylisting answers so to every first try) is tried again alone.
        """
        trace, to = _Trace(), self._left.get(notification.id, self._settings.to)
        words = message.compose(notification, self._templates)
        found = self._settings
        body = mail(notification, words, sender=found.sender, to=found.to)
        where = f"{found.host}:{found.port}"
        asked = http.ASKED.get()
        if asked is not None:
            asked.append(f"SMTP {where} to {', '.join(to)}\n{words.text}")
        try:
            async with asyncio.timeout(found.timeout_s):
                left_out = await self._converse(body, to, trace)
        except _Refused as refused:
            return result.Result(
                outcome=_outcome(refused.code), detail=f"{where}: {message.line(str(refused))}"
            )
        except http.RAISED as error:
            return http.meaning(
                error,
                where=where,
                timeout_s=found.timeout_s,
                language="SMTP",
                is_sent=trace.is_sent,
            )
        return self._partly(notification.id, left_out, where)

    def _partly(self, name: str, refused: Mapping[str, _Refused], where: str) -> result.Result:
        """Return the answer to a mail that was taken for some; those who may be later are kept."""
        later = tuple(to for to, why in refused.items() if why.code // 100 == _TEMPORARY)
        never = {to: why for to, why in refused.items() if to not in later}
        if never:
            _NOBODY.labels(where).inc(len(never))
            logs.logger().error("addressees_refused", relay=where, addressees=sorted(never))
        if later:
            self._left[name] = later
            if len(self._left) > _LEFT_MAX:
                self._left.popitem(last=False)
            said = message.line("; ".join(f"{to}: {refused[to]}" for to in later))
            return result.Result(outcome=result.Outcome.UNWELL, detail=f"{where}: {said}")
        self._left.pop(name, None)
        said = f"; unknown there: {', '.join(never)}" if never else ""
        return result.Result(outcome=result.Outcome.TAKEN, detail=f"taken by {where}{said}")

    async def _converse(
        self, body: bytes, to: Sequence[str], trace: "_Trace"
    ) -> dict[str, _Refused]:
        """Deliver a mail; return the addressees that were refused, if not all were."""
        found = self._settings
        is_implicit = found.tls is receiver_settings.Tls.IMPLICIT
        reader, writer = await self._connect(self._tls if is_implicit else None)
        talk = _Talk(reader, writer)
        try:
            await talk.hear()
            offers = await talk.say("EHLO muster-notifier")
            if found.tls is receiver_settings.Tls.STARTTLS:
                assert self._tls is not None, "STARTTLS needs a context"
                if not re.search(r"(?im)^STARTTLS\b", offers):
                    raise _Refused(454, "the relay offers no STARTTLS; nothing was sent")
                await talk.say("STARTTLS")
                await writer.start_tls(self._tls, server_hostname=found.host)
                await talk.say("EHLO muster-notifier")
            if found.username:
                token = f"\0{found.username}\0{self._password}".encode()
                await talk.say(f"AUTH PLAIN {base64.b64encode(token).decode()}", shown="AUTH")
            refused = await self._address(talk, to)
            await talk.say("DATA")
            dotted = re.sub(rb"(?m)^\.", b"..", body.rstrip(b"\r\n"))
            writer.write(dotted + b"\r\n.\r\n")
            await writer.drain()
            trace.is_sent = True
            await talk.hear()
            with contextlib.suppress(OSError, _Refused, asyncio.IncompleteReadError):
                await talk.say("QUIT")
            return refused
        finally:
            writer.transport.abort()

    async def _connect(
        self, tls: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address that answers."""
        found = self._settings
        failure = OSError(f"{found.host} has no address")
        for address in await self._names.addresses():
            try:
                return await asyncio.open_connection(
                    address,
                    found.port,
                    ssl=tls,
                    server_hostname=found.host if tls else None,
                    limit=_LINE_BYTES_MAX,
                )
            except OSError as error:
                failure = error
        raise failure

    async def _address(self, talk: "_Talk", to: Sequence[str]) -> dict[str, _Refused]:
        await talk.say(f"MAIL FROM:<{_bare(self._settings.sender)}>")
        refused: dict[str, _Refused] = {}
        for name in to:
            try:
                await talk.say(f"RCPT TO:<{_bare(name)}>")
            except _Refused as said:
                refused[name] = said
        if len(refused) == len(to):
            # as long as one of them may be taken later, so may the mail
            raise min(refused.values(), key=lambda said: said.code)
        return refused


@dataclass(slots=True)
class _Trace:
    """How far a mail came."""

    is_sent: bool = False


class _Talk:
    """One conversation: a line is said, and an answer of some lines is heard."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, line: str, *, shown: str = "") -> str:
        """Say a line; return what was answered. Raises _Refused."""
        self._writer.write(line.encode() + b"\r\n")
        await self._writer.drain()
        return await self.hear(shown or line)

    async def hear(self, asked: str = "") -> str:
        """Return an answer's text. Raises _Refused."""
        said: list[str] = []
        for _ in range(_LINES_MAX):
            line = (await self._reader.readuntil(b"\n")).decode("utf-8", "replace").rstrip()
            code = int(line[:3])
            said.append(line[4:])
            if line[3:4] != "-":
                break
        else:
            raise ValueError("an answer without an end")
        if code // 100 not in _GOOD:
            about = f" to {asked.split(maxsplit=1)[0]}" if asked else ""
            raise _Refused(code, f"{' '.join(said)}{about}")
        return "\n".join(said)


def _outcome(code: int) -> result.Outcome:
    """Return what a relay's refusal means (RFC 5321 section 4.2.1, RFC 4954 section 6)."""
    later = code // 100 == _TEMPORARY
    return _CODES.get(code, result.Outcome.UNWELL if later else result.Outcome.REJECTED)


def _bare(name: str) -> str:
    """Return the address in a name such as `muster <muster@example.com>`, on one line."""
    return "".join(utils.parseaddr(name)[1].split())
