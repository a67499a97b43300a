"""The lock on a real nats-server: one holds it, the next takes over, a former one does not act."""

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec
import nats.js.errors
import pytest

from muster import leadership
from muster.local import nats as local
from muster.nats import bus, leader_lock, streams

PROGRAM: Final = Path(__file__).resolve().parents[1] / "programs" / "leading.py"
TERMS: Final = leader_lock.Timing(ttl_s=2, renew_s=0.5, margin_s=0.5)
WITHOUT_END: Final = leader_lock.Timing(ttl_s=60, renew_s=0.5, margin_s=1)


class ActLog:
    """A log of who acted in which term, in the order in which the server received it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._came = asyncio.Condition()

    async def take(self, _: str, message: bytes) -> None:
        name, revision = message.decode().split()
        async with self._came:
            self.seen.append((name, int(revision)))
            self._came.notify_all()

    async def of(self, name: str) -> None:
        """Wait until `name` acts after this call."""
        count = len(self.seen)
        async with self._came:
            await self._came.wait_for(lambda: any(n == name for n, _ in self.seen[count:]))

    def holders(self) -> list[tuple[str, int]]:
        return [who for who, _ in itertools.groupby(self.seen)]


class ClaimLog:
    """A log of a candidate's claims: the revision to replace, and whether it then held the key."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bool]] = []

    def key(self, on: bus.Bus) -> leader_lock.Key:
        """Return the lock's key, whose claims are logged here."""
        log = self

        class Logged(leader_lock.Key):
            """A key that logs its claims."""

            async def claim(
                self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
            ) -> streams.Claimed:
                claimed = await leader_lock.Key.claim(
                    self, value, ttl_s=ttl_s, revision=revision, timeout_s=timeout_s
                )
                log.made.append((revision, claimed.value == value))
                return claimed

        return Logged(on.link, streams.LEADER, "health")


Story = Callable[[local.NatsServer, bus.Bus, ActLog], Awaitable[None]]


def play(tmp_path: Path, story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            local.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="tests", name="test", owner=True) as listener,
        ):
            acts = ActLog()
            await listener.link.client()
            await listener.subscribe("acted", acts.take)
            await story(server, listener, acts)

    asyncio.run(played())


@contextlib.asynccontextmanager
async def process(
    server: local.NatsServer, name: str, terms: leader_lock.Timing = TERMS
) -> AsyncIterator[asyncio.subprocess.Process]:
    numbers = (terms.ttl_s, terms.renew_s, terms.margin_s)
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), server.url, name, *map(str, numbers)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


def key(on: bus.Bus) -> leader_lock.Key:
    return leader_lock.Key(on.link, streams.LEADER, "health")


def candidate_named(
    on: leader_lock.Key, name: str, terms: leader_lock.Timing = TERMS
) -> leader_lock.Lock:
    """Return a candidate for the lock, on a machine of this name."""
    us = leader_lock.Holder(name=name, host=name, space="1", pid=1)
    return leader_lock.Lock(on, us=us, timing=terms, on_change=lambda _, __: None)


async def next_of(*asking: leader_lock.Lock, after: int) -> int:
    """Wait until one of the candidates holds the lock in a term after `after`; return the term."""
    while not (
        claimed := {
            candidate.term() or 0 for candidate in asking if (candidate.term() or 0) > after
        }
    ):
        await asyncio.sleep(0.01)
    return max(claimed)


async def held(asking: leader_lock.Lock) -> int:
    async for revision in asking.terms():
        if revision is not None:
            return revision
    raise AssertionError("it follows for ever")


def test_on_the_same_machine_the_lock_is_taken_over_as_soon_as_its_holder_is_gone(
    tmp_path: Path,
) -> None:
    async def story(server: local.NatsServer, on: bus.Bus, acts: ActLog) -> None:
        async with process(server, "a", WITHOUT_END) as a:
            await acts.of("a")
            async with leader_lock.Lock(
                key(on),
                us=leader_lock.this_process("b"),
                timing=TERMS,
                on_change=lambda _, __: None,
            ) as b:
                while b.current.leader != f"a ({socket.gethostname()}, process {a.pid})":
                    await asyncio.sleep(0)
                a.kill()
                await a.wait()
                async with asyncio.timeout(30):
                    assert await held(b) > acts.seen[-1][1]

    play(tmp_path, story)


def test_a_claim_from_another_machine_is_respected_until_it_expires(
    tmp_path: Path,
) -> None:
    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        other = await key(on).claim(b"of an older version", ttl_s=1, revision=0, timeout_s=1)
        claims = ClaimLog()
        async with candidate_named(claims.key(on), "b") as b:
            assert await held(b) > other.revision
            # the other claim was not replaced: the server refused all claims until it had expired
            won = claims.made.index((0, True))
            assert set(claims.made[:won]) == {(0, False)}
            assert b.current.leader == "b (b, process 1)"

    play(tmp_path, story)


def test_a_suspended_holder_does_not_act_when_it_resumes(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, _: bus.Bus, acts: ActLog) -> None:
        async with process(server, "a") as a:
            await acts.of("a")
            async with process(server, "b"):
                a.send_signal(signal.SIGSTOP)
                await acts.of("b")
                a.send_signal(signal.SIGCONT)
                # it has claimed the lock again, and was refused
                assert a.stdout is not None
                while not (line := await a.stdout.readline()).startswith(b"b "):
                    assert line, "it has ended"
                await acts.of("b")
        # on a busy machine the leader may change again, but no holder begins to act in a past term:
        # only a message that was sent before the suspension may arrive late
        names, revisions = zip(*acts.seen, strict=True)
        assert [name for name, _ in itertools.groupby(names)][:2] == ["a", "b"]
        newest = itertools.accumulate(revisions, max)
        late = [act for act, top in zip(acts.seen, newest, strict=True) if act[1] < top]
        assert late in ([], [("a", revisions[0])])

    play(tmp_path, story)


def test_an_orderly_end_releases_the_lock_at_once(tmp_path: Path) -> None:
    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        reported: list[tuple[leadership.Leadership, leadership.Leadership]] = []
        us = leader_lock.Holder(name="b", host="b", space="1", pid=1)
        b = leader_lock.Lock(
            key(on), us=us, timing=WITHOUT_END, on_change=lambda *both: reported.append(both)
        )
        async with b:
            changes = b.terms()
            assert await anext(changes) is None
            revision = await anext(changes)
        assert revision is not None
        assert b.term() is None
        assert not b.is_term(revision)
        assert await anext(changes) is None
        nobody = leadership.Leadership(leader="", term=None)
        ours = leadership.Leadership(leader="b (b, process 1)", term=revision)
        assert reported == [(nobody, ours), (ours, nobody)]
        async with asyncio.timeout(30), candidate_named(key(on), "c", WITHOUT_END) as c:
            assert await held(c) > revision

    play(tmp_path, story)


def test_the_lock_is_lost_with_the_server_and_held_again_when_it_is_back(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, on: bus.Bus, _: ActLog) -> None:
        async with candidate_named(key(on), "a") as a:
            first = await held(a)
            changes = a.terms()
            assert await anext(changes) == first
            await server.kill()
            assert await anext(changes) is None
            await server.start()
            again = await anext(changes)
            assert again is not None
            assert again > first

    play(tmp_path, story)


def test_a_renewal_that_succeeded_without_an_answer_loses_nothing(tmp_path: Path) -> None:
    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        answers: asyncio.Queue[streams.Claimed] = asyncio.Queue()
        lose = False

        class Deaf(leader_lock.Key):
            """A key that can lose an answer."""

            async def claim(
                self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
            ) -> streams.Claimed:
                nonlocal lose
                claimed = await leader_lock.Key.claim(
                    self, value, ttl_s=ttl_s, revision=revision, timeout_s=timeout_s
                )
                if lose:
                    lose = False
                    raise TimeoutError
                answers.put_nowait(claimed)
                return claimed

        deaf = Deaf(on.link, streams.LEADER, "health")
        async with candidate_named(deaf, "a") as a:
            assert (await answers.get()).written
            first = a.term()
            assert first is not None
            lose = True
            # refused, because the renewal whose answer was lost is newer; then renewed
            assert [(await answers.get()).written for _ in range(2)] == [False, True]
            assert a.term() == first

    play(tmp_path, story)


def test_a_lost_bucket_is_created_again_and_its_next_term_is_greater(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, on: bus.Bus, _: ActLog) -> None:
        owner = bus.Bus(server.url, producer="tests", name="b", owner=True)
        async with owner, candidate_named(key(on), "a") as a, candidate_named(key(owner), "b") as b:
            before = await next_of(a, b, after=0)
            jetstream = (await on.link.client()).jetstream()
            async with asyncio.timeout(30):
                await jetstream.delete_stream("KV_muster_leader")
                deleted = await next_of(a, b, after=before)
                # the holder notices at its next renewal
                while a.is_term(before) or b.is_term(before):
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(30):
                await server.kill()
                shutil.rmtree(tmp_path / "nats")
                (tmp_path / "nats").mkdir()
                await server.start()
                wiped = await next_of(a, b, after=deleted)
            # the greatest integer of JavaScript and of muster's schema
            assert before < deleted < wiped < 2**53
            assert [candidate.problem() for candidate in (a, b)] == [None, None]

    play(tmp_path, story)


def test_a_lock_that_does_not_answer_is_a_problem_until_it_does(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, on: bus.Bus, _: ActLog) -> None:
        jetstream = (await on.link.client()).jetstream()
        brief = leader_lock.Timing(ttl_s=1, renew_s=0.3, margin_s=0.1)
        guest = bus.Bus(server.url, producer="tests", name="guest")
        async with (
            guest,
            candidate_named(
                leader_lock.Key(guest.link, streams.TENURE, "notifier"), "a", brief
            ) as a,
        ):
            while (problem := a.problem()) is None:
                # its owner creates it again at the next check
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    await jetstream.delete_stream("KV_muster_tenure")
                await asyncio.sleep(0.01)
            assert re.fullmatch(r"the lock has been unreachable for 1 s: nats: .*stream.*", problem)
            assert guest.link.problem() is None
            await on.link.prepare(await on.link.client())
            assert await held(a)
            assert a.problem() is None

    play(tmp_path, story)


def test_a_failure_of_the_task_that_renews_is_raised(tmp_path: Path) -> None:
    class Broken(leader_lock.Key):
        """A key whose server gives an invalid answer."""

        async def claim(
            self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
        ) -> streams.Claimed:
            raise OverflowError(value, ttl_s, revision, timeout_s)

    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        async with candidate_named(Broken(on.link, streams.LEADER, "health"), "a") as a:
            with pytest.raises(OverflowError):
                await a.failed()

    play(tmp_path, story)


def test_two_candidates_in_one_process_do_not_take_the_lock_from_each_other(tmp_path: Path) -> None:
    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        def asks(name: str) -> leader_lock.Lock:
            us = leader_lock.this_process(name)
            return leader_lock.Lock(
                claims[name].key(on), us=us, timing=WITHOUT_END, on_change=lambda _, __: None
            )

        claims = {"a": ClaimLog(), "b": ClaimLog()}
        async with asks("a") as a:
            revision = await held(a)
            async with asks("b") as b:
                while b.current.leader != f"a ({socket.gethostname()}, process {os.getpid()})":
                    await asyncio.sleep(0)
                marks = {name: len(log.made) for name, log in claims.items()}
                while any(len(log.made) < marks[name] + 3 for name, log in claims.items()):
                    await asyncio.sleep(0.01)
                assert (a.term(), b.term()) == (revision, None)

    play(tmp_path, story)


def test_an_end_during_a_renewal_releases_the_lock_at_once(tmp_path: Path) -> None:
    class Slow(leader_lock.Key):
        """A key whose first renewal is answered too late."""

        async def claim(
            self, value: bytes, *, ttl_s: int, revision: int, timeout_s: float
        ) -> streams.Claimed:
            claimed = await leader_lock.Key.claim(
                self, value, ttl_s=ttl_s, revision=revision, timeout_s=timeout_s
            )
            if revision and not renewed.is_set():
                renewed.set()
                await asyncio.sleep(timeout_s)
            return claimed

    renewed = asyncio.Event()

    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        async with candidate_named(Slow(on.link, streams.LEADER, "health"), "a", WITHOUT_END) as a:
            revision = await held(a)
            await renewed.wait()
        async with asyncio.timeout(30), candidate_named(key(on), "b", WITHOUT_END) as b:
            assert await held(b) > revision

    play(tmp_path, story)


def test_one_of_many_candidates_holds_the_lock(tmp_path: Path) -> None:
    async def story(_: local.NatsServer, on: bus.Bus, __: ActLog) -> None:
        async with contextlib.AsyncExitStack() as stack:
            asking = [
                await stack.enter_async_context(candidate_named(key(on), str(n))) for n in range(8)
            ]
            while not all(candidate.current.leader for candidate in asking):
                await asyncio.sleep(0)
            assert len([candidate for candidate in asking if candidate.term() is not None]) == 1
            assert len({candidate.current.leader for candidate in asking}) == 1

    play(tmp_path, story)


def test_a_holder_is_gone_only_if_it_ran_in_our_namespace_and_has_ended() -> None:
    here = leader_lock.this_process("a")
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert not here.is_gone()
    assert msgspec.structs.replace(here, life="1").is_gone(), "an earlier life with our process id"
    assert not msgspec.structs.replace(here, pid=os.getppid(), life="1").is_gone()
    nobody = msgspec.structs.replace(here, pid=2**22)
    assert nobody.is_gone()
    for unknown in ({"host": "another"}, {"space": "another"}, {"space": ""}, {"pid": 2**40}):
        assert not msgspec.structs.replace(nobody, **unknown).is_gone()
    for number in (0, -1):
        assert not msgspec.structs.replace(nobody, pid=number).is_gone()


def test_a_value_that_names_no_holder_is_none() -> None:
    here = leader_lock.this_process("a")
    assert leader_lock.decode_holder(msgspec.json.encode(here)) == here
    for junk in (b"", b"\xff", b"{}", b"of an older version", b'{"a":' + b"[" * 100_000):
        assert leader_lock.decode_holder(junk) is None
