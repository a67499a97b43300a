"""E-mail receivers against a real relay, and against relays that fail in every way."""

import asyncio
import contextlib
import email
import email.policy
import pathlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiosmtpd.smtp
import pytest

from muster.local import nats
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import email as mails
from muster_notifier.receivers import message
from muster_notifier.receivers.results import Kind, Outcome, Result
from tests.worlds.receiver_server import (
    FIRES,
    OVER,
    alert,
    make_notification,
    secret,
    sender,
)


class Mailbox:
    """What aiosmtpd gives its mails to."""

    def __init__(self) -> None:
        self.mails: list[tuple[str, list[str], bytes]] = []
        self.unknown: set[str] = set()
        self.grey: set[str] = set()
        self.refusal = ""

    async def handle_RCPT(  # noqa: N802  # aiosmtpd's name
        self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
    ) -> str:
        if address in self.grey:
            return "450 greylisted"
        if address in self.unknown:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        if self.refusal:
            return self.refusal
        self.mails.append((envelope.mail_from, envelope.rcpt_tos, envelope.content))
        return "250 OK"


@contextlib.asynccontextmanager
async def relay(
    directory: pathlib.Path, *, implicit: bool = False, **more: Any
) -> AsyncIterator[tuple[Mailbox, int, str]]:
    """Run a real SMTP server with STARTTLS and a login; give mailbox, port and certificate."""
    key, certificate = directory / "key.pem", directory / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    made = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert await made.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    mailbox = Mailbox()

    def login(_server: Any, _session: Any, _envelope: Any, _mechanism: str, login_data: Any) -> Any:
        is_right = (login_data.login, login_data.password) == (b"muster", b"pass word")
        return aiosmtpd.smtp.AuthResult(success=is_right, handled=is_right)

    def protocol() -> aiosmtpd.smtp.SMTP:
        settings: dict[str, Any] = {
            "tls_context": context,
            "require_starttls": True,
            "authenticator": login,
            "auth_required": True,
            "enable_SMTPUTF8": True,
        }
        if implicit:
            settings |= {"require_starttls": False, "auth_require_tls": False}
            settings["auth_required"] = False
        return aiosmtpd.smtp.SMTP(mailbox, **(settings | more))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0, ssl=context if implicit else None)
    try:
        yield mailbox, server.sockets[0].getsockname()[1], str(certificate)
    finally:
        server.close()
        await asyncio.sleep(0)


def by_mail(port: int, certificate: str | None, directory: pathlib.Path, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "sender": "muster <muster@example.com>",
        "to": ("ops@example.com", "ann@example.com"),
        "ca_file": certificate,
        "username": "muster",
        "password_from": secret(directory, "pass word"),
        "timeout_s": 5.0,
    }
    return sender(email=receiver_settings.Email(**(settings | more)))


def test_a_mail_goes_encrypted_to_everybody_and_its_thread_is_the_groups(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> Mailbox:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            receiver = by_mail(port, certificate, tmp_path)
            dotted = make_notification([alert(summary="ünï\r\n.code\r\n.\r\nQUIT")])
            for notification in (dotted, OVER):
                answer = await receiver.send(notification, {})
                assert answer == Result(
                    outcome=Outcome.ACCEPTED, detail=f"accepted by 127.0.0.1:{port}"
                )
            return mailbox

    mailbox = asyncio.run(story())
    assert [(who, to) for who, to, _ in mailbox.mails] == [
        ("muster@example.com", ["ops@example.com", "ann@example.com"])
    ] * 2
    first, last = [
        email.message_from_bytes(text, policy=email.policy.default) for _, _, text in mailbox.mails
    ]
    assert first["Subject"] == "node-a: ünï .code . QUIT; 1 pod holds devices, new pods fail"
    assert last["Subject"] == "Resolved after 5 min: node-a: device-plugin <is> stuck"
    assert first["References"] == last["References"]
    assert (first["Message-ID"], last["Message-ID"]) == (
        f"<{make_notification([alert(summary='')]).id}@example.com>",
        f"<{OVER.id}@example.com>",
    )
    assert first["Auto-Submitted"] == "auto-generated"
    body = last.get_content().replace("\r\n", "\n")
    assert body == message.PLAIN.compose(OVER).text + "\n"


def test_a_mail_relay_that_is_not_trusted_or_refuses_gets_no_mail(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            answer = await by_mail(port, None, tmp_path).send(FIRES, {})
            assert answer.kind is Kind.TEMPORARY
            assert "certificate is not trusted" in answer.detail
            wrong = secret(tmp_path, "wrong")
            answer = await by_mail(port, certificate, tmp_path, password_from=wrong).send(FIRES, {})
            assert answer.kind is Kind.REFUSED
            assert "535" in answer.detail
            assert "wrong" not in answer.detail
            receiver = by_mail(port, certificate, tmp_path)
            mailbox.unknown = {"ann@example.com"}
            answer = await receiver.send(FIRES, {})
            assert answer.kind is Kind.ACCEPTED
            assert answer.detail.endswith("; recipients refused: ann@example.com")
            mailbox.refusal = "452 mailbox full"
            assert (await receiver.send(FIRES, {})).kind is Kind.TEMPORARY
            mailbox.refusal = "554 spam"
            assert (await receiver.send(FIRES, {})).kind is Kind.REFUSED
            mailbox.unknown = {"ann@example.com", "ops@example.com"}
            assert (await receiver.send(FIRES, {})).kind is Kind.REFUSED
            assert len(mailbox.mails) == 1

    asyncio.run(story())


def test_a_recipient_that_the_relay_may_accept_later_is_tried_again_alone(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> Mailbox:
        async with asyncio.timeout(100), relay(tmp_path) as (mailbox, port, certificate):
            receiver = by_mail(port, certificate, tmp_path)
            mailbox.grey = {"ann@example.com"}
            answer = await receiver.send(FIRES, {})
            assert answer.outcome is Outcome.SERVER_ERROR
            assert answer.detail.endswith("ann@example.com: 450 greylisted")
            assert (await receiver.send(FIRES, {})).outcome is Outcome.SERVER_ERROR
            mailbox.grey = set()
            assert (await receiver.send(FIRES, {})).kind is Kind.ACCEPTED
            assert (await receiver.send(OVER, {})).kind is Kind.ACCEPTED
            return mailbox

    mailbox = asyncio.run(story())
    assert [to for _, to, _ in mailbox.mails] == [
        ["ops@example.com"],
        ["ann@example.com"],
        ["ops@example.com", "ann@example.com"],
    ]


def test_a_mail_relay_without_encryption_gets_no_mail(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        plain: dict[str, Any] = {
            "tls_context": None,
            "require_starttls": False,
            "auth_require_tls": False,
        }
        plain |= {"authenticator": None, "auth_required": False}
        async with asyncio.timeout(100), relay(tmp_path, **plain) as (mailbox, port, certificate):
            answer = await by_mail(port, certificate, tmp_path).send(FIRES, {})
            assert answer.kind is Kind.TEMPORARY
            assert "offers no STARTTLS" in answer.detail
            assert mailbox.mails == []

    asyncio.run(story())


def test_a_mail_goes_encrypted_from_the_start_where_that_is_set(tmp_path: pathlib.Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(100), relay(tmp_path, implicit=True) as (mailbox, port, ca):
            tls = receiver_settings.Tls.IMPLICIT
            assert (
                await by_mail(port, ca, tmp_path, tls=tls).send(FIRES, {})
            ).kind is Kind.ACCEPTED
            answer = await by_mail(port, None, tmp_path, tls=tls).send(FIRES, {})
            assert answer.outcome is Outcome.NOT_TRUSTED
            assert "certificate is not trusted" in answer.detail
            assert len(mailbox.mails) == 1

    asyncio.run(story())


@contextlib.asynccontextmanager
async def listen(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    """Run a server for one connection; give its port, and wait until it is over."""
    over = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.transport.abort()
        over.set()

    async with asyncio.timeout(30), await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await over.wait()


def test_a_text_that_looks_encoded_adds_no_header_to_a_mail() -> None:
    fires = make_notification([alert(summary="=?utf-8?q?a=0D=0ABcc:_b@example.com=0A=0Ac?=")])
    text = message.PLAIN.compose(fires)
    mail = mails.encode_mail(fires, text, sender="m@example.com", to=("a@example.com",))
    head = mail.partition(b"\r\n\r\n")[0].replace(b"\r\n", b"")
    assert b"\n" not in head
    assert b"= ?utf-8?q?a=0D=0ABcc" in head


GREETING = b"220 relay\r\n"


READY = GREETING + b"250 relay\r\n" + b"250 ok\r\n" * 3


@pytest.mark.parametrize(
    ("lines", "outcome", "is_unknown"),
    [
        (b"", Outcome.CLOSED, False),
        (b"421 busy\r\n", Outcome.SERVER_ERROR, False),
        (b"554 no\r\n", Outcome.REJECTED, False),
        (b"HTTP/1.1 400 Bad Request\r\n", Outcome.INVALID_RESPONSE, False),
        (GREETING, Outcome.CLOSED, False),
        (GREETING + b"?" * 100_000, Outcome.INVALID_RESPONSE, False),
        (GREETING + b"250 relay\r\n552 too large\r\n", Outcome.TOO_LARGE, False),
        (READY + b"354 go on\r\n", Outcome.CLOSED, True),
        (READY + b"354 go on\r\n452 full\r\n", Outcome.SERVER_ERROR, False),
        (READY + b"354 go on\r\n250 ok\r\n", Outcome.ACCEPTED, False),
    ],
)
def test_each_way_in_which_a_relay_breaks_off_has_one_meaning(
    lines: bytes,
    outcome: Outcome,
    is_unknown: bool,  # noqa: FBT001  # a parameter of the test
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_data = False
            for line in lines.splitlines(keepends=True):
                writer.write(line)
                await writer.drain()
                await reader.readuntil(b"\r\n.\r\n" if is_data else b"\r\n")
                is_data = line.startswith(b"354")
            writer.close()

        async with listen(serve) as port:
            no_tls: dict[str, Any] = {"tls": receiver_settings.Tls.NONE, "timeout_s": 5.0}
            no_tls |= {"username": "", "password_from": None}
            answer = await by_mail(port, None, tmp_path, **no_tls).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (outcome, is_unknown)
            assert answer.detail.replace(str(port), "PORT").startswith(
                "accepted by 127.0.0.1:PORT" if outcome is Outcome.ACCEPTED else "127.0.0.1:PORT: "
            )

    asyncio.run(story())


@pytest.mark.parametrize(
    ("lines", "outcome", "is_unknown"),
    [
        # nothing of the mail has been sent
        (READY, Outcome.TIMED_OUT, False),
        (GREETING + b"250 relay\r\n" + b"250 ok\r\n" * 2 + b"421 busy\r\n", Outcome.CLOSED, False),
        (READY + b"354 go on\r\n", Outcome.TIMED_OUT, True),
        # it has been accepted: sent again, people would get it twice
        (READY + b"354 go on\r\n250 ok\r\n", Outcome.ACCEPTED, False),
        (READY + b"354 go on\r\n251 ok\r\n", Outcome.ACCEPTED, False),
    ],
)
def test_a_mail_may_have_arrived_only_between_its_first_byte_and_the_answer(
    lines: bytes,
    outcome: Outcome,
    is_unknown: bool,  # noqa: FBT001  # a parameter of the test
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for line in lines.splitlines(keepends=True):
                writer.write(line)
                await writer.drain()
                await reader.readuntil(b"\r\n.\r\n" if line.startswith(b"354") else b"\r\n")
            await reader.read()

        async with listen(serve) as port:
            no_tls: dict[str, Any] = {"tls": receiver_settings.Tls.NONE, "timeout_s": 0.5}
            no_tls |= {"username": "", "password_from": None}
            answer = await by_mail(port, None, tmp_path, **no_tls).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (outcome, is_unknown)

    asyncio.run(story())


def test_a_relay_that_does_not_answer_is_waited_for_no_longer_than_set(
    tmp_path: pathlib.Path,
) -> None:
    async def story() -> None:
        async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.read()

        async with listen(serve) as port:
            answer = await by_mail(port, None, tmp_path, timeout_s=0.2).send(FIRES, {})
            assert (answer.outcome, answer.is_unknown) == (Outcome.TIMED_OUT, False)
            assert answer.detail == f"127.0.0.1:{port}: no answer within 0.2 s"

    asyncio.run(story())


def test_a_relay_nobody_can_reach_is_named(tmp_path: pathlib.Path) -> None:
    port = nats.free_port()
    answer = asyncio.run(by_mail(port, None, tmp_path).send(FIRES, {}))
    assert (answer.outcome, answer.is_unknown) == (Outcome.UNREACHABLE, False)
    answer = asyncio.run(by_mail(25, None, tmp_path, host="no.such.host.invalid").send(FIRES, {}))
    assert answer.outcome is Outcome.NO_SUCH_HOST
