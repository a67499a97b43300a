"""The leader lock on a real nats-server: one leads, the next takes over, a zombie stays silent."""

import asyncio
import contextlib
import functools
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from muster import buckets, bus, consumers, streams, vocabulary
from muster.local import nats
from muster_health import leader, signals, watchdog

PROGRAM: Final = Path(__file__).resolve().parents[1] / "programs" / "leading.py"
TERMS: Final = leader.Terms(ttl_s=2, renew_s=0.5, margin_s=0.5)


class Acts:
    """Who acted as which revision, in the order in which the server had it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._came = asyncio.Condition()

    async def take(self, _: str, said: bytes) -> None:
        name, revision = said.decode().split()
        async with self._came:
            self.seen.append((name, int(revision)))
            self._came.notify_all()

    async def of(self, name: str) -> None:
        """Wait until `name` acts, from now on."""
        known = len(self.seen)
        async with self._came:
            await self._came.wait_for(lambda: any(n == name for n, _ in self.seen[known:]))

    def leaders(self) -> list[tuple[str, int]]:
        return [who for who, _ in itertools.groupby(self.seen)]


Story = Callable[[nats.NatsServer, bus.Bus, Acts], Awaitable[None]]


def play(tmp_path: Path, story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(30),
            nats.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="tests", name="test", owner=True) as ear,
        ):
            acts = Acts()
            await ear.link.client()
            await ear.listen("acted", acts.take)
            await story(server, ear, acts)

    asyncio.run(played())


@contextlib.asynccontextmanager
async def process(server: nats.NatsServer, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    terms = (TERMS.ttl_s, TERMS.renew_s, TERMS.margin_s)
    running = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), server.url, name, *map(str, terms)
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


def lock(on: bus.Bus) -> leader.Lock:
    return leader.Lock(
        functools.partial(buckets.claim, on.link, streams.LEADER, "test"),
        functools.partial(buckets.release, on.link, streams.LEADER, "test"),
    )


def test_the_next_leads_soon_after_the_leader_was_killed(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, _: bus.Bus, acts: Acts) -> None:
        async with process(server, "a") as a:
            await acts.of("a")
            async with process(server, "b"):
                a.kill()
                async with asyncio.timeout(TERMS.ttl_s + 2):
                    await acts.of("b")
        (first, low), (second, high) = acts.leaders()
        assert (first, second) == ("a", "b")
        assert low < high

    play(tmp_path, story)


def test_a_leader_that_was_stopped_acts_no_more_when_it_goes_on(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, _: bus.Bus, acts: Acts) -> None:
        async with process(server, "a") as a:
            await acts.of("a")
            async with process(server, "b"):
                a.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(TERMS.ttl_s + 2):
                    await acts.of("b")
                a.send_signal(signal.SIGCONT)
                # two renewals of `a`: it has asked again, and was refused
                await asyncio.sleep(3 * TERMS.renew_s)
                await acts.of("b")
        assert [name for name, _ in acts.leaders()] == ["a", "b"]

    play(tmp_path, story)


def test_a_leader_that_ends_in_order_leaves_the_lock_to_the_next_at_once(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        terms = leader.Terms(ttl_s=60, renew_s=0.5, margin_s=1)
        async with leader.Leader(lock(on), name="b", terms=terms) as b:
            changes = b.follow()
            assert await anext(changes) == signals.Leadership(revision=None)
            first = await anext(changes)
        assert first.revision is not None
        assert b.revision() is None
        assert await anext(changes) == signals.Leadership(revision=None)
        async with asyncio.timeout(2), leader.Leader(lock(on), name="c", terms=terms) as c:
            async for now in c.follow():
                if now.revision is not None:
                    assert now.revision > first.revision
                    break
            assert c.holder == "c"

    play(tmp_path, story)


def test_leading_ends_when_the_server_goes_and_begins_anew_when_it_is_back(
    tmp_path: Path,
) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus, _: Acts) -> None:
        async with leader.Leader(lock(on), name="a", terms=TERMS) as a:
            changes = a.follow()
            assert (await anext(changes)).revision is None
            first = (await anext(changes)).revision
            assert first is not None
            await server.kill()
            assert await anext(changes) == signals.Leadership(revision=None)
            await server.start()
            again = (await anext(changes)).revision
            assert again is not None
            assert again > first

    play(tmp_path, story)


def test_a_renewal_that_came_through_unanswered_loses_nothing(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        lose = False

        async def claim(
            value: bytes, *, ttl_s: int, revision: int, timeout_s: float
        ) -> streams.Claimed:
            nonlocal lose
            found = await buckets.claim(
                on.link,
                streams.LEADER,
                "test",
                value,
                ttl_s=ttl_s,
                revision=revision,
                timeout_s=timeout_s,
            )
            if lose:
                lose = False
                raise TimeoutError
            answers.put_nowait(found)
            return found

        answers: asyncio.Queue[streams.Claimed] = asyncio.Queue()
        deaf = leader.Lock(claim, lock(on).release)
        async with leader.Leader(deaf, name="a", terms=TERMS) as a:
            assert (await answers.get()).written
            first = a.revision()
            assert first is not None
            lose = True
            # refused, because our own lost renewal is newer; then renewed
            assert [(await answers.get()).written for _ in range(2)] == [False, True]
            assert a.revision() == first

    play(tmp_path, story)


def test_one_leads_of_many_that_ask_at_once(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        async with contextlib.AsyncExitStack() as stack:
            asking = [
                await stack.enter_async_context(leader.Leader(lock(on), name=str(n), terms=TERMS))
                for n in range(8)
            ]
            while not all(one.holder for one in asking):
                await asyncio.sleep(0)
            assert len([one for one in asking if one.revision() is not None]) == 1
            assert len({one.holder for one in asking}) == 1

    play(tmp_path, story)


def tick(leading: int) -> vocabulary.WatchdogTicked:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), leader=leading, holder="a", interval_s=10
    )


def test_a_leader_ticks_where_alerts_go_and_nobody_else_does(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        async def publish(event: vocabulary.WatchdogTicked, still: Callable[[], bool]) -> None:
            await on.publish(event, still=still)

        async with (
            leader.Leader(lock(on), name="a", terms=TERMS) as a,
            leader.Leader(lock(on), name="b", terms=TERMS) as b,
        ):
            ticking = [
                asyncio.create_task(watchdog.tick(one, publish, holder=name, interval_s=0.1))
                for one, name in ((a, "a"), (b, "b"))
            ]
            heard: list[vocabulary.Event] = []
            since = datetime.now(UTC) - timedelta(minutes=1)
            events = consumers.follow(
                on.link, streams.ALERTS, filters=["muster.sys.>"], since=since
            )
            async with contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    heard.append(event.data)
                    if len(heard) == 3:
                        break
            for task in ticking:
                task.cancel()
            await asyncio.gather(*ticking, return_exceptions=True)
            (token,) = {one.revision() for one in (a, b)} - {None}
        holders = {(e.leader, e.holder) for e in heard if isinstance(e, vocabulary.WatchdogTicked)}
        assert len(holders) == 1
        assert {leading for leading, _ in holders} == {token}

    play(tmp_path, story)


def test_what_is_no_longer_ours_is_not_published_when_the_server_is_back(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus, _: Acts) -> None:
        leads = True
        await server.kill()
        publishing = asyncio.create_task(on.publish(tick(1), still=lambda: leads))
        writing = asyncio.create_task(
            buckets.remember(on.link, streams.STATE, "k", b"v", still=lambda: leads)
        )
        await asyncio.sleep(0.1)
        leads = False
        await server.start()
        assert await publishing is False
        assert await writing is False
        assert await on.publish(tick(2), still=lambda: True)
        kept = await consumers.newest(on.link, streams.ALERTS, "muster.sys.>")
        assert [e.data.leader for e in kept if isinstance(e.data, vocabulary.WatchdogTicked)] == [2]
        assert await buckets.recall(on.link, streams.STATE) == {}

    play(tmp_path, story)
