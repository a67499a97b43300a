"""On a real nats-server only the leader publishes, and only for as long as it leads."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import prometheus_client
from structlog.testing import capture_logs

from muster import leadership, vocabulary
from muster.local import nats
from muster.nats import bus, consumers, leader_lock, storage, streams
from muster_health import metrics
from muster_health.bus import self_monitoring

Story = Callable[[nats.NatsServer, bus.Bus], Awaitable[None]]


def play(tmp_path: Path, story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="tests", name="test", owner=True) as on,
        ):
            await on.link.client()
            await story(server, on)

    asyncio.run(played())


def election(on: bus.Bus, name: str) -> leader_lock.Lock:
    return leader_lock.Lock(
        leader_lock.Key(on.link, streams.LEADER, "health"),
        us=leader_lock.Holder(name=name, host=name, space="1", pid=1),
        timing=leader_lock.Timing(ttl_s=2, renew_s=0.5, margin_s=0.5),
        on_change=metrics.count_leadership,
    )


def tick(term: int) -> vocabulary.WatchdogTicked:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), leader=term, holder="a", interval_s=10
    )


class Candidate(leadership.Election):
    """A candidate that leads between two terms of the candidate `b`."""

    def problem(self) -> None:
        return None

    async def _keep(self) -> None:
        self._until = float("inf")
        for self._other_leader, self._term in (("b", None), ("", 7), ("b", None)):
            await self._report()

    async def _resign(self) -> None:
        raise AssertionError("it does not lead any more")


def test_our_own_leadership_is_logged_when_it_changes_and_not_who_else_leads() -> None:
    async def played() -> None:
        async with Candidate("a", metrics.count_leadership) as candidate:
            await candidate.failed()

    with capture_logs() as lines:
        asyncio.run(played())
    assert lines == [
        {"event": "leadership_won", "log_level": "info", "term": 7},
        {"event": "leadership_lost", "log_level": "warning", "term": 7, "leader": "b"},
    ]
    assert prometheus_client.REGISTRY.get_sample_value("muster_health_is_leader") == 0


def test_only_a_leader_publishes_ticks_and_on_the_stream_of_alerts(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus) -> None:
        async def publish(event: vocabulary.WatchdogTicked, is_leader: Callable[[], bool]) -> None:
            await on.publish(event, is_leader=is_leader)

        async with election(on, "a") as a, election(on, "b") as b:
            ticking = [
                asyncio.create_task(
                    self_monitoring.publish_ticks(contender, publish, holder=name, interval_s=0.1)
                )
                for contender, name in ((a, "a"), (b, "b"))
            ]
            received: list[vocabulary.Event] = []
            since = datetime.now(UTC) - timedelta(minutes=1)
            events = consumers.follow(
                on.link, streams.ALERTS, filters=["muster.sys.>"], since=since
            )
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    received.append(event.data)
                    if len(received) == 3:
                        break
            for task in ticking:
                task.cancel()
            await asyncio.gather(*ticking, return_exceptions=True)
            (token,) = {candidate.term() for candidate in (a, b)} - {None}
        holders = {
            (e.leader, e.holder) for e in received if isinstance(e, vocabulary.WatchdogTicked)
        }
        assert len(holders) == 1
        assert {term for term, _ in holders} == {token}

    play(tmp_path, story)


def test_no_tick_is_published_while_events_cannot_be_read(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus) -> None:
        published: list[vocabulary.WatchdogTicked] = []
        is_blind = True

        async def publish(event: vocabulary.WatchdogTicked, _: Callable[[], bool]) -> None:
            published.append(event)

        checked = asyncio.Event()

        def blind() -> bool:
            checked.set()
            return is_blind

        async with election(on, "a") as leader:
            ticking = asyncio.create_task(
                self_monitoring.publish_ticks(
                    leader, publish, holder="a", interval_s=0.05, is_blind=blind
                )
            )
            await checked.wait()
            checked.clear()
            await checked.wait()
            assert published == []
            is_blind = False
            while not published:
                await asyncio.sleep(0.01)
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    play(tmp_path, story)


def test_a_former_leader_publishes_nothing_when_the_server_is_back(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus) -> None:
        leads = True
        await server.kill()
        while on.link.is_connected:
            await asyncio.sleep(0.01)
        publishing = asyncio.create_task(on.publish(tick(1), is_leader=lambda: leads))
        writing = asyncio.create_task(
            storage.put(on.link, streams.STATE, "k", b"v", is_leader=lambda: leads)
        )
        # one turn of the loop: both have begun, and wait for the server
        await asyncio.sleep(0)
        assert not publishing.done()
        assert not writing.done()
        leads = False
        await server.start()
        assert await publishing is False
        assert await writing is False
        assert await on.publish(tick(2), is_leader=lambda: True)
        published = await consumers.newest(on.link, streams.ALERTS, "muster.sys.>")
        assert [
            e.data.leader for e in published if isinstance(e.data, vocabulary.WatchdogTicked)
        ] == [2]
        assert await storage.read_all(on.link, streams.STATE) == {}

    play(tmp_path, story)
