import asyncio
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from muster import codec, vocabulary
from muster.local import kubelet as stand_in
from muster.local import nats
from muster.nats import bus, consumers, streams
from tests.worlds import plugin_process

FUSE = "smarter-devices/fuse"


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mu-"))
    (path / "device-plugins").mkdir()
    (path / "fuse").symlink_to("/dev/null")
    yield path
    shutil.rmtree(path)


def resource(name: str, path: str, **more: object) -> dict[str, object]:
    return {"name": name, "groups": [{"devices": [{"path": path}]}], **more}


def settings(root: Path, url: str, **more: object) -> Path:
    file = root / "plugin.yaml"
    configuration = {
        "node": "n1.example",
        "bus": {"url": url},
        "kubelet": {"directory": str(root)},
        "heartbeat": {"interval_s": 0.3},
        "resources": [resource(FUSE, str(root / "fuse"))],
    }
    file.write_bytes(msgspec.yaml.encode(configuration | more))
    return file


def test_it_serves_reports_answers_and_publishes_its_end(root: Path) -> None:
    async def story() -> None:
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as listener,
            stand_in.Kubelet(directory=root, node="n1.example") as kubelet,
        ):
            await listener.link.client()
            heartbeats: asyncio.Queue[vocabulary.Heartbeat] = asyncio.Queue()
            await listener.heartbeats(heartbeats.put)
            async with plugin_process.started(settings(root, server.url)) as process:
                await process.said("listening")
                heartbeat = await heartbeats.get()
                while not heartbeat.resources[0].probe_ok:
                    heartbeat = await heartbeats.get()
                (state,) = heartbeat.resources
                assert (state.name, state.streams, state.devices, state.healthy, state.problem) == (
                    FUSE,
                    1,
                    1,
                    1,
                    "",
                )
                assert (heartbeat.node, heartbeat.interval_s, heartbeat.phase) == (
                    "n1.example",
                    0.3,
                    "serving",
                )
                assert set(heartbeat.checkers) == {"sockets", "devices", "pods"}
                assert await process.asked("/readyz") == (200, "ok\n")
                assert await process.asked("/healthz") == (200, "ok\n")
                _, metrics = await process.asked("/metrics")
                assert f'muster_plugin_streams{{resource="{FUSE}"}} 1.0' in metrics
                assert (
                    f'muster_plugin_registrations_total{{reason="start",resource="{FUSE}"}} 1.0'
                    in metrics
                )
                probe = vocabulary.rpc_subject("n1.example", "device-plugin", "probe")
                answer = codec.decode_heartbeat(await listener.request(probe, timeout_s=2))
                assert answer.instance == heartbeat.instance
                await process.stop()
            kept = await consumers.newest(
                listener.link, streams.EVENTS, "muster.event.n1_example.>"
            )
            (inventory,) = await consumers.newest(
                listener.link, streams.INVENTORY, "muster.inventory.n1_example.>"
            )
            assert isinstance(inventory.data, vocabulary.InventoryReported)
            assert inventory.data.resources == (FUSE,)
            types = [event.type for event in kept]
            assert types[0] == "plugin.started"
            assert types[-1] == "plugin.stopping"
            assert set(types) == {
                "plugin.started",
                "plugin.registered",
                "plugin.stopping",
            }
            assert [path.name for path in kubelet.plugins_directory.glob("muster-*")] == []

    plugin_process.run(story)


def test_a_problem_is_reported_at_once_and_not_only_in_the_next_periodic_heartbeat(
    root: Path,
) -> None:
    async def story() -> None:
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as listener,
            stand_in.Kubelet(directory=root, node="n1.example") as kubelet,
        ):
            await listener.link.client()
            heartbeats: asyncio.Queue[vocabulary.Heartbeat] = asyncio.Queue()
            await listener.heartbeats(heartbeats.put)
            file = settings(root, server.url, heartbeat={"interval_s": 3600})
            async with plugin_process.started(file) as process:
                await process.said("bus_connected")
                await kubelet.until(lambda state: FUSE in state.resources)
                assert await kubelet.drop_stream(FUSE)
                while not (problem := (await heartbeats.get()).resources[0].problem):
                    pass
                assert problem == "stream closed 0.0 s ago, registering"
                while (await heartbeats.get()).resources[0].problem:
                    pass
                await process.stop()

    plugin_process.run(story)


def test_a_problem_with_devices_is_published_when_it_begins_and_when_it_ends(root: Path) -> None:
    async def story() -> None:
        links = resource("a.example/links", str(root / "x*"), grace_s=0)
        both = f"{FUSE} and a.example/links both advertise /dev/null"
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as listener,
            stand_in.Kubelet(directory=root, node="n1.example"),
        ):
            await listener.link.client()
            heartbeats: asyncio.Queue[vocabulary.Heartbeat] = asyncio.Queue()
            await listener.heartbeats(heartbeats.put)
            mine = resource(FUSE, str(root / "fuse"))
            file = settings(root, server.url, resources=[mine, links])
            async with plugin_process.started(file) as process:
                await process.said("listening")
                heartbeat = await heartbeats.get()
                assert heartbeat.problems == ()
                (root / "x1").symlink_to("/dev/null")
                while not heartbeat.problems:
                    heartbeat = await heartbeats.get()
                assert heartbeat.problems == (both,)
                (root / "x1").unlink()
                while heartbeat.problems:
                    heartbeat = await heartbeats.get()
                await process.stop()
            (last,) = await consumers.newest(
                listener.link, streams.EVENTS, "muster.event.*.*.problem.changed"
            )
            assert isinstance(last.data, vocabulary.ProblemChanged)
            assert (last.data.problem, last.data.holds) == (both, False)

    plugin_process.run(story)


def test_devices_are_served_and_it_ends_in_time_without_a_bus(root: Path) -> None:
    async def story() -> None:
        url = f"nats://127.0.0.1:{nats.free_port()}"
        async with (
            stand_in.Kubelet(directory=root, node="n1.example") as kubelet,
            plugin_process.started(settings(root, url)) as process,
        ):
            await process.said("bus_disconnected")
            node = await kubelet.until(
                lambda state: FUSE in state.resources and state.resources[FUSE].allocatable == 1
            )
            assert node.resources[FUSE].registered == 1
            await process.stop()

    plugin_process.run(story)


def test_it_ends_in_time_while_the_bus_hangs(root: Path) -> None:
    async def story() -> None:
        async with (
            nats.NatsServer(root / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as owner,
            stand_in.Kubelet(directory=root, node="n1.example"),
        ):
            await owner.link.client()
            async with plugin_process.started(settings(root, server.url)) as process:
                await process.said("bus_connected")
                server.freeze()
                await process.stop()
                server.thaw()

    plugin_process.run(story)


def test_after_a_kill_nothing_is_left_behind_by_the_next_start(root: Path) -> None:
    async def story() -> None:
        url = f"nats://127.0.0.1:{nats.free_port()}"
        async with stand_in.Kubelet(directory=root, node="n1.example") as kubelet:
            async with plugin_process.started(settings(root, url)) as process:
                await process.said("registered")
                process.process.kill()
                await process.process.wait()
            (left,) = kubelet.plugins_directory.glob("muster-*")
            async with plugin_process.started(settings(root, url)) as process:
                assert (await process.said("stale_socket_removed"))["socket"] == left.name
                await process.said("registered")
                await process.stop()
            assert not list(kubelet.plugins_directory.glob("muster-*"))

    plugin_process.run(story)


async def refused(config: Path) -> str:
    async with plugin_process.started(config) as process:
        output, errors = await process.process.communicate()
        assert (process.process.returncode, output) == (2, b"")
        return errors.decode()


def test_an_unusable_configuration_is_one_line_and_exit_code_two(root: Path) -> None:
    async def story() -> None:
        url = "nats://127.0.0.1:1"
        (root / "empty").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            bad = await refused(settings(root, url, resources=[resource("fuse", "/dev/fuse")]))
            elsewhere = {"directory": str(root / "empty")}
            missing = await refused(settings(root, url, kubelet=elsewhere))
            busy = await refused(settings(root, url, http={"port": port}))
        assert bad == (
            f"muster-plugin: {root / 'plugin.yaml'}: resources[0].name: 'fuse' has no domain; "
            "write it as example.com/fuse\n"
        )
        assert missing == (
            f"muster-plugin: kubelet.directory: {root}/empty/device-plugins: no such directory; "
            "is the node's kubelet directory mounted?\n"
        )
        assert busy == f"muster-plugin: http: 127.0.0.1:{port}: Address already in use\n"

    plugin_process.run(story)


def test_with_a_low_limit_of_open_files_the_resources_that_fit_are_served(root: Path) -> None:
    async def story() -> None:
        (root / "d").mkdir()
        for number in range(30):
            (root / f"d/x{number:02}").symlink_to("/dev/null")
        entry = {"path": str(root / "d/*"), "shared": True}
        every = resource("a.example/*", "", perMatch=True, groups=[{"devices": [entry]}])
        file = settings(root, "nats://127.0.0.1:1", resources=[every])
        own = [str(root / f"d/x{number:02}") for number in range(9)]
        names = [f"a.example/{path.removeprefix('/').replace('/', '_')}" for path in own]
        limits = ("prlimit", "--nofile=64:200", sys.executable, "-m", "muster_plugin")
        pipe = asyncio.subprocess.PIPE
        async with stand_in.Kubelet(directory=root, node="n1.example") as kubelet:
            started = await asyncio.create_subprocess_exec(
                *limits, "--config", str(file), stdout=pipe, stderr=pipe
            )
            process = plugin_process.Plugin(started)
            problem = await process.said("device_problem_detected")
            assert str(problem["problem"]).startswith(
                "30 resources are more than the 9 that one plugin "
            )
            await process.said("listening")
            node = await kubelet.until(lambda state: len(state.resources) == len(own))
            assert sorted(node.resources) == names
            await process.stop()

    plugin_process.run(story)
