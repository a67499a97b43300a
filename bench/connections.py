"""Adapter for NATS: simulates the connections of thousands of plugins in one process.

Each connection implements nats-server's protocol: it sends heartbeats, answers probes, and
reconnects after an outage like a plugin. It sends the same bytes as a healthy plugin, without a
kubelet, devices or a process of its own.

    python -m bench.connections --url nats://... --connections 10000 --nodes 10000

prints `listening` once all are connected. A line on stdin is a command: `kill 37` ends 37 plugins
as a crash would; `revive NAME` starts one again; `back` prints `back` once all are connected again;
`change` changes a random node's GPUs; `events` prints how many events were published.

With `--tokens FILE`, each node has its own connection over TLS (NATS_CA), with its own token, as in
production. It then also publishes events: see `bench.reports`.
"""

import argparse
import asyncio
import itertools
import os
import random
import socket
import ssl
import sys
import time
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import orjson

from bench import reports
from muster import codec, vocabulary
from muster.nats.auth import permissions
from muster.service import runtime

GPU: Final = "nvidia.com/gpu"
PLUGIN: Final = "device-plugin"
_AT_ONCE: Final = 200
_BACK_S: Final = (0.1, 0.5)
"""The delays before a redial, as in `muster.nats.connection`."""
_TURN_S: Final = 0.01
_INBOX: Final = 1_000_000
"""The id of the inbox's subscription; the other subscriptions are numbered from 1."""


def name_of(number: int) -> str:
    """Return the name of a simulated node."""
    return f"node-{number:06d}.bench.example"


async def dial(
    make: Callable[[], asyncio.Protocol], host: str, port: int, trusted: ssl.SSLContext
) -> None:
    """Connect to a NATS server that asks for TLS. Raises OSError."""
    loop = asyncio.get_running_loop()
    plain = socket.socket()
    plain.setblocking(False)  # noqa: FBT003
    try:
        await loop.sock_connect(plain, (host, port))
        line = b""
        while not line.endswith(b"\r\n"):
            # skip the server's INFO, which precedes the handshake
            piece = await loop.sock_recv(plain, 4096)
            # if the connection was closed, the handshake fails
            line += piece or b"\r\n"
        await loop.create_connection(make, sock=plain, ssl=trusted, server_hostname=host)
    except BaseException:
        plain.close()
        raise


class _Node:
    """One simulated plugin: its connection, and the state of its heartbeats."""

    def __init__(self, number: int, interval_s: float) -> None:
        self.name = name_of(number)
        self.token = vocabulary.node_token(self.name)
        self.is_killed = self.was_killed = self.was_changed = False
        self.link: _Link | None = None
        self._interval_s = interval_s
        self.revive()
        subject = f"muster.heartbeat.{self.token}.{PLUGIN}"
        self._head = f"PUB {subject} ".encode()

    def revive(self) -> None:
        """Restart as a new process."""
        self.is_killed = False
        self._seq = 0
        self._began_at = time.monotonic()
        self.instance = f"{random.getrandbits(64):016x}"

    def send(self, words: bytes) -> bool:
        """Send a message if the plugin is connected; return whether it is."""
        if self.is_killed or self.link is None or not self.link.is_open:
            return False
        self.link.send(words)
        return True

    def heartbeat(self) -> bytes:
        """Return the next heartbeat as a protocol message."""
        payload = self.payload()
        return b"%b%d\r\n%b\r\n" % (self._head, len(payload), payload)

    def payload(self) -> bytes:
        """Return the payload of the next heartbeat."""
        self._seq += 1
        heartbeat = vocabulary.Heartbeat(
            node=self.name,
            plugin=PLUGIN,
            instance=self.instance,
            boot="8b1a9953-c461-4f0c-9ce1-2c1b3a0f1d11",
            version="0.1.0",
            seq=self._seq,
            interval_s=self._interval_s,
            uptime_s=round(time.monotonic() - self._began_at, 3),
            wall=round(time.time(), 3),
            kubelet_socket="123456.1767225600",
            resources=(
                vocabulary.ResourceBeat(
                    name=GPU,
                    registered_age_s=100.0,
                    streams=1,
                    last_send_age_s=1.0,
                    registrations=1,
                    probe_ok=True,
                    probe_ms=0.8,
                    probe_age_s=1.0,
                    devices=8,
                    healthy=8,
                ),
            ),
            loop_lag_ms=0.3,
        )
        return codec.encode_heartbeat(heartbeat)


class _Link(asyncio.Protocol):
    """One connection, shared by some of the simulated nodes."""

    def __init__(self, fleet: "Fleet", name: str, nodes: list[_Node], *, server: int) -> None:
        self.nodes = nodes
        self.is_open = False
        self._fleet = fleet
        self._name = name
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT and the subscriptions."""
        assert isinstance(transport, asyncio.Transport), "TCP"
        self._transport, self._rest = transport, b""
        options = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "0",
            "protocol": 1,
            "name": self._name,
            "headers": True,
            "no_responders": True,
        }
        if self._fleet.tokens:
            options["auth_token"] = self._fleet.tokens[self.nodes[0].name]
        words = [b"CONNECT %b\r\n" % orjson.dumps(options)]
        for number, node in enumerate(self.nodes, 1):
            if not node.is_killed:
                words.append(f"SUB muster.rpc.{node.token}.{PLUGIN}.probe {number}\r\n".encode())
        if self._fleet.tokens:
            inbox = permissions.inbox(permissions.plugin_user(self.nodes[0].token))
            words.append(f"SUB {inbox}.* {_INBOX}\r\n".encode())
        words.append(b"PING\r\n")
        transport.write(b"".join(words))

    def data_received(self, data: bytes) -> None:
        """Answer PING and probes."""
        if self._transport is None:
            return  # TLS may deliver buffered data after the connection has ended
        data = self._rest + data
        while (end := data.find(b"\r\n")) >= 0:
            words = data[:end].split()
            after = end + 2
            if words[0] in {b"MSG", b"HMSG"}:
                size = int(words[-1])
                if len(data) < after + size + 2:
                    break
                body, after = data[after : after + size], after + size + 2
                if int(words[2]) == _INBOX:
                    if words[0] == b"MSG" and b'"seq"' in body:
                        self._fleet.reports.acknowledged(words[1].rpartition(b".")[2].decode())
                elif len(words) == 5:  # noqa: PLR2004  # MSG subject sid reply size
                    answer = self.nodes[int(words[2]) - 1].payload()
                    self._transport.write(b"PUB %b %d\r\n%b\r\n" % (words[3], len(answer), answer))
            elif words[0] == b"PING":
                self._transport.write(b"PONG\r\n")
            elif words[0] == b"PONG" and not self.is_open:
                self.is_open = True
                self._fleet.opened()
            data = data[after:]
        self._rest = data

    def connection_lost(self, exc: Exception | None) -> None:
        """Reconnect, as a plugin does."""
        del exc
        was, self.is_open, self._transport = self.is_open, False, None
        self._fleet.closed(self, was_open=was)

    def send(self, words: bytes) -> None:
        """Send if connected to the server; otherwise skip, as a plugin skips its heartbeat."""
        if self.is_open and self._transport is not None:
            self._transport.write(words)

    def abort(self) -> None:
        """Close the connection as the kernel does for a killed process."""
        if self._transport is not None:
            self._transport.abort()


class Fleet:
    """The connections of all simulated plugins, and the schedule of their heartbeats."""

    def __init__(
        self,
        url: str,
        *,
        connections: int,
        nodes: int,
        interval_s: float,
        tokens: Mapping[str, str] = types.MappingProxyType({}),
        events_s: float = 0.0,
    ) -> None:
        parts = [urlsplit(address) for address in url.split(",")]
        self._servers = [(part.hostname or "127.0.0.1", part.port or 4222) for part in parts]
        self._interval_s = interval_s
        self.tokens = tokens
        authority = os.environ.get("NATS_CA")
        self._trusted = ssl.create_default_context(cafile=authority) if tokens else None
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._open = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        plugins = [_Node(number, interval_s) for number in range(nodes)]
        each = nodes // connections
        self._links = []
        for number in range(connections):
            own = plugins[number * each : (number + 1) * each]
            name = f"{PLUGIN} {own[0].name}" if each == 1 else f"fleet-{number}"
            self._links.append(_Link(self, name, own, server=number % len(self._servers)))
        self.reports = reports.Reports(events_s)
        self._nodes = [(link, node) for link in self._links for node in link.nodes]
        for link, node in self._nodes:
            node.link = link

    def opened(self) -> None:
        """Count one more connection."""
        self._open += 1
        self._changed.set()

    def closed(self, link: _Link, *, was_open: bool) -> None:
        """Count one connection less; redial unless all its plugins were killed."""
        self._open -= was_open
        self._changed.set()
        if not all(node.is_killed for node in link.nodes):
            self._later(self._dial(link, random.uniform(*_BACK_S)))  # noqa: S311  # jitter

    async def run(self) -> None:
        """Connect all, print `listening`, and send heartbeats forever."""
        for link in self._links:
            self._later(self._dial(link, 0.0))
        await self._all_open("listening")
        self._later(self._listen())
        if self.tokens:
            self._later(self.reports.publish([node for _, node in self._nodes]))
        await self._send_heartbeats()

    async def _all_open(self, event: str) -> None:
        wanted = sum(not all(node.is_killed for node in link.nodes) for link in self._links)
        while self._open < wanted:
            self._changed.clear()
            await self._changed.wait()
        _print(event=event, connections=self._open, nodes=len(self._nodes))

    async def _dial(self, link: _Link, after_s: float) -> None:
        await asyncio.sleep(after_s)
        loop = asyncio.get_running_loop()
        while True:
            async with self._gate:
                try:
                    async with asyncio.timeout(5):
                        if self._trusted is None:
                            await loop.create_connection(lambda: link, *self._servers[link.server])
                        else:
                            await dial(lambda: link, *self._servers[link.server], self._trusted)
                except (OSError, TimeoutError):
                    link.server = (link.server + 1) % len(self._servers)
                else:
                    return
            await asyncio.sleep(random.uniform(*_BACK_S))  # noqa: S311  # jitter

    async def _send_heartbeats(self) -> None:
        """Send one heartbeat per node and interval, evenly spread."""
        clock = asyncio.get_running_loop().time
        began_at, done = clock(), 0
        turns = self._turns()
        while True:
            await asyncio.sleep(_TURN_S)
            due = int((clock() - began_at) / self._interval_s * len(self._nodes))
            for link, pairs in itertools.groupby(itertools.islice(turns, due - done), _link):
                if link.is_open:
                    nodes = [node for _, node in pairs if not node.is_killed]
                    # real plugins do not always send in the same order
                    random.shuffle(nodes)
                    link.send(b"".join(node.heartbeat() for node in nodes))
            done = due

    def _turns(self) -> Iterator[tuple[_Link, _Node]]:
        while True:
            yield from self._nodes

    async def _listen(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            word, _, count = line.decode().strip().partition(" ")
            if word == "kill":
                self._kill(int(count))
            elif word == "back":
                self._later(self._all_open("back"))
            elif word == "revive":
                self._revive(count)
            elif word == "change":
                self._change()
            elif word == "events":
                self._later(self._count())

    def _kill(self, count: int) -> None:
        living = [pair for pair in self._nodes if not pair[1].was_killed]
        chosen = random.sample(living, count)
        for link, node in chosen:
            node.is_killed = node.was_killed = True
            if all(other.is_killed for other in link.nodes):
                link.abort()
        _print(event="killed", nodes=[node.name for _, node in chosen], at=time.monotonic())

    def _revive(self, name: str) -> None:
        for link, node in self._nodes:
            if node.name == name:
                node.revive()
                self._later(self._dial(link, 0.0))

    def _change(self) -> None:
        """Change the GPUs of a random node that was neither killed nor changed before."""
        left = [node for _, node in self._nodes if not (node.was_killed or node.was_changed)]
        (node,) = random.sample(left, 1)
        node.was_changed = True
        _print(event="changed", node=node.name, at=time.monotonic())
        self.reports.change(node, "NVIDIA H100 80GB HBM3", 81_559)

    async def _count(self) -> None:
        await self.reports.settle()
        _print(event="events", published=self.reports.published, stored_s=self.reports.stored_s)

    def _later(self, story: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(story)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _link(pair: tuple[_Link, _Node]) -> _Link:
    return pair[0]


def _print(**facts: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(facts) + b"\n")
    sys.stdout.buffer.flush()


async def _serve(chosen: argparse.Namespace) -> None:
    fleet = Fleet(
        chosen.url,
        connections=chosen.connections,
        nodes=chosen.nodes,
        interval_s=chosen.interval,
        tokens=orjson.loads(chosen.tokens.read_bytes()) if chosen.tokens else {},
        events_s=chosen.events,
    )
    await runtime.run(fleet.run())


def main() -> int:
    """Open the connections given by the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.connections")
    parser.add_argument("--url", required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--tokens", type=Path, help="connect as in production, each with its own")
    parser.add_argument("--events", type=float, default=0.0, help="events a second, with --tokens")
    asyncio.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
