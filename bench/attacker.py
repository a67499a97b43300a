"""Adapter for NATS: simulates one compromised node at full speed, for `bench.hostile`.

python -m bench.attacker --url nats://...,nats://... --tokens FILE --node NAME --attack large

It implements nats-server's protocol itself, over TLS (NATS_CA), with its node's token, and prints
`listening` once its plugin is connected like any other. `go` on stdin starts the attack, and `stop`
ends it; then it prints the counts of sent bytes, connections and refusals.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import orjson

from bench import attacks, connections
from muster import vocabulary
from muster.service import runtime

_BEAT_S: Final = 5.0
_BACK_S: Final = (0.05, 0.2)
_BUFFER: Final = 4 * 1024 * 1024
_AT_ONCE: Final = 32
_OPEN_S: Final = 5.0


class _Link(asyncio.Protocol):
    """One connection; `error` is the last error from the server."""

    def __init__(self, attacker: "Attacker", name: str, words: bytes = b"") -> None:
        self.error = ""
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.writable = asyncio.Event()
        self.writable.set()
        self._attacker, self._name, self._words = attacker, name, words
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        assert isinstance(transport, asyncio.Transport), "TCP"
        self._transport = transport
        transport.set_write_buffer_limits(high=_BUFFER)
        options = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "0",
            "protocol": 1,
            "headers": True,
            "name": self._name,
            "auth_token": self._attacker.token,
        }
        transport.write(b"CONNECT %b\r\nPING\r\n%b" % (orjson.dumps(options), self._words))

    def data_received(self, data: bytes) -> None:
        """Answer PING and count refusals; ignore messages."""
        if self._transport is None:
            return  # TLS may deliver buffered data after the connection has ended
        data = self._rest + data
        lines = data.split(b"\r\n")
        self._rest = lines.pop()[-4096:]
        refused = 0
        for line in lines:
            if line == b"PING":
                self._transport.write(b"PONG\r\n")
            elif line == b"PONG":
                self.opened.set()
            elif line.startswith(b"-ERR"):
                refused += 1
                self.error = line.decode("utf-8", "replace")
        if refused:
            self._attacker.refused(self.error, refused)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake all waiting tasks."""
        del exc
        self._transport = None
        self.closed.set()
        self.opened.set()
        self.writable.set()

    def pause_writing(self) -> None:
        """Stop sending until the write buffer has drained."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Continue sending."""
        self.writable.set()

    def send(self, words: bytes) -> None:
        """Send bytes."""
        if self._transport is not None and not self.closed.is_set():
            self._transport.write(words)
            self._attacker.sent += len(words)

    def abort(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()


class Attacker:
    """Attacks with one node's token; counts the sent bytes, the connections and the refusals."""

    def __init__(self, url: str, node: str, attack: attacks.Attack, *, token: str) -> None:
        parts = [urlsplit(address) for address in url.split(",")]
        self._servers = [(part.hostname or "127.0.0.1", part.port or 4222) for part in parts]
        self._trusted = ssl.create_default_context(cafile=os.environ["NATS_CA"])
        self.token = token
        self._node = node
        self._attack = attack
        self.sent = 0
        self.opened = 0
        self.failed = 0
        self._refusals: Counter[str] = Counter()

    def refused(self, error: str, count: int) -> None:
        """Count refusals, by kind."""
        self._refusals[re.sub(r"( for | to \").*", "", error)[:60]] += count

    async def run(self) -> None:
        """Behave like a healthy plugin until `go`, attack until `stop`, then behave again."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        behaving = asyncio.ensure_future(self._behave())
        await reader.readline()
        behaving.cancel()
        self.sent = self.opened = self.failed = 0
        self._refusals.clear()
        began_at = time.monotonic()
        attacking = asyncio.ensure_future(self._assault())
        await reader.readline()
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
        _print(
            event="stopped",
            seconds=time.monotonic() - began_at,
            sent=self.sent,
            opened=self.opened,
            failed=self.failed,
            refused=self._refusals,
        )
        await self._behave()

    async def _behave(self) -> None:
        """Behave like a healthy plugin."""
        began_at, seqs = time.monotonic(), itertools.count(int(time.time() * 1000))
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with self._link(0, f"{attacks.PLUGIN} {self._node}") as own:
                    _print(event="listening")
                    while not own.closed.is_set():
                        up_s = time.monotonic() - began_at
                        own.send(attacks.heartbeat(self._node, seq=next(seqs), uptime_s=up_s))
                        await asyncio.sleep(_BEAT_S)
            await asyncio.sleep(random.uniform(*_BACK_S))  # noqa: S311  # jitter

    async def _assault(self) -> None:
        match self._attack:
            case attacks.Attack.STORM | attacks.Attack.LISTED_STORM:
                names = attacks.storm_names(self._attack)
                await asyncio.gather(*(self._storm(n, name) for n, name in enumerate(names)))
            case attacks.Attack.RECONNECTS:
                churn = (f"p{number}" for number in range(attacks.CHURN_NAMES))
                await asyncio.gather(*(self._reconnect(0, name) for name in churn))
            case attacks.Attack.CONNECTIONS:
                await asyncio.gather(*(self._reconnect(n, attacks.PLUGIN) for n in range(_AT_ONCE)))
            case _:
                await asyncio.gather(*(self._flood(number) for number in range(attacks.LINKS)))

    async def _flood(self, number: int) -> None:
        chunks = attacks.flood(self._attack, self._node, number)
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with self._link(number, f"{attacks.PLUGIN} {self._node}") as link:
                    await self._pump(link, chunks)
            await asyncio.sleep(random.uniform(*_BACK_S))  # noqa: S311  # jitter

    async def _pump(self, link: _Link, chunks: Iterator[bytes]) -> None:
        while not link.closed.is_set():
            await link.writable.wait()
            link.send(next(chunks))
            await asyncio.sleep(0)

    async def _storm(self, number: int, plugin: str) -> None:
        """Send heartbeats of one plugin name at a low rate, and none in every other turn."""
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with self._link(0, f"{plugin} {self._node}") as link:
                    await self._beat_in_turn(link, plugin, turn=number % 2)
            await asyncio.sleep(random.uniform(*_BACK_S))  # noqa: S311  # jitter

    async def _beat_in_turn(self, link: _Link, plugin: str, *, turn: int) -> None:
        for seq in itertools.count(1):
            now_s = time.monotonic()
            if link.closed.is_set():
                return
            if int(now_s / attacks.STORM_TURN_S) % 2 == turn:
                interval_s = attacks.STORM_BEAT_S
                words = attacks.heartbeat(
                    self._node, plugin, seq=seq, interval_s=interval_s, uptime_s=now_s
                )
                link.send(words)
            await asyncio.sleep(attacks.STORM_BEAT_S)

    async def _reconnect(self, number: int, plugin: str) -> None:
        """Connect, send one heartbeat, and disconnect, repeatedly."""
        seq = 0
        while True:
            seq += 1
            with contextlib.suppress(OSError, TimeoutError):
                async with self._link(number, f"{plugin} {self._node}") as link:
                    link.send(attacks.heartbeat(self._node, plugin, seq=seq))
                    # the heartbeat must have arrived before the connection ends
                    link.opened.clear()
                    link.send(b"PING\r\n")
                    await link.opened.wait()
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def _link(self, number: int, name: str) -> AsyncIterator[_Link]:
        """Connect; disconnect when the block ends. Raises OSError and TimeoutError."""
        link = _Link(self, name, self._subscription())
        host, port = self._servers[number % len(self._servers)]
        try:
            async with asyncio.timeout(_OPEN_S):
                await connections.dial(lambda: link, host, port, self._trusted)
                await link.opened.wait()
            if link.closed.is_set():
                raise ConnectionResetError(link.error)
            self.opened += 1
            yield link
        except (OSError, TimeoutError):
            self.failed += 1
            raise
        finally:
            link.abort()

    def _subscription(self) -> bytes:
        token = vocabulary.node_token(self._node)
        return f"SUB muster.rpc.{token}.{attacks.PLUGIN}.probe 1\r\n".encode()


def _print(**facts: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(facts) + b"\n")
    sys.stdout.buffer.flush()


async def _attack(chosen: argparse.Namespace) -> None:
    token = orjson.loads(chosen.tokens.read_bytes())[chosen.node]
    attacker = Attacker(chosen.url, chosen.node, attacks.Attack(chosen.attack), token=token)
    await runtime.run(attacker.run())


def main() -> int:
    """Run the attack given by the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.attacker")
    parser.add_argument("--url", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--attack", required=True, choices=[*attacks.Attack])
    asyncio.run(_attack(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
