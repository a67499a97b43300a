"""Adapter: the event loop: drives machines, runs tasks that end together, handles SIGTERM."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from muster import machine

In = TypeVar("In")
Out = TypeVar("Out")

INBOX_MAX: Final = 10_000


class CannotStart(Exception):
    """The world does not let this service start; the text says what was tried, and what to do."""


async def _nothing() -> None:
    """Acknowledge what needs no acknowledgement."""


@dataclass(frozen=True, slots=True)
class Delivery(Generic[In]):
    """One input of a machine, and how to say that all it led to is done."""

    event: In
    ack: Callable[[], Awaitable[None]] = _nothing


def end_if_cancelled() -> None:
    """Raise CancelledError if this task was told to end, and the message got lost.

    asyncio.wait_for, under which nats-py and grpc.aio wait, drops until Python 3.12 a cancellation
    that comes together with what it waited for: the task would go on for ever. Call this after each
    such wait.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def drive(
    driven: machine.Machine[In, Out],
    inbox: asyncio.Queue[Delivery[In]],
    act: Callable[[Out], Awaitable[None]],
) -> None:
    """Feed a machine from its inbox, wake it at its own deadlines, act on what it returns.

    An overdue deadline goes before the inbox, so that a busy inbox cannot starve a timer. An input
    is acknowledged after the actions it led to, so that a crash in between repeats it. Whatever an
    action waits for, cancelling this ends it. Other tasks get their turn after each tick.
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
            # a machine that is always late would leave nobody time to bring what it waits for
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


async def run(*tasks: Coroutine[object, object, None], told: asyncio.Event | None = None) -> None:
    """Run tasks until one ends, fails, or SIGTERM or SIGINT arrives; then end them all.

    `told` is set by the signal, so that a task can tell a planned end from a failure beside it.
    After every task has ended a failure is raised: one that ended the others goes before one that
    came of ending them. Tasks clean up on cancellation.
    """
    stop = told or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = [asyncio.ensure_future(task) for task in tasks]
    stopping = asyncio.ensure_future(stop.wait())
    first: set[asyncio.Task[None]] = set()
    try:
        await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
        first = {task for task in running if task.done()}
    finally:
        for task in (*running, stopping):
            task.cancel()
        await asyncio.gather(*running, stopping, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    for task in sorted(running, key=lambda task: task not in first):
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise failure
