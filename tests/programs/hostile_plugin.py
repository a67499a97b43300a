"""A compromised plugin: attacks the bus from inside the plugin's pod, with its token.

It prints, as JSON, the number of bytes sent, of connections accepted, and of each error of NATS.

python hostile_plugin.py large|medium|names|events|storm SECONDS
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from muster import codec, vocabulary

NODE = os.environ["NODE_NAME"]
PLUGIN = "device-plugin"
LINKS = 3
STORM = [f"p{number}" for number in range(15)]
STORM_BEAT_S, STORM_TURN_S = 0.5, 1.8
AGAIN_S = 0.1
MARK = "p000000"

seen: Counter[str] = Counter()


def published(subject: str, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)


def named(number: int, template: bytes) -> bytes:
    return template.replace(MARK.encode(), f"p{number % 150_000:06d}".encode())


def inventory() -> bytes:
    event = vocabulary.InventoryReported(
        node=NODE,
        plugin=MARK,
        at=datetime.now(UTC),
        devices=(vocabulary.Device(id="d", resource="example.com/d"),),
        resources=("example.com/d",),
    )
    payload = codec.encode(event, event_id=MARK, producer="x", instance="x", sequence=1, boot="")
    return published(event.subject, payload)


def heartbeats(turn: int) -> bytes:
    beats = (
        vocabulary.Heartbeat(node=NODE, plugin=name, instance="x", seq=turn, interval_s=0.5)
        for name in STORM[turn % 2 :: 2]
    )
    return b"".join(published(beat.subject, codec.encode_heartbeat(beat)) for beat in beats)


def flood(attack: str) -> Iterator[bytes]:
    token = vocabulary.node_token(NODE)
    match attack:
        case "large" | "medium":
            size = 900_000 if attack == "large" else 65_536
            return itertools.repeat(published(f"muster.heartbeat.{token}.{PLUGIN}", bytes(size)))
        case "names":
            template = inventory()
            return (named(number, template) for number in itertools.count())
        case "events":
            body = os.urandom(1_000_000)
            return itertools.repeat(published(f"muster.event.{token}.{PLUGIN}.device.added", body))
        case "storm":
            return (heartbeats(int(time.monotonic() / STORM_TURN_S)) for _ in itertools.count())
    raise SystemExit(f"no attack: {attack}")


async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async for line in reader:
        if line == b"PING\r\n":
            writer.write(b"PONG\r\n")
        elif line == b"PONG\r\n":
            seen["opened"] += 1
        elif line.startswith(b"-ERR"):
            seen[re.sub(r" for .*", "", line.decode().strip(" -ER'\r\n"))] += 1


async def send(name: str, chunks: Iterator[bytes], pause_s: float) -> None:
    server = urlsplit(os.environ["MUSTER_PLUGIN__BUS__URL"])
    host = server.hostname or ""
    reader, writer = await asyncio.open_connection(host, server.port)
    try:
        await reader.readuntil(b"\r\n")
        trusted = ssl.create_default_context(cafile=os.environ["NATS_CA"])
        await writer.start_tls(trusted, server_hostname=host)
        token = Path(os.environ["NATS_TOKEN_FILE"]).read_text().strip()
        options = {"verbose": False, "lang": "python", "version": "0", "protocol": 1}
        options |= {"name": f"{name} {NODE}", "auth_token": token}
        writer.write(b"CONNECT %b\r\nPING\r\n" % json.dumps(options).encode())
        listening = asyncio.ensure_future(listen(reader, writer))
        try:
            while not listening.done():
                chunk = next(chunks)
                writer.write(chunk)
                await writer.drain()
                seen["sent"] += len(chunk)
                await asyncio.sleep(pause_s)
        finally:
            listening.cancel()
    finally:
        writer.close()


async def attack_as(name: str, attack: str) -> None:
    chunks, pause_s = flood(attack), STORM_BEAT_S if attack == "storm" else 0.0
    while True:
        with contextlib.suppress(OSError, EOFError):
            await send(name, chunks, pause_s)
        await asyncio.sleep(AGAIN_S)


async def main(attack: str, seconds: str) -> None:
    names = [*STORM, PLUGIN] if attack == "storm" else [PLUGIN] * LINKS
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(float(seconds)):
            await asyncio.gather(*(attack_as(name, attack) for name in names))
    sys.stdout.write(json.dumps(seen) + "\n")


asyncio.run(main(*sys.argv[1:]))
