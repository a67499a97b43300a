"""Dead letters on a real nats-server: the newest first, or one by its ID."""

import asyncio
from pathlib import Path

from muster.fleet import dead_letters, writing
from muster.local import nats
from muster.nats import bus, storage, streams


async def put(owner: bus.Bus, name: str, key: str = "") -> None:
    subject = f"muster.dlq.notification.ops.0badcafe.{name}"
    await storage.enqueue(owner.link, subject, b"{}", key=key or name)


def test_the_newest_dead_letters_come_first_whatever_their_names_are(tmp_path: Path) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(60),
            nats.NatsServer(tmp_path) as server,
            bus.Bus(server.url, producer="test", name="test", owner=True) as owner,
        ):
            reading = writing.NewestLetters(owner.link, dead_letters.NOTIFICATIONS, most=2)

            async def newest() -> tuple[list[str], int]:
                letters, total = await reading.read()
                return [letter.id for letter in letters], total

            assert await newest() == ([], 0)
            for name in ("d", "c", "b"):
                await put(owner, name)
            assert await newest() == (["b", "c"], 3)
            await put(owner, "a")
            assert await newest() == (["a", "b"], 4)
            letters, total = await writing.read_dead_letters(owner.link, letter_id="b")
            assert ([(each.id, each.number) for each in letters], total) == ([("b", 3)], 1)
            await storage.remove_waiting(owner.link, streams.DEAD_LETTERS, letters[0].subject)
            assert await newest() == (["a", "c"], 3)
            # a letter that fails once more is the newest again
            await put(owner, "b", key="again")
            assert await newest() == (["b", "a"], 4)
            for unknown in ("x", ""):
                read = await writing.read_dead_letters(owner.link, letter_id=unknown)
                assert read == ([], 0)

    asyncio.run(story())
