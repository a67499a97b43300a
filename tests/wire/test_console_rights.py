"""The rights of the role `console` on a real nats-server, by password and by credentials."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from muster import matching, vocabulary
from muster.fleet import writing
from muster.local import nats as local
from muster.nats import bus, connection, consumers, storage, streams
from muster_console import acts, identities
from tests.worlds import bus_subjects, nats_with_gate, shipped_nats

ANN: Final = identities.Identity("ann@example.com", identities.Kind.OIDC)
LETTER: Final = "muster.dlq.notification.ops.0badcafe.0123456789abcdef"
NAMES: Final = [each.name for each in streams.STREAMS] + [
    f"KV_{each.name}" for each in streams.BUCKETS
]
DENIED: Final = [
    *(subject for subject in bus_subjects.WRITES if "muster_silences" not in subject),
    *("$KV.muster_ledger.a", "$KV.muster_tenure.notifier"),
    *("muster.notification.ops.x", "muster.dlq.notification.ops.x.y", "muster.label.node-a.x"),
    *("muster.sys.x.watchdog.ticked", "muster.rpc.node-a.device-plugin.probe", "muster.cmd.x"),
    *("muster.heartbeat.node-a.device-plugin", "muster.inventory.node-a.device-plugin.0"),
    "muster.event.node-a.device-plugin.device.added",
    *(f"$JS.API.STREAM.{verb}.{n}" for n in NAMES for verb in ("CREATE", "UPDATE", "DELETE")),
    *(f"$JS.API.STREAM.PURGE.{n}" for n in NAMES if n != streams.DEAD_LETTERS.name),
    *(f"$JS.API.STREAM.MSG.DELETE.{n}" for n in NAMES),
    *("$JS.API.CONSUMER.MSG.NEXT.MUSTER_OUTBOX.receiver-ops", "$JS.API.CONSUMER.LIST.MUSTER_AUDIT"),
]
WIDE: Final = (">", "muster.>", "muster.rpc.>", "muster.outbox.>", "_INBOX.>", "_INBOX.health.>")


class World:
    """A nats-server with the users that an installation has."""

    def __init__(self, server: local.NatsServer, keys: Path | None) -> None:
        self._server = server
        self._keys = keys

    @contextlib.asynccontextmanager
    async def bus(self, user: str) -> AsyncIterator[bus.Bus]:
        """Connect as a user with muster's code."""
        url = shipped_nats.address(self._server, user)
        with pytest.MonkeyPatch.context() as patch:
            if self._keys:
                url = self._server.url
                patch.setenv("NATS_CREDS", str(self._keys / f"{user}.creds"))
            async with bus.Bus(url, producer="t", name=user, owner=user == "health") as connected:
                await connected.link.client()
                yield connected

    def raw(self, user: str) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
        """Connect as a user without muster's code."""
        if self._keys is None:
            return shipped_nats.client(self._server, user)
        return nats_with_gate.holder(self._server, (self._keys / f"{user}.creds").read_text())


@contextlib.asynccontextmanager
async def world(where: Path, by: str) -> AsyncIterator[World]:
    """Run a server with muster's streams, whose users have passwords or credentials."""
    async with asyncio.timeout(100), contextlib.AsyncExitStack() as stack:
        if by == "password":
            server = local.NatsServer(where / "nats", config=shipped_nats.configuration(where))
            made = World(await stack.enter_async_context(server), None)
        else:
            shown = await stack.enter_async_context(nats_with_gate.World(where, gates=0))
            made = World(shown.server, shown.keys)
        async with made.bus("health"):
            pass
        yield made


@pytest.mark.parametrize("by", ["password", "credentials"])
def test_the_console_performs_every_act_with_only_its_own_rights(tmp_path: Path, by: str) -> None:
    async def story() -> None:
        async with world(tmp_path, by) as shown:
            async with shown.bus("notifier") as notifier:
                headers = {"Muster-Receiver": "ops", "Muster-Error": "HTTP 500"}
                await storage.enqueue(notifier.link, LETTER, b"{}", key="letter", headers=headers)
            async with shown.bus("console") as console:
                now = datetime.now(UTC)
                silence = matching.new_silence(
                    *("0123456789ab", ["node=node-a"]),
                    starts_at=now, lasts=timedelta(hours=1), author=ANN.name, comment="new disk",
                )  # fmt: skip
                performed = acts.Acts(console)
                await performed.silence(ANN, silence)
                await performed.expire(ANN, silence.id)
                await performed.send_again(ANN, "0123456789ab")
                await console.flush(30)
                silences, _ = await writing.read_silences(console.link)
                assert silences[silence.id].ends_at < silence.ends_at
                assert await writing.read_dead_letters(console.link) == ([], 0)
                acted = await events(console, now - timedelta(minutes=1), count=3)
                assert [(each.actor, each.act.value, each.outcome.value) for each in acted] == [
                    (ANN.name, act, "done") for act in ("silence", "expire_silence", "send_again")
                ]
            async with shown.bus("notifier") as notifier:
                waiting = await storage.waiting_messages(
                    notifier.link, streams.OUTBOX, "muster.outbox.>"
                )
                assert len(waiting) == 1

    before = violations()
    asyncio.run(story())
    assert violations() == before


async def events(reader: bus.Bus, since: datetime, *, count: int) -> list[vocabulary.OperatorActed]:
    """Return the first `count` audit events after a time."""
    acted: list[vocabulary.OperatorActed] = []
    async for event in consumers.follow(
        reader.link, streams.AUDIT, filters=streams.AUDIT.subjects, since=since
    ):
        assert isinstance(event.data, vocabulary.OperatorActed)
        acted.append(event.data)
        if len(acted) == count:
            break
    return acted


def violations() -> float:
    return float(connection._ERRORS.labels("Error")._value.get())


@pytest.mark.parametrize("by", ["password", "credentials"])
def test_the_console_can_do_no_more_than_its_acts(tmp_path: Path, by: str) -> None:
    async def story() -> None:
        async with world(tmp_path, by) as shown, shown.raw("console") as console:
            for subject in DENIED:
                await console.raw.publish(subject, b"{}")
            for subject in WIDE:
                await console.raw.subscribe(subject)
            await console.flush()
            await bus_subjects.until(lambda: len(console.refused) == len(DENIED) + len(WIDE))
            refused = "\n".join(console.refused)
            assert [s for s in (*DENIED, *WIDE) if f'"{s.lower()}"' not in refused] == []

    asyncio.run(story())
