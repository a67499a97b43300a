"""A connection is dialled again after any fault of the server and any misbehaviour of nats-py."""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

import nats.aio.client
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.nats import compat, connection
from tests.worlds import bus_subjects, faulty_peer
from tests.worlds.faulty_peer import Fault, Peer, Step

BOUND_S = 15.0
"""A generous limit: `_short_limits` shortens those of the connection to a tenth or less."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tls")
    faulty_peer.make_certificates(where)
    return where


@pytest.fixture(autouse=True)
def _short_limits(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_CA", str(certificates / "ca.crt"))
    monkeypatch.setattr(connection, "_CHECK_S", 0.5)
    monkeypatch.setattr(connection, "_CLIENT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "_PING_S", 0.5)
    monkeypatch.setattr(connection, "_PREPARE_S", 0.5)
    monkeypatch.setattr(compat, "_CLOSE_TIMEOUT_S", 0.2)


class Ways(StrEnum):
    """How a call of nats-py may misbehave."""

    RAISES = auto()
    IS_CANCELLED = auto()
    HANGS = auto()
    """The call also ignores its cancellation."""


Faults = list[tuple[Step, Fault]]
Story = Callable[[Peer, connection.Connection], Awaitable[None]]


def play(
    certificates: Path,
    story: Story,
    *,
    faults: Faults,
    make: connection.Make = nats.aio.client.Client,
    prepare: connection.Prepare | None = None,
) -> None:
    async def played() -> None:
        async with faulty_peer.serving(certificates) as (peer, url):
            peer.faults[:] = faults
            async with connection.Connection(url, name="t", make=make, prepare=prepare) as link:
                await story(peer, link)

    asyncio.run(played())


async def ignore(_: connection.Message) -> None:
    pass


async def served(peer: Peer, link: connection.Connection, count: int) -> None:
    """Wait until no fault is left, `count` connections met none, and one of them is in use."""
    await bus_subjects.until(
        lambda: peer.served >= count and link.is_connected and not peer.faults, limit_s=BOUND_S
    )


async def after_faults(peer: Peer, link: connection.Connection, faults: Faults) -> None:
    await served(peer, link, 1)
    peer.kick(*faults)
    await served(peer, link, peer.served + 1)
    await bus_subjects.until(lambda: peer.connections == 1, limit_s=BOUND_S)


@pytest.mark.parametrize(("step", "fault"), faulty_peer.every_fault())
def test_every_fault_of_a_server_is_followed_by_a_dial(
    certificates: Path, step: Step, fault: Fault
) -> None:
    """Each fault occurs twice during the first dial, and twice after a connection was lost."""
    faults = [(step, fault)] * 2

    async def story(peer: Peer, link: connection.Connection) -> None:
        await after_faults(peer, link, faults)

    play(certificates, story, faults=faults)


class EndedDuringTls(asyncio.SelectorEventLoop):
    """An event loop that returns no transport for the first TLS handshake of a client.

    asyncio does so if the connection ends between the handshake and the return of `start_tls`.
    """

    ended = False

    async def start_tls(self, transport: Any, protocol: Any, *args: Any, **kwargs: Any) -> Any:
        upgraded = await super().start_tls(transport, protocol, *args, **kwargs)
        if kwargs.get("server_side") or self.ended:
            return upgraded
        self.ended = True
        transport.abort()
        return None


def test_a_connection_that_ends_as_tls_begins_is_dialled_again_without_a_trace(
    certificates: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def played() -> None:
        async with (
            faulty_peer.serving(certificates) as (peer, url),
            connection.Connection(url, name="t") as link,
        ):
            await served(peer, link, 1)

    loop = EndedDuringTls()
    try:
        loop.run_until_complete(played())
    finally:
        loop.close()
    assert loop.ended
    # pytest turns an exception in a destructor into a failure of the test that runs then
    gc.collect()
    assert capsys.readouterr().err == ""


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    first=st.lists(st.sampled_from(faulty_peer.every_fault()), max_size=3),
    then=st.lists(st.sampled_from(faulty_peer.every_fault()), max_size=3),
)
def test_any_faults_in_a_row_are_followed_by_a_dial(
    certificates: Path, first: Faults, then: Faults
) -> None:
    async def story(peer: Peer, link: connection.Connection) -> None:
        await after_faults(peer, link, then)

    play(certificates, story, faults=first)


class Faulty(nats.aio.client.Client):
    """A client with one call that misbehaves; if it hangs, until `over` is set."""

    def __init__(self, call: str, way: Ways, over: asyncio.Event) -> None:
        super().__init__()
        self._call, self._way, self._over = call, way, over

    async def connect(self, *args: Any, **options: Any) -> None:
        await self._misbehave("connect")
        await super().connect(*args, **options)

    async def subscribe(self, *args: Any, **options: Any) -> Any:
        await self._misbehave("subscribe")
        return await super().subscribe(*args, **options)

    async def close(self) -> None:
        await self._misbehave("close")
        await super().close()

    async def _misbehave(self, call: str) -> None:
        if call != self._call:
            return
        match self._way:
            case Ways.RAISES:
                raise AttributeError(call)
            case Ways.IS_CANCELLED:
                raise asyncio.CancelledError
            case Ways.HANGS:
                while not self._over.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await self._over.wait()


@pytest.mark.parametrize("way", Ways)
@pytest.mark.parametrize("call", ["connect", "subscribe", "close"])
def test_a_client_that_does_something_unexpected_is_replaced(
    certificates: Path, call: str, way: Ways
) -> None:
    over = asyncio.Event()
    made: list[nats.aio.client.Client] = []

    def make() -> nats.aio.client.Client:
        # the first client is only a placeholder until the first dial
        made.append(Faulty(call, way, over) if len(made) == 1 else nats.aio.client.Client())
        return made[-1]

    async def story(peer: Peer, link: connection.Connection) -> None:
        await link.subscribe("a", ignore)
        if call == "close":
            await served(peer, link, 1)
            peer.kick()
        await bus_subjects.until(
            lambda: link.live_client() is made[-1] and len(made) >= 3, limit_s=BOUND_S
        )
        # a client whose dial could not be cancelled is closed once it is connected
        over.set()
        await bus_subjects.until(lambda: peer.connections == 1, limit_s=BOUND_S)

    async def ending(peer: Peer, link: connection.Connection) -> None:
        try:
            await story(peer, link)
        finally:
            over.set()

    play(certificates, ending, faults=[], make=make)


@pytest.mark.parametrize("way", [Ways.RAISES, Ways.HANGS])
def test_a_preparation_that_does_something_unexpected_is_repeated(
    certificates: Path, way: Ways
) -> None:
    calls = 0

    async def prepare(_: nats.aio.client.Client) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            if way is Ways.RAISES:
                raise KeyError(calls)
            await asyncio.Event().wait()

    async def story(peer: Peer, link: connection.Connection) -> None:
        await served(peer, link, 1)

    play(certificates, story, faults=[], prepare=prepare)
