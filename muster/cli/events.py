"""Adapter for NATS: `muster events`, and connections and subscriptions for other commands."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Annotated, Final, TypeVar

import cyclopts
import msgspec
import structlog
from cyclopts import Parameter

from muster import client, codec, vocabulary
from muster.cli import event_texts, output, texts
from muster.local import nats, running
from muster.nats import bus, consumers, streams
from muster.service import runtime

app = cyclopts.App(name="events")

Url = Annotated[
    str | None,
    Parameter(
        env_var="NATS_URL", help="Address of NATS; by default, that of `muster up` on this machine."
    ),
]
Message = codec.CloudEvent | vocabulary.Heartbeat
Event = TypeVar("Event", bound=vocabulary.Event)

_TIMEOUT_S: Final = 10.0
_START_TIMEOUT_S: Final = 20.0
_KEPT_MAX: Final = 100_000
_REFUSED: Final = "permissions violation"


@app.default
def print_events(
    type: Annotated[str, Parameter(name=["--type", "-t"])] = "*",  # noqa: A002  # the option's name
    *,
    node: str = "*",
    since: str | None = None,
    follow: bool = True,
    json: output.Json = False,
    url: Url = None,
) -> int:
    """Print the events on the bus, one line each, until Ctrl-C.

    Parameters
    ----------
    type
        Event types, as a shell pattern: `device.*`, `alert.changed`.
    node
        Nodes, as a shell pattern.
    since
        Start in the past: `90s`, `15m`, `2h`, `7d`, or a time such as `2026-11-21T10:00:00Z`.
    follow
        Continue with new events; `--no-follow` ends after the past events.

    """
    try:
        start = None if since is None else texts.since(since)
    except ValueError as error:
        return output.fail("events", f"--since: {error}")
    events = client.events(type, node=node, since=start, url=address("events", url), follow=follow)
    with outages_hidden("events" if follow else None) as reasons:
        try:
            asyncio.run(runtime.run(_print(events, as_json=json)))
        except ValueError as error:
            return output.fail("events", str(error))
        except ConnectionError as error:
            return output.fail("events", unreached(error, reasons), code=1)
    return 0


def run_within(
    command: str, work: Coroutine[object, object, int], *, limit_s: float = _TIMEOUT_S
) -> int:
    """Run a command's work with a time limit; return its exit code."""

    async def limited() -> int:
        async with asyncio.timeout(limit_s):
            return await work

    with outages_hidden() as reasons:
        try:
            return asyncio.run(limited())
        except TimeoutError:
            text = ": ".join((f"NATS has not answered for {limit_s:g} s", *reasons))
            return output.fail(command, text, code=1)
        except ConnectionError as error:
            return output.fail(command, unreached(error, reasons), code=1)


def unreached(error: ConnectionError, reasons: Sequence[str]) -> str:
    """Return why NATS was not reached; for the default address, also how to name a cluster."""
    text = ": ".join((str(error), *reasons))
    is_default = re.search(rf"{re.escape(client.DEFAULT_URL)}(?!\d)", text)
    return f"{text}; {texts.NAME_CLUSTER}" if is_default else text


def address(command: str, url: str | None) -> str:
    """Return NATS's address: `url`, or else that of the newest `muster up`, or the default."""
    if url:
        return url
    chosen = next((stack.nats_url for stack in running.here()), client.DEFAULT_URL)
    name_chosen(command, chosen)
    return chosen


def name_chosen(command: str, nats_url: str | None) -> None:
    """If this user runs several stacks of `muster up`, print which of them is used."""
    stacks = running.here()
    used = [stack.directory for stack in stacks if stack.nats_url == nats_url]
    if len(stacks) > 1 and used:
        output.warn(command, f"{len(stacks)} instances of `muster up` are running; using {used[0]}")


@asynccontextmanager
async def connect(command: str, url: str | None, *, owner: bool = True) -> AsyncIterator[bus.Bus]:
    """Connect, by default to this machine's NATS. Raises ConnectionError if it does not answer.

    `owner` must be False for a reader, which may not create streams.
    """
    target = address(command, url)
    async with bus.Bus(
        target, producer=f"clients/{command}", name=command, owner=owner
    ) as connected:
        await client.reach(connected, target)
        yield connected


@contextmanager
def outages_hidden(
    waiting: str | None = None, *, everything: bool = False
) -> Iterator[Sequence[str]]:
    """Suppress log lines about lost connections, because commands report these themselves.

    Yields a list that will contain the reason for the last lost connection or refusal. `waiting`
    names a command that waits for NATS without a limit: a line is printed when an outage begins.
    With `everything`, nothing is logged.
    """

    def hide(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if entry["event"] != "bus_disconnected":
            if everything:
                raise structlog.DropEvent
            if waiting or _REFUSED not in str(entry.get("error")).lower():
                return entry
            reasons[:] = [str(entry["error"])]
            raise structlog.DropEvent
        reasons[:] = [_reason(str(entry["error"]))]
        if waiting:
            problem = f"NATS at {entry['url']} does not answer: {reasons[0]}; waiting for it"
            is_default = entry["url"] == client.DEFAULT_URL
            output.warn(waiting, f"{problem}; or {texts.NAME_CLUSTER}" if is_default else problem)
        raise structlog.DropEvent

    reasons: list[str] = []
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(
        processors=[hide, structlog.processors.KeyValueRenderer(key_order=["event"])],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: logging.getLogger("muster"),
    )
    try:
        yield reasons
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


class Recorder:
    """Stores received messages, each with its time of arrival on the loop's clock."""

    def __init__(self) -> None:
        self._messages: list[tuple[float, Message]] = []
        self._dropped = 0
        self._changed = asyncio.Condition()

    async def record(self, message: Message) -> None:
        """Store a message; wake the tasks that wait for one."""
        async with self._changed:
            if len(self._messages) >= _KEPT_MAX:
                del self._messages[: _KEPT_MAX // 2]
                self._dropped += _KEPT_MAX // 2
            self._messages.append((asyncio.get_running_loop().time(), message))
            self._changed.notify_all()

    async def first(
        self, kind: type[Event], matches: Callable[[Event], bool], *, since: float
    ) -> tuple[float, Event]:
        """Wait for the first matching event since a time; return its arrival time and its data."""
        checked = 0
        while True:
            async with self._changed:
                for at, message in self._messages[max(0, checked - self._dropped) :]:
                    data = message.data if isinstance(message, codec.CloudEvent) else None
                    if at >= since and isinstance(data, kind) and matches(data):
                        return at, data
                checked = self._dropped + len(self._messages)
                while self._dropped + len(self._messages) == checked:
                    await self._changed.wait()


@asynccontextmanager
async def subscribe_all(
    url: str, receive: Callable[[Message], Awaitable[None]], *, since: datetime | None = None
) -> AsyncIterator[bus.Bus]:
    """Call `receive` with each heartbeat from now on, and each event since `since` (None: now)."""

    async def follow(stream: streams.Stream) -> None:
        async for event in consumers.follow(
            connected.link, stream, filters=stream.subjects, since=since
        ):
            await receive(event)

    async with bus.Bus(url, producer="clients/muster", name="muster", owner=True) as connected:
        await connected.heartbeats(receive)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await connected.link.client()
        except TimeoutError:
            raise nats.NatsUnavailable(
                f"NATS at {client.without_password(url)} is not ready after "
                f"{_START_TIMEOUT_S:g} s; it needs about 2 GiB of free disk space"
            ) from None
        tasks = [asyncio.create_task(follow(s)) for s in streams.FOLLOWED]
        try:
            yield connected
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def event_line(event: codec.CloudEvent) -> str:
    """Return an event as one line for people, worded as in `muster why` and `muster top`."""
    node = texts.plain(event.node)
    return f"{event.time.astimezone():%H:%M:%S} {node} {event_texts.change_text(event)}"


def _reason(error: str) -> str:
    """Return why a connection failed, if possible as the operating system's message."""
    number = re.match(r"\[Errno (\d+)\]", error)
    return os.strerror(int(number[1])) if number else error


async def _print(events: AsyncIterator[codec.CloudEvent], *, as_json: bool) -> None:
    async for event in events:
        if as_json:
            output.print_json(msgspec.Raw(codec.dump(event)))
        else:
            output.show(event_line(event))
