"""One node floods: nats-server delivers only its share, and all heartbeats of other nodes."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest

from muster import codec, vocabulary
from muster.local import nats as local
from muster.local import processes
from muster.nats import heartbeat_budget, heartbeat_reader
from tests.worlds import bus_subjects, nats_links, shipped_nats

LIMITS = heartbeat_budget.Limits(period_s=0.5)
NODES = frozenset({"node-a", "node-b"})
_SENT = 40
_PAYLOAD_MAX = 65_536


_FLOOD = """
import socket, sys
port, size = int(sys.argv[1]), int(sys.argv[2])
head = f"PUB muster.heartbeat.node-a.device-plugin {size}\\r\\n".encode()
many = (head + b"x" * size + b"\\r\\n") * max(1, 262144 // size)
link = socket.create_connection(("127.0.0.1", port))
link.sendall(b'CONNECT {"verbose":false,"user":"plugin_node-a","pass":"secret"}\\r\\n')
while True:
    link.sendall(many)
"""


@contextlib.asynccontextmanager
async def flood(server: local.NatsServer, size: int) -> AsyncIterator[None]:
    """Send heartbeats of node-a without a pause, over two connections."""
    arguments = (sys.executable, "-c", _FLOOD, str(server.port), str(size))
    senders = [
        await asyncio.create_subprocess_exec(*arguments, preexec_fn=processes.die_with_parent())
        for _ in range(2)
    ]
    try:
        yield
    finally:
        for sender in senders:
            sender.kill()
            await sender.wait()


async def send(honest: bus_subjects.Client, numbers: Iterable[int]) -> None:
    """Send heartbeats of node-b with these numbers, at the pace of an honest sender."""
    for seq in numbers:
        heartbeat = vocabulary.Heartbeat(
            node="node-b", plugin="device-plugin", instance="i", seq=seq, interval_s=1.0
        )
        await honest.raw.publish(heartbeat.subject, codec.encode_heartbeat(heartbeat))
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("before", [0, 60], ids=["at once", "after a quiet time"])
def test_a_flood_of_one_node_delays_no_other_and_does_not_cut_the_reader(
    tmp_path: Path, before: int
) -> None:
    """The budgets are largest after small heartbeats."""
    received: set[int] = set()  # one may arrive twice while its node is being subscribed to
    noisy: list[heartbeat_budget.Excess] = []

    async def handle(batch: Sequence[vocabulary.Heartbeat]) -> None:
        received.update(heartbeat.seq for heartbeat in batch if heartbeat.node == "node-b")

    async def note(excess: heartbeat_budget.Excess) -> None:
        noisy.append(excess)

    async def story(server: local.NatsServer) -> None:
        url = shipped_nats.address(server, "health")
        async with (
            heartbeat_reader.HeartbeatStream(url, name="test", limits=LIMITS) as stream,
            shipped_nats.client(server, "plugin_node-b") as honest,
        ):
            await stream.follow(handle, nodes=lambda: (1, NODES), on_excess=note)
            renewing = asyncio.create_task(stream.run())
            await nats_links.settled(stream.link)
            await send(honest, range(before))
            await nats_links.until(lambda: len(received) >= before)
            async with flood(server, _PAYLOAD_MAX):
                await send(honest, range(before, before + _SENT))
                await nats_links.until(lambda: len(received) >= before + _SENT and bool(noisy))
            assert stream.link.epoch == 1
            renewing.cancel()
        assert received == set(range(before + _SENT))
        assert {excess.node for excess in noisy} == {"node-a"}
        assert noisy[0].messages >= LIMITS.messages

    shipped_nats.run(tmp_path, story)
