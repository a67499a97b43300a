"""Adapter for the event loop: drives state machines, runs groups of tasks, handles SIGTERM."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from muster import machine, pacing

In = TypeVar("In")
Out = TypeVar("Out")

INBOX_MAX: Final = 10_000
_CANCEL_AGAIN_S: Final = 0.1
_CANCELS_MAX: Final = 10


class CannotStart(Exception):
    """The service cannot start; the message gives the reason and the correction."""


async def _nothing() -> None:
    """Do nothing: this input needs no acknowledgement."""


@dataclass(frozen=True, slots=True)
class Delivery(Generic[In]):
    """One input of a machine; `ack` is called after all resulting actions."""

    event: In
    ack: Callable[[], Awaitable[None]] = _nothing


def end_if_cancelled() -> None:
    """Raise CancelledError if this task was cancelled and the exception was lost.

    Before Python 3.12 asyncio.wait_for, which nats-py and grpc.aio use, drops a cancellation that
    arrives together with the awaited result: the task would continue forever. Call this after each
    such wait.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task, repeatedly if it drops the cancellation; finally abandon it.

    See `end_if_cancelled`. A caller that is itself cancelled meanwhile still waits for the task.
    """
    is_cancelled = False
    for _ in range(_CANCELS_MAX):
        if task.done():
            break
        task.cancel()
        try:
            await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


def failure(task: asyncio.Task[None]) -> BaseException | None:
    """Return why a task failed or was cancelled; None if it is running or has succeeded."""
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() if task.done() else None


async def attempt(
    step: Coroutine[object, object, None], *, limit_s: float | None = None
) -> BaseException | None:
    """Run a step, at most for `limit_s` seconds if given; return why it failed, or None.

    asyncio.timeout cancels only once, and within the caller's task: code that drops the
    cancellation would block the caller forever.
    """
    task = asyncio.create_task(step)
    try:
        await asyncio.wait([task], timeout=limit_s)
        return failure(task) if task.done() else TimeoutError(f"not finished after {limit_s} s")
    finally:
        await end(task)


class Retry:
    """Waits between attempts, longer after each failure in a row."""

    def __init__(self, delays: pacing.Backoff) -> None:
        self.failures = 0
        self._delays = delays

    async def wait(self, *, at_least_s: float = 0.0) -> None:
        """Count a failure, and wait `at_least_s` plus the back-off; see `end_if_cancelled`."""
        end_if_cancelled()
        self.failures += 1
        jitter = random.uniform(1.0 - self._delays.jitter, 1.0)  # noqa: S311  # not a secret
        await asyncio.sleep(at_least_s + self._delays.delay_s(self.failures) * jitter)

    def reset(self) -> None:
        """Reset to the shortest delay."""
        self.failures = 0


async def drive(
    driven: machine.Machine[In, Out],
    inbox: asyncio.Queue[Delivery[In]],
    act: Callable[[Out], Awaitable[None]],
) -> None:
    """Pass a machine its inputs, call `tick` at its deadlines, and execute its actions.

    An overdue deadline is handled before the inbox, so that a busy inbox cannot starve a timer. An
    input is acknowledged after its actions, so that it is redelivered after a crash in between.
    Cancelling this function also cancels a waiting action. Other tasks can run after each tick.
    """

    async def act_on(outs: Sequence[Out]) -> None:
        for out in outs:
            await act(out)
            end_if_cancelled()

    clock = asyncio.get_running_loop().time
    while True:
        deadline = driven.next_deadline()
        if deadline is not None and deadline <= clock():
            await act_on(driven.tick(clock()))
            # a machine that is always late would starve the tasks that feed it
            await asyncio.sleep(0)
            continue
        try:
            async with asyncio.timeout_at(deadline):
                delivery = await inbox.get()
        except TimeoutError:
            continue
        end_if_cancelled()
        await act_on(driven.receive(delivery.event, clock()))
        await delivery.ack()


async def run(*tasks: Coroutine[object, object, None], stop: asyncio.Event | None = None) -> None:
    """Run tasks until one ends or fails, or `stop` is set; then end them all.

    SIGTERM and SIGINT set `stop`, so that a task can distinguish a planned stop from the failure of
    another task. A failure is raised as in `until_one_ends`.
    """
    stopping = stop or asyncio.Event()

    async def signalled() -> None:
        await stopping.wait()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await until_one_ends(*tasks, signalled())
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def until_one_ends(*tasks: Coroutine[object, object, None]) -> None:
    """Run tasks until one ends or fails; then end them all.

    When all tasks have ended, the failure that ended them is raised, rather than a later failure
    during cancellation. Tasks clean up on cancellation.
    """
    running = [asyncio.ensure_future(task) for task in tasks]
    first: set[asyncio.Task[None]] = set()
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        first = {task for task in running if task.done()}
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for task in sorted(running, key=lambda task: task not in first):
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise failure
