"""The lock on a real nats-server: one holds it, the next takes over, a zombie stays silent."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from muster import bus, lock, streams
from muster.local import nats

PROGRAM: Final = Path(__file__).resolve().parents[1] / "programs" / "leading.py"
TERMS: Final = lock.Terms(ttl_s=2, renew_s=0.5, margin_s=0.5)
WITHOUT_END: Final = lock.Terms(ttl_s=60, renew_s=0.5, margin_s=1)


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

    def holders(self) -> list[tuple[str, int]]:
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
async def process(
    server: nats.NatsServer, name: str, terms: lock.Terms = TERMS
) -> AsyncIterator[asyncio.subprocess.Process]:
    numbers = (terms.ttl_s, terms.renew_s, terms.margin_s)
    running = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), server.url, name, *map(str, numbers)
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


def key(on: bus.Bus) -> lock.Key:
    return lock.key(on.link, streams.LEADER, "test")


def of(on: lock.Key, name: str, terms: lock.Terms = TERMS) -> lock.Lock:
    """Ask for the lock as a machine of this name."""
    us = lock.Holder(name=name, host=name, space="1", pid=1)
    return lock.Lock(on, us=us, terms=terms, told=lambda _, __: None)


async def held(asking: lock.Lock) -> int:
    async for revision in asking.follow():
        if revision is not None:
            return revision
    raise AssertionError("it follows for ever")


def test_on_the_same_machine_the_next_holds_it_as_soon_as_the_holder_is_gone(
    tmp_path: Path,
) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus, acts: Acts) -> None:
        async with process(server, "a", WITHOUT_END) as a:
            await acts.of("a")
            async with lock.Lock(
                key(on), us=lock.this("b"), terms=TERMS, told=lambda _, __: None
            ) as b:
                while b.standing.holder != f"a ({socket.gethostname()}, process {a.pid})":
                    await asyncio.sleep(0)
                a.kill()
                await a.wait()
                async with asyncio.timeout(5):
                    assert await held(b) > acts.seen[-1][1]

    play(tmp_path, story)


def test_of_another_machine_the_holder_is_waited_for_as_long_as_its_claim_lasts(
    tmp_path: Path,
) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        other = await key(on).claim(b"of an older version", ttl_s=1, revision=0, timeout_s=1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with of(key(on), "b") as b:
            assert await held(b) > other.revision
            assert loop.time() - begun > 0.5
            assert b.standing.holder == "b (b, process 1)"

    play(tmp_path, story)


def test_a_holder_that_was_stopped_acts_no_more_when_it_goes_on(tmp_path: Path) -> None:
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
        (first, low), (second, high) = acts.holders()
        assert (first, second) == ("a", "b")
        assert low < high

    play(tmp_path, story)


def test_who_ends_in_order_leaves_the_lock_to_the_next_at_once(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        told: list[tuple[lock.Standing, lock.Standing]] = []
        us = lock.Holder(name="b", host="b", space="1", pid=1)
        b = lock.Lock(key(on), us=us, terms=WITHOUT_END, told=lambda *both: told.append(both))
        async with b:
            changes = b.follow()
            assert await anext(changes) is None
            revision = await anext(changes)
        assert revision is not None
        assert b.revision() is None
        assert not b.still(revision)
        assert await anext(changes) is None
        nobody = lock.Standing(holder="", revision=None)
        ours = lock.Standing(holder="b (b, process 1)", revision=revision)
        over = lock.Standing(holder="b (b, process 1)", revision=None)
        assert told == [(nobody, ours), (ours, over)]
        async with asyncio.timeout(2), of(key(on), "c", WITHOUT_END) as c:
            assert await held(c) > revision

    play(tmp_path, story)


def test_it_is_lost_when_the_server_goes_and_held_anew_when_it_is_back(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer, on: bus.Bus, _: Acts) -> None:
        async with of(key(on), "a") as a:
            first = await held(a)
            changes = a.follow()
            assert await anext(changes) == first
            await server.kill()
            assert await anext(changes) is None
            await server.start()
            again = await anext(changes)
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
            found = await key(on).claim(value, ttl_s=ttl_s, revision=revision, timeout_s=timeout_s)
            if lose:
                lose = False
                raise TimeoutError
            answers.put_nowait(found)
            return found

        answers: asyncio.Queue[streams.Claimed] = asyncio.Queue()
        deaf = lock.Key(claim=claim, release=key(on).release)
        async with of(deaf, "a") as a:
            assert (await answers.get()).written
            first = a.revision()
            assert first is not None
            lose = True
            # refused, because our own lost renewal is newer; then renewed
            assert [(await answers.get()).written for _ in range(2)] == [False, True]
            assert a.revision() == first

    play(tmp_path, story)


def test_one_holds_it_of_many_that_ask_at_once(tmp_path: Path) -> None:
    async def story(_: nats.NatsServer, on: bus.Bus, __: Acts) -> None:
        async with contextlib.AsyncExitStack() as stack:
            asking = [await stack.enter_async_context(of(key(on), str(n))) for n in range(8)]
            while not all(one.standing.holder for one in asking):
                await asyncio.sleep(0)
            assert len([one for one in asking if one.revision() is not None]) == 1
            assert len({one.standing.holder for one in asking}) == 1

    play(tmp_path, story)


def test_a_holder_is_gone_only_if_it_ran_where_we_run_and_runs_no_more() -> None:
    here = lock.this("a")
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert here.is_gone(), "an earlier life that had our process id"
    assert not msgspec.structs.replace(here, pid=os.getppid()).is_gone()
    nobody = msgspec.structs.replace(here, pid=2**22)
    assert nobody.is_gone()
    for elsewhere in ({"host": "another"}, {"space": "another"}, {"space": ""}):
        assert not msgspec.structs.replace(nobody, **elsewhere).is_gone()
