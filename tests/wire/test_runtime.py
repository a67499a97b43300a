"""The service runtime: driving a machine, and running tasks that end together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import pytest

from muster import pacing
from muster.service import runtime


@dataclass
class Notebook:
    """A machine with `answers` actions for each event, which is due once at each of `deadlines`."""

    deadlines: list[float] = field(default_factory=list)
    answers: int = 1

    def receive(self, event: str, now: float) -> Sequence[str]:
        assert now > 0
        return [f"{event}.{n}" for n in range(self.answers)]

    def tick(self, now: float) -> Sequence[str]:
        assert self.deadlines[0] <= now
        self.deadlines.pop(0)
        return ["tick"]

    def next_deadline(self) -> float | None:
        return self.deadlines[0] if self.deadlines else None


def delivery(name: str, done: list[str]) -> runtime.Delivery[str]:
    async def ack() -> None:
        done.append(f"ack {name}")

    return runtime.Delivery(name, ack)


async def driven_until(
    machine: Notebook, inbox: asyncio.Queue[runtime.Delivery[str]], done: list[str], length: int
) -> list[str]:
    """Drive a machine until `done` has `length` entries; return these."""
    enough = asyncio.Event()

    async def act(out: str) -> None:
        done.append(out)
        if len(done) >= length:
            enough.set()

    async with asyncio.timeout(30):
        driving = asyncio.create_task(runtime.drive(machine, inbox, act))
        await enough.wait()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
    return done[:length]


@pytest.mark.parametrize(("deadlines", "first"), [((), "a.0"), ((0.0,), "tick")])
def test_a_cancellation_that_an_action_lost_ends_the_driving_all_the_same(
    deadlines: tuple[float, ...], first: str
) -> None:
    async def story() -> tuple[list[str], bool]:
        done: list[str] = []
        acting = asyncio.Event()

        async def act(out: str) -> None:
            done.append(out)
            acting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        inbox: asyncio.Queue[runtime.Delivery[str]] = asyncio.Queue()
        inbox.put_nowait(delivery("a", done))
        inbox.put_nowait(delivery("b", done))
        async with asyncio.timeout(30):
            machine = Notebook(deadlines=[*deadlines], answers=2)
            driving = asyncio.create_task(runtime.drive(machine, inbox, act))
            await acting.wait()
            driving.cancel()
            await asyncio.wait([driving])
        return done, driving.cancelled()

    assert asyncio.run(story()) == ([first], True)


def test_an_overdue_deadline_goes_before_a_full_inbox() -> None:
    async def story() -> list[str]:
        done: list[str] = []
        inbox: asyncio.Queue[runtime.Delivery[str]] = asyncio.Queue()
        for number in range(3):
            inbox.put_nowait(delivery(str(number), done))
        now = asyncio.get_running_loop().time()
        return await driven_until(Notebook(deadlines=[now - 2, now - 1]), inbox, done, 6)

    assert asyncio.run(story()) == ["tick", "tick", "0.0", "ack 0", "1.0", "ack 1"]


def test_a_machine_that_is_always_late_does_not_starve_other_tasks() -> None:
    async def story() -> list[str]:
        done: list[str] = []

        async def other() -> None:
            for number in range(2):
                await asyncio.sleep(0)
                done.append(f"other {number}")

        beside = asyncio.create_task(other())
        ticks = await driven_until(Notebook(deadlines=[0.0] * 1_000), asyncio.Queue(), done, 1_000)
        await beside
        return ticks

    assert {"other 0", "other 1"} <= {*asyncio.run(story())[:10]}


def test_an_input_is_acknowledged_after_all_the_actions_it_led_to() -> None:
    async def story() -> list[str]:
        done: list[str] = []
        inbox: asyncio.Queue[runtime.Delivery[str]] = asyncio.Queue()
        inbox.put_nowait(delivery("a", done))
        inbox.put_nowait(delivery("b", done))
        return await driven_until(Notebook(answers=2), inbox, done, 5)

    assert asyncio.run(story()) == ["a.0", "a.1", "ack a", "b.0", "b.1"]


def test_an_input_whose_action_fails_is_not_acknowledged() -> None:
    async def story() -> list[str]:
        done: list[str] = []
        inbox: asyncio.Queue[runtime.Delivery[str]] = asyncio.Queue()
        inbox.put_nowait(delivery("a", done))

        async def act(out: str) -> None:
            raise LookupError(out)

        async with asyncio.timeout(30):
            with pytest.raises(LookupError, match=r"a\.0"):
                await runtime.drive(Notebook(), inbox, act)
        return done

    assert asyncio.run(story()) == []


def test_a_deadline_wakes_a_machine_without_input() -> None:
    async def story() -> list[str]:
        # the machine checks that it is not called before its deadline
        machine = Notebook(deadlines=[asyncio.get_running_loop().time() + 0.02])
        return await driven_until(machine, asyncio.Queue(), [], 1)

    assert asyncio.run(story()) == ["tick"]


def test_an_input_wakes_a_machine_before_its_deadline() -> None:
    async def story() -> list[str]:
        done: list[str] = []
        inbox: asyncio.Queue[runtime.Delivery[str]] = asyncio.Queue()
        machine = Notebook(deadlines=[asyncio.get_running_loop().time() + 3600])
        asyncio.get_running_loop().call_later(0.01, inbox.put_nowait, delivery("a", done))
        return await driven_until(machine, inbox, done, 1)

    assert asyncio.run(story())[0] == "a.0"


async def until_cancelled(
    ended: list[str], name: str, last: Callable[[], Awaitable[None]] | None = None
) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)
        if last is not None:
            await last()


def test_one_task_that_ends_ends_all() -> None:
    async def story() -> list[str]:
        ended: list[str] = []

        async def short() -> None:
            ended.append("short")

        async with asyncio.timeout(30):
            await runtime.run(until_cancelled(ended, "long"), short())
        return ended

    assert asyncio.run(story()) == ["short", "long"]


def test_a_failure_is_raised_after_every_task_has_ended() -> None:
    async def story() -> list[str]:
        ended: list[str] = []

        async def fails() -> None:
            raise LookupError("first")

        async with asyncio.timeout(30):
            with pytest.raises(LookupError, match="first"):
                await runtime.run(until_cancelled(ended, "a"), fails(), until_cancelled(ended, "b"))
        return ended

    assert asyncio.run(story()) == ["a", "b"]


def test_the_failure_that_ended_all_is_raised_not_one_of_the_ending() -> None:
    async def story() -> None:
        async def fails() -> None:
            raise LookupError("the cause")

        async def fails_too() -> None:
            raise OSError("a consequence")

        async with asyncio.timeout(30):
            with pytest.raises(LookupError, match="the cause"):
                await runtime.run(until_cancelled([], "a", fails_too), fails())

    asyncio.run(story())


def test_a_failure_while_ending_in_order_is_raised() -> None:
    async def story() -> None:
        async def short() -> None: ...

        async def fails() -> None:
            raise OSError("could not say goodbye")

        async with asyncio.timeout(30):
            with pytest.raises(OSError, match="could not say goodbye"):
                await runtime.run(until_cancelled([], "a", fails), short())

    asyncio.run(story())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_in_order(number: signal.Signals) -> None:
    async def story() -> list[str]:
        ended: list[str] = []

        async def signals() -> None:
            os.kill(os.getpid(), number)
            await until_cancelled(ended, "sender")

        async with asyncio.timeout(30):
            await runtime.run(until_cancelled(ended, "other"), signals())
        return ended

    assert asyncio.run(story()) == ["other", "sender"]


def test_a_cancelled_run_ends_all_its_tasks() -> None:
    async def story() -> list[str]:
        ended: list[str] = []
        running = asyncio.create_task(runtime.run(until_cancelled(ended, "a")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        return ended

    assert asyncio.run(story()) == ["a"]


def test_a_task_can_distinguish_a_planned_end_from_a_failure_of_another() -> None:
    async def planned(other: Callable[[], Awaitable[None]]) -> list[bool]:
        stop, was_planned = asyncio.Event(), list[bool]()

        async def waits() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                was_planned.append(stop.is_set())

        async def ends() -> None:
            await other()

        with contextlib.suppress(LookupError):
            await runtime.run(waits(), ends(), stop=stop)
        return was_planned

    async def fails() -> None:
        raise LookupError

    async def ends_by_signal() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    assert asyncio.run(planned(fails)) == [False]
    assert asyncio.run(planned(ends_by_signal)) == [True]


async def fails() -> None:
    raise KeyError


async def is_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (lambda: asyncio.sleep(0), type(None)),
        (fails, KeyError),
        (is_cancelled, asyncio.CancelledError),
        (asyncio.Event().wait, TimeoutError),
    ],
)
def test_an_attempt_returns_why_its_step_failed(
    step: Callable[[], Coroutine[object, object, None]], error: type[BaseException]
) -> None:
    assert type(asyncio.run(runtime.attempt(step(), limit_s=0.05))) is error


def test_a_step_that_drops_its_cancellations_is_left_behind() -> None:
    async def story() -> None:
        over = asyncio.Event()

        async def step() -> None:
            while not over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await over.wait()

        async with asyncio.timeout(30):
            assert type(await runtime.attempt(step(), limit_s=0.01)) is TimeoutError
        over.set()

    asyncio.run(story())


def test_a_retry_ends_a_task_whose_cancellation_came_with_an_answer() -> None:
    async def story() -> bool:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked = asyncio.Event()

        async def ask_again() -> None:
            retry = runtime.Retry(pacing.Backoff(first_s=0.001, max_s=0.001, jitter=0.0))
            while True:
                asked.set()
                await asyncio.wait_for(answer, 60)  # before Python 3.12 this drops a cancellation
                await retry.wait()

        task = asyncio.create_task(ask_again())
        await asked.wait()
        answer.set_result(None)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        is_cancelled = task.cancelled()
        await runtime.end(task)
        return is_cancelled

    assert asyncio.run(story())


def test_a_caller_cancelled_again_still_waits_until_its_task_has_ended() -> None:
    async def story() -> tuple[bool, bool, bool]:
        cancelled, may_end = asyncio.Event(), asyncio.Event()

        async def step() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
                while not may_end.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await may_end.wait()

        task = asyncio.create_task(step())
        await asyncio.sleep(0)
        caller = asyncio.create_task(runtime.end(task))
        await cancelled.wait()
        caller.cancel()
        await asyncio.sleep(0)
        has_waited = not caller.done()
        may_end.set()
        await asyncio.wait([caller])
        return has_waited, task.done(), caller.cancelled()

    assert asyncio.run(story()) == (True, True, True)


def test_cancelling_an_attempt_cancels_its_step() -> None:
    async def story() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def step() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        attempt = asyncio.create_task(runtime.attempt(step()))
        await began.wait()
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert ended.is_set()

    asyncio.run(story())
