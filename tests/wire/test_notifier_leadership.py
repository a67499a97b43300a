"""Of two notifiers only one acts; one that was suspended meanwhile no longer does."""

import asyncio
import contextlib
import pathlib
import signal
from collections.abc import Awaitable, Callable

import aiohttp
import nats.js.errors
import orjson

from muster.local import processes
from tests.worlds import receivers, webhook_sink


class Pair:
    """Two notifiers of the same settings, on one NATS server."""

    def __init__(self, world: webhook_sink.World, sent: webhook_sink.Sink) -> None:
        self.world = world
        self.sink = sent
        self.both: list[processes.Process] = []
        self.names: list[str] = []

    async def start(self, name: str, *, patience_s: float | None = None) -> processes.Process:
        file = self.world.directory / f"{name}.json"
        receiver = {"name": "hook", "webhook": {"url": self.sink.url, "reach": "loopback"}}
        settings: dict[str, object] = {
            "bus": {"url": self.world.server.url},
            "receivers": [receiver],
            "group_wait_s": 0,
            "group_interval_s": 0.1,
            "watchdog": {"enabled": patience_s is not None, "patience_s": patience_s or 60.0},
            "acting": {"ttl_s": 1, "renew_s": 0.3},
        }
        file.write_bytes(orjson.dumps(settings))
        program = processes.Program("notifier", "muster_notifier", ("--config", str(file)))
        made = processes.Process(program, self.world.directory / f"{name}.log")
        await made.start()
        self.both.append(made)
        self.names.append(name)
        return made

    async def notified_of(self, number: int) -> None:
        """Publish an alert with this number; return once its notification was delivered."""
        await self.world.says(number, "firing", node=f"node-{number}")
        group = f'{{}}:{{kind="stuck",node="node-{number}"}}'
        await self.sink.wait_for(lambda taken: any(message.group == group for message in taken), 15)
        while sum(self.log(name).count("notification_delivered") for name in self.names) < number:
            await asyncio.sleep(0.02)  # another process writes the log

    async def get(self, process: processes.Process, path: str) -> bytes:
        """Return a page of a notifier."""
        return await page(process, path)

    def log(self, name: str) -> list[str]:
        lines = (self.world.directory / f"{name}.log").read_text().splitlines()
        return [str(orjson.loads(line)["event"]) for line in lines]

    async def logs(self, name: str, event: str) -> None:
        while event not in self.log(name):  # another process writes the log
            await asyncio.sleep(0.02)


async def page(process: processes.Process, path: str) -> bytes:
    """Return a page of a notifier."""
    url = process.addresses["http"] + path
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        return await response.read()


def play(story: Callable[[Pair], Awaitable[None]], directory: pathlib.Path) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            webhook_sink.sink() as sent,
            webhook_sink.world(directory) as world,
        ):
            pair = Pair(world, sent)
            try:
                await story(pair)
            finally:
                for notifier in pair.both:
                    await notifier.kill()

    asyncio.run(played())


def test_of_two_notifiers_one_leads_and_the_other_takes_over(tmp_path: pathlib.Path) -> None:
    async def story(pair: Pair) -> None:
        first = await pair.start("first")
        await pair.notified_of(1)
        second = await pair.start("second")
        await pair.logs("second", "standing_by")
        # rollouts and evictions wait until both are ready
        assert [await pair.get(notifier, "/readyz") for notifier in (first, second)] == [
            b"ok\n"
        ] * 2
        states = [orjson.loads(await pair.get(notifier, "/state")) for notifier in (first, second)]
        assert [state["acts"] for state in states] == [True, False]
        await pair.notified_of(2)
        await pair.notified_of(3)
        await first.kill()
        await pair.notified_of(4)
        assert "leadership_won" in pair.log("second")
        await pair.start("third")
        await pair.logs("third", "standing_by")
        await second.end()
        await pair.notified_of(5)
        assert len({message.key for message in pair.sink.taken}) == len(pair.sink.taken) == 5

    play(story, tmp_path)


def test_a_notifier_that_was_suspended_meanwhile_no_longer_acts(tmp_path: pathlib.Path) -> None:
    async def story(pair: Pair) -> None:
        first = await pair.start("first")
        await pair.notified_of(1)
        first.signal(signal.SIGSTOP)
        await pair.start("second")
        await pair.notified_of(2)
        first.signal(signal.SIGCONT)
        await first.wait()
        assert pair.log("first")[-1] == "another_notifier_leads"
        await pair.notified_of(3)
        assert len({message.key for message in pair.sink.taken}) == len(pair.sink.taken) == 3

    play(story, tmp_path)


def test_a_notifier_whose_lock_is_lost_reports_it_and_leads_again_once_it_is_back(
    tmp_path: pathlib.Path,
) -> None:
    async def story(pair: Pair) -> None:
        notifier = await pair.start("first")
        await pair.notified_of(1)
        link = pair.world.voice.link
        client = await link.client()
        events = b""
        while not events.startswith(b"the lock has been unreachable for 1 s: nats: "):
            # its owner creates it again at the next check
            with contextlib.suppress(nats.js.errors.NotFoundError):
                await client.jetstream().delete_stream("KV_muster_tenure")
            events = await pair.get(notifier, "/readyz")
        await link.prepare(client)
        await pair.notified_of(2)
        assert await pair.get(notifier, "/readyz") == b"ok\n"
        assert len({message.key for message in pair.sink.taken}) == len(pair.sink.taken) == 2

    play(story, tmp_path)


def test_receivers_hear_once_that_nats_is_lost_and_once_that_it_is_back(
    tmp_path: pathlib.Path,
) -> None:
    def of_outage(pair: Pair) -> list[tuple[str, int]]:
        messages = [each for each in pair.sink.taken if each.group.startswith("without NATS:")]
        return [(message.reason, len(message.firing)) for message in messages]

    async def story(pair: Pair) -> None:
        await pair.start("first", patience_s=2.0)
        await pair.notified_of(1)
        await pair.start("second", patience_s=2.0)
        await pair.logs("second", "standing_by")
        await pair.world.server.kill()
        await pair.sink.wait_for(lambda _: bool(of_outage(pair)), 30)
        third = await pair.start("third", patience_s=2.0)
        await pair.logs("first", "nats_lost")
        await pair.world.server.start()
        await pair.sink.wait_for(lambda _: len(of_outage(pair)) > 1, 30)
        await third.end()
        assert of_outage(pair) == [("first", 1), ("all_resolved", 0)]
        assert "nats_lost" not in pair.log("second") + pair.log("third")

    play(story, tmp_path)


def test_every_kind_of_receiver_hears_of_the_loss_of_nats(tmp_path: pathlib.Path) -> None:
    ways = ("webhook", "slack", "pagerduty", "email")

    async def story() -> None:
        async with (
            asyncio.timeout(100),
            receivers.services() as services,
            webhook_sink.world(tmp_path) as world,
        ):
            settings = services.receivers(tmp_path / "secret")
            file = tmp_path / "notifier.json"
            file.write_bytes(
                orjson.dumps(
                    {
                        "bus": {"url": world.server.url},
                        "receivers": [each for each in settings if each["name"] in ways],
                        "watchdog": {"patience_s": 3.0},
                        "acting": {"ttl_s": 1, "renew_s": 0.3},
                    }
                )
            )
            program = processes.Program("notifier", "muster_notifier", ("--config", str(file)))
            notifier = processes.Process(program, tmp_path / "notifier.log")
            await notifier.start()
            try:
                while b'"acts":true' not in await page(notifier, "/state"):
                    await asyncio.sleep(0.02)  # polls another process
                await world.server.kill()
                await services.wait_for(lambda heard: len(heard.heard) == len(ways), 30)
                await world.server.start()
                await services.wait_for(lambda heard: len(heard.heard) == 2 * len(ways), 30)
            finally:
                await notifier.end()
            heard = [(each.way, each.node, each.fires) for each in services.heard]
            assert sorted(heard[:4]) == sorted((way, "nats", True) for way in ways)
            assert sorted(heard[4:]) == sorted((way, "nats", False) for way in ways)

    asyncio.run(story())
