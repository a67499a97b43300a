"""The gate where NATS has passwords: a token binds a plugin to its node there, too."""

import asyncio
import time
from pathlib import Path

import nats.errors
import pytest

from muster_gate import issuer
from tests.worlds import bus_subjects, nats_with_gate, nats_with_passwords, token_issuer


def token(node: str = "node-a") -> str:
    return token_issuer.token(token_issuer.claims(node, at=time.time()), "e1", "ES256")


def test_each_node_has_a_token_and_each_service_a_password(tmp_path: Path) -> None:
    async def story() -> None:
        async with asyncio.timeout(60), nats_with_passwords.running(tmp_path) as (server, gate):

            async def plugin(text: str) -> None:
                url, prefix = server.url, "_INBOX.plugin_node-a"
                async with (
                    bus_subjects.client(url, token=text, inbox_prefix=prefix) as client,
                    nats_with_passwords.user(server, "admin") as admin,
                ):
                    published = ["muster.heartbeat.node-b.device-plugin", *bus_subjects.OWN]
                    published += bus_subjects.WRITES
                    await bus_subjects.check_publishing(published, hearing=admin, plugin=client)

            while True:
                try:
                    await plugin(token())
                    break
                except (nats.errors.Error, TimeoutError):
                    # the gate may not be connected yet
                    await asyncio.sleep(0.05)
            for wrong in (nats_with_gate.token(key="k1"), "x"):
                with pytest.raises(nats.errors.Error, match="Authorization Violation"):
                    await plugin(wrong)
            for name in ("health", "gate", "plugin", "plugin_node-a"):
                with pytest.raises(nats.errors.Error, match="Authorization Violation"):
                    async with nats_with_passwords.user(server, name, "wrong"):
                        pass
            await bus_subjects.check_limits(
                lambda: bus_subjects.client(server.url, token=token("node-a"))
            )
            await flood(server.url)
            # this event loop copies the gate's log, perhaps after it sees the connection end
            await bus_subjects.until(lambda: b'"node_limited"' in gate.log.read_bytes())

    async def flood(url: str) -> None:
        async with bus_subjects.client(url, token=token("node-c")) as noisy:
            for _ in range(500):
                await noisy.raw.publish("muster.heartbeat.node-c.device-plugin", b"")
            await bus_subjects.until(lambda: noisy.raw.is_closed)

    asyncio.run(story())


def test_the_issuer_is_that_of_the_password_and_a_mistake_gets_one_line(tmp_path: Path) -> None:
    password, file = tmp_path / "password", tmp_path / "issuer.conf"

    def mistake(*arguments: str) -> str:
        with pytest.raises(SystemExit) as error:
            issuer.main(["issuer", *arguments])
        return str(error.value)

    assert mistake() == "usage: python -m muster_gate.issuer PASSWORD FILE"
    assert mistake(str(password), str(file)) == f"{password}: No such file or directory"
    password.write_text("SECRET")
    short = f"{password}: a password of fewer than 32 characters could be guessed"
    assert mistake(str(password), str(file)) == short
    written = set()
    for text in (nats_with_passwords.PASSWORD, nats_with_passwords.PASSWORD + "\n", "y" * 32):
        password.write_text(text)
        issuer.main(["issuer", str(password), str(file)])
        written.add(file.read_text())
    assert [line.startswith("NATS_GATE_ISSUER: A") for line in written] == [True, True]
