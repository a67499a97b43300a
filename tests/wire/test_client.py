"""The SDK, in a separate program of five lines and in this process."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

import muster
from muster import codec, vocabulary
from muster.local import nats as local
from muster.nats import bus
from tests.worlds import muster_command

FIVE_LINES: Final = """\
import asyncio, muster
async def main():
    async for event in muster.events("device.*", node="*"):
        print(event, flush=True)
asyncio.run(main())
"""
OVER_WEBSOCKETS: Final = """\
import asyncio, sys, muster.client, nats
async def main(port):
    assert "aiohttp" not in sys.modules
    async with await nats.connect(f"ws://127.0.0.1:{port}") as client:
        print(client.is_connected)
asyncio.run(main(sys.argv[1]))
"""
Story = Callable[[local.NatsServer, bus.Bus], Awaitable[None]]


def play(tmp_path: Path, story: Story) -> None:
    async def played() -> None:
        async with (
            asyncio.timeout(100),
            local.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="plugins/p", name="test", owner=True) as link,
        ):
            await story(server, link)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(played())


def removed(device: str, node: str = "node-a") -> vocabulary.Event:
    return vocabulary.DeviceRemoved(
        node=node, at=datetime.now(UTC), plugin="p", resource="example.com/fuse", device_id=device
    )


def stopping(node: str = "node-a") -> vocabulary.Event:
    return vocabulary.PluginStopping(
        node=node, at=datetime.now(UTC), plugin="p", reason=vocabulary.StopReason.SIGNAL
    )


def applied(node: str = "node-a") -> vocabulary.Event:
    return vocabulary.LabelsApplied(node=node, at=datetime.now(UTC), labels={}, reason="asked to")


async def first(
    events: AsyncGenerator[codec.CloudEvent, None], wanted: int
) -> list[tuple[str, str]]:
    """Return node and type of the first `wanted` events, and end the subscription."""
    collected = []
    async with contextlib.aclosing(events):
        async for event in events:
            collected.append((event.node, event.type))
            if len(collected) == wanted:
                break
    return collected


def test_asking_for_the_past_alone_ends_when_nats_is_not_there() -> None:
    code, out, errors = muster_command.muster(
        *("events", "--no-follow"),
        environment=os.environ | {"NATS_URL": "nats://me:secret@127.0.0.1:1"},
    )
    problem = (
        "muster events: NATS at nats://127.0.0.1:1 has not answered for 3 s: Connection refused"
    )
    assert (code, out, errors.splitlines()[-1]) == (1, "", problem)
    assert "secret" not in errors


def test_an_outside_program_of_five_lines_prints_what_happens(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    program = elsewhere / "subscriber.py"
    program.write_text(FIVE_LINES)
    assert len(FIVE_LINES.splitlines()) == 5

    async def story(server: local.NatsServer, link: bus.Bus) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(program)),
            cwd=elsewhere,
            env={**os.environ, "NATS_URL": server.url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(process.stdout.readline())
        count = 0
        while not reading.done():
            await link.publish(stopping())
            await link.publish(removed(f"fuse-{count}"))
            count += 1
            await asyncio.wait([reading], timeout=0.05)
        assert await reading
        await link.publish(removed("the-last", "b.example"))
        line = b""
        while b"the-last" not in line:
            line = await process.stdout.readline()
            assert line, "ended"
            assert b" device.removed " in line
        assert line[9:].decode() == (
            "b.example device.removed plugin=p resource=example.com/fuse"
            " device_id=the-last count=1\n"
        )
        process.kill()
        _, err = await process.communicate()
        assert err == b""

    play(tmp_path, story)


def test_other_clients_of_the_process_may_use_websockets_and_only_they_load_aiohttp(
    tmp_path: Path,
) -> None:
    async def story() -> tuple[bytes, bytes]:
        port, config = local.free_port(), tmp_path / "nats.conf"
        config.write_text(f"websocket {{ listen: '127.0.0.1:{port}', no_tls: true }}")
        pipe = asyncio.subprocess.PIPE
        async with asyncio.timeout(100), local.NatsServer(tmp_path / "nats", config=config):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", OVER_WEBSOCKETS, str(port)), stdout=pipe, stderr=pipe
            )
            return await process.communicate()

    assert asyncio.run(story()) == (b"True\n", b"")


def test_a_subscriber_can_begin_that_long_ago(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, link: bus.Bus) -> None:
        for event in (removed("1"), stopping("node-b"), removed("2", "node-b"), applied()):
            await link.publish(event)
        minute = timedelta(minutes=1)
        devices = muster.events("device.*", since=minute, url=server.url)
        assert await first(devices, 2) == [
            ("node-a", "device.removed"),
            ("node-b", "device.removed"),
        ]
        since = datetime.now(UTC) - minute
        everything = await first(muster.events(since=since, url=server.url), 4)
        assert sorted(everything) == [
            ("node-a", "device.removed"),
            ("node-a", "labels.applied"),
            ("node-b", "device.removed"),
            ("node-b", "plugin.stopping"),
        ]

    play(tmp_path, story)


def test_a_pattern_of_nodes_is_matched_exactly(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, link: bus.Bus) -> None:
        for node in ("gpu-1", "cpu-1", "gpu-2.example", "gpu-3"):
            await link.publish(removed("1", node))
        events = muster.events(node="gpu-?*e*", since=timedelta(minutes=1), url=server.url)
        assert await first(events, 1) == [("gpu-2.example", "device.removed")]
        named = muster.events(node="gpu-3", since=timedelta(minutes=1), url=server.url)
        assert await first(named, 1) == [("gpu-3", "device.removed")]

    play(tmp_path, story)


def test_a_subscriber_receives_what_happened_while_the_server_was_away(tmp_path: Path) -> None:
    async def story(server: local.NatsServer, link: bus.Bus) -> None:
        await link.publish(removed("before"))
        events = muster.events("device.*", since=timedelta(minutes=1), url=server.url)
        assert str((await anext(events)).data).count("before") == 1
        await server.kill()
        link.enqueue(removed("during"))
        following = asyncio.ensure_future(anext(events))
        await server.start()
        assert str((await following).data).count("during") == 1
        await events.aclose()

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("types", "node", "problem"),
    [
        ("devices.*", "*", r"no event type matches 'devices\.\*'; the types are: alert\.changed, "),
        ("", "*", "no event type matches ''"),
        ("*", "No such node", "node: 'No such node' is not a Kubernetes node name"),
    ],
)
def test_what_can_never_match_is_refused(types: str, node: str, problem: str) -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match=problem):
            await anext(muster.events(types, node=node))

    asyncio.run(story())
