"""The FUSE broker as a process: pods mount through it, it publishes that, and it may be killed."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from muster import codec, vocabulary
from muster.local import nats
from muster.nats import bus, consumers, streams
from muster_fuse import config
from tests.worlds import (
    csi_kubelet,
    fuse_broker,
    fuse_pods,
    fuse_process,
    mount_namespace,
    plugin_process,
)

pytestmark = fuse_pods.needs_pods()

Story = Callable[[fuse_process.Node], Awaitable[None]]
UID = csi_kubelet.UID
MEMORY_MAX_MIB = 64


def on_a_node(story: Story, *, url: str = "nats://127.0.0.1:1") -> None:
    """Run a story on a node, in a mount namespace of its own."""
    with fuse_process.root() as root:
        node = fuse_process.Node(root, bus_url=url)
        mount_namespace.inside(lambda: plugin_process.run(lambda: story(node)))


def a_pod(node: fuse_process.Node) -> contextlib.AbstractContextManager[fuse_pods.Container]:
    binds = {"/run/muster-fuse": node.kubelet.target()}
    return fuse_pods.container(pod_uid=UID, binds=binds)


async def is_ready(process: plugin_process.Plugin) -> None:
    while await process.asked("/readyz") != (200, "ok\n"):
        await asyncio.sleep(0.1)


def test_a_pod_mounts_through_its_volume_and_the_bus_hears_of_it(tmp_path: Path) -> None:
    async def story(node: fuse_process.Node) -> None:
        async with (
            nats.NatsServer(tmp_path / "nats") as server,
            bus.Bus(server.url, producer="tests/x", name="x", owner=True) as listener,
        ):
            await listener.link.client()
            heartbeats: asyncio.Queue[vocabulary.Heartbeat] = asyncio.Queue()
            await listener.heartbeats(heartbeats.put)
            node.write(bus={"url": server.url})
            async with node.broker() as process:
                await process.said("listening")
                await process.said("self_test_passed")
                reason = "the kubelet has not registered the driver\n"
                assert await process.asked("/readyz") == (503, reason)
                await node.kubelet.register()
                await is_ready(process)
                await node.kubelet.publish()
                with a_pod(node) as pod, fuse_broker.daemon(pod) as daemon:
                    await asyncio.to_thread(fuse_broker.mounted, daemon)
                    assert pod.run("/bin/ls", fuse_broker.HOME)[0] == 0
                    mounted = await process.said("file_system_mounted", pod="team/train-0")
                    assert mounted["mount_point"] == fuse_broker.HOME
                    await check_heartbeat(heartbeats)
                    (mount,) = await mounts_when(listener, 1)
                    assert (mount.pod, mount.mount_point) == ("team/train-0", fuse_broker.HOME)
                    probe = vocabulary.rpc_subject("n1.example", "fuse-broker", "probe")
                    answer = codec.decode_heartbeat(await listener.request(probe, timeout_s=5))
                    assert answer.resources[0].probe_ok
                    assert await process.asked("/healthz") == (200, "ok\n")
                    _, metrics = await process.asked("/metrics")
                    samples = dict(re.findall(r"^(muster_fuse\w+) (\S+)$", metrics, re.MULTILINE))
                    assert (samples["muster_fuse_mounts"], samples["muster_fuse_pods"]) == (
                        "1.0",
                        "1.0",
                    )
                assert await mounts_when(listener, 0) == ()
                await node.kubelet.unpublish()
                await process.stop()
            kept = await consumers.newest(
                listener.link, streams.EVENTS, "muster.event.n1_example.fuse-broker.>"
            )
            types = [event.type for event in kept]
            assert (types[0], types[-1]) == ("plugin.started", "plugin.stopping")
            assert "fuse.mounted" in types

    on_a_node(story)


async def mounts_when(listener: bus.Bus, count: int) -> tuple[vocabulary.FuseMount, ...]:
    """Return the mounts of the newest inventory as soon as it lists `count` of them."""
    subject = "muster.inventory.n1_example.fuse-broker.>"
    while True:
        for event in await consumers.newest(listener.link, streams.INVENTORY, subject):
            inventory = event.data
            assert isinstance(inventory, vocabulary.InventoryReported)
            assert (inventory.resources, inventory.devices) == (("fuse.muster.dev",), ())
            if len(inventory.fuse_mounts) == count:
                return inventory.fuse_mounts
        await asyncio.sleep(0.1)


async def check_heartbeat(heartbeats: asyncio.Queue[vocabulary.Heartbeat]) -> None:
    heartbeat = await heartbeats.get()
    while not (heartbeat.resources[0].streams and heartbeat.resources[0].allocated):
        heartbeat = await heartbeats.get()
    assert (heartbeat.node, heartbeat.plugin, heartbeat.phase) == (
        "n1.example",
        "fuse-broker",
        vocabulary.Phase.SERVING,
    )
    (state,) = heartbeat.resources
    assert (state.name, state.streams, state.devices, state.healthy, state.allocated) == (
        "fuse.muster.dev",
        *(1, 1, 1, 1),
    )
    assert (state.probe_ok, state.problem, heartbeat.problems) == (True, "", ())
    assert heartbeat.checkers.keys() == {"hello", "mounts"}
    assert not state.extended, "nothing of it is in the node's allocatable"


FLUSHING = """
file = os.open("/mnt/home/hello", os.O_RDONLY)
asked(_packet(1), file)
os._exit(0)
"""


async def published(
    node: fuse_process.Node, broker: plugin_process.Plugin
) -> contextlib.AbstractContextManager[fuse_pods.Container]:
    """Let the broker publish the volume of a pod; return the pod, which is not started yet."""
    await broker.said("listening")
    await node.kubelet.wait_for_socket()
    await node.kubelet.publish()
    return a_pod(node)


QUEUED = """
connections, files = [], []
written = os.open("/mnt/home/hello", os.O_RDWR)
while len(connections) < int(sys.argv[1]):
    connections.append(broker())
    into, out = socket.socketpair()
    file = os.open("/mnt/home/hello", os.O_RDWR)
    socket.send_fds(into, [b"x"], [file])
    os.close(file)
    files.append(out)
os.pwrite(written, b"y", 0)
for over, out in zip(connections, files):
    socket.send_fds(over, [b"junk"], [out.fileno()])
    out.close()
print("sent", flush=True)
sys.stdin.readline()
"""


def hanging_below(pid: int) -> set[int]:
    """Return the descendants of a process that wait in the kernel and cannot be killed."""
    hanging = set()
    # children come and go
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            hanging |= {child} if state == "D" else hanging_below(child)
    return hanging


async def until_a_child_hangs(pid: int) -> None:
    """Wait until a descendant of a process has hung for a moment."""
    before = set[int]()
    async with asyncio.timeout(30):
        while not before & (hanging := hanging_below(pid)):
            before = hanging
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_broker_ends_while_a_file_that_a_pod_has_sent_cannot_be_closed(
    ending: signal.Signals,
) -> None:
    async def story(node: fuse_process.Node) -> None:
        with contextlib.ExitStack() as stack:
            async with node.broker() as first:
                pod = stack.enter_context(await published(node, first))
                daemon = stack.enter_context(fuse_broker.daemon(pod, "--stall", "FLUSH"))
                await asyncio.to_thread(fuse_broker.mounted, daemon)
                sending = fuse_broker.program(pod, FLUSHING)
                await until_a_child_hangs(first.process.pid)
                first.process.send_signal(ending)
                await first.ended()
            async with node.broker() as second:
                await second.said("listening")
                assert pod.run("/bin/mkdir", "/mnt/tmp/other") == (0, "")
                other = stack.enter_context(fuse_broker.daemon(pod, directory="/mnt/tmp/other"))
                await asyncio.to_thread(fuse_broker.mounted, other)
            daemon.kill()
            sending.communicate()

    on_a_node(story)


def test_a_broker_ends_while_many_connections_have_files_that_cannot_be_closed() -> None:
    async def story(node: fuse_process.Node) -> None:
        with contextlib.ExitStack() as stack:
            async with node.broker() as broker:
                pod = stack.enter_context(await published(node, broker))
                # as many connections as the broker serves, and some that it does not accept yet
                count = str(config.Limits().connections_per_pod + 17)
                script = fuse_broker.UNWRITTEN + QUEUED
                sending = fuse_broker.program(pod, script, count)
                assert sending.stdout is not None
                assert await asyncio.to_thread(sending.stdout.readline) == "sent\n"
                broker.process.send_signal(signal.SIGTERM)
                await broker.ended()
            assert sending.poll() is None
            (pod.cgroup / "cgroup.kill").write_text("1")
            sending.communicate()

    on_a_node(story)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_mounts_outlive_the_broker_and_the_next_one_serves_the_same_pod(
    ending: signal.Signals,
) -> None:
    async def story(node: fuse_process.Node) -> None:
        with contextlib.ExitStack() as stack:
            async with node.broker() as first:
                pod = stack.enter_context(await published(node, first))
                daemon = stack.enter_context(fuse_broker.daemon(pod))
                await asyncio.to_thread(fuse_broker.mounted, daemon)
                while not (node.state / "mounts" / f"{UID}.json").exists():
                    await asyncio.sleep(0.02)
                first.process.send_signal(ending)
                await first.ended()
            assert pod.run("/bin/ls", fuse_broker.HOME)[0] == 0
            async with node.broker() as second:
                await second.said("listening")
                assert pod.run("/bin/mkdir", "/mnt/tmp/other") == (0, "")
                other = stack.enter_context(fuse_broker.daemon(pod, directory="/mnt/tmp/other"))
                await asyncio.to_thread(fuse_broker.mounted, other)
                # a daemon may know of its mount before the broker has recorded it
                await second.said("file_system_mounted", mount_point="/mnt/tmp/other")
                assert pod.run("/bin/ls", fuse_broker.HOME)[0] == 0
                await node.kubelet.wait_for_socket()
                await node.kubelet.unpublish()
                # both daemons still serve mounts of a removed pod
                await second.said("connections_aborted", pod="team/train-0", count=2)
                await second.stop()
        assert not list((node.state / "pods").iterdir())

    on_a_node(story)


def test_a_frozen_mounter_fails_the_self_test_and_is_replaced() -> None:
    async def story(node: fuse_process.Node) -> None:
        node.write(self_test_s=0.3)
        async with node.broker() as process:
            await process.said("listening")
            await process.said("self_test_passed")
            (mounter,) = [
                int(pid)
                for pid in Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children")
                .read_text()
                .split()
            ]
            os.kill(mounter, signal.SIGSTOP)
            failed = await process.said("self_test_failed")
            assert failed["problem"] == "the mounter did not answer"
            await process.said("self_test_passed")
            await process.stop()

    on_a_node(story)


def test_a_second_broker_on_the_node_is_refused_and_bad_settings_are_one_line_each() -> None:
    async def story(node: fuse_process.Node) -> None:
        async with node.broker() as first:
            await first.said("listening")
            async with node.broker() as second:
                text = f"muster-fuse: state: another broker on this node uses {node.state}\n"
                assert await second.ended() == (2, text)
            await first.stop()
        node.write(helper="/absent")
        async with node.broker() as process:
            code, text = await process.ended()
            assert (code, text.partition(";")[0]) == (
                2,
                "muster-fuse: helper: /absent: no such file",
            )
        node.write(namespaces=[])
        async with node.broker() as process:
            problem = "namespaces: expected a list of at least 1 item, found 0"
            assert await process.ended() == (2, f"muster-fuse: {node.settings}: {problem}\n")

    on_a_node(story)


def test_front_and_mounter_are_small_together() -> None:
    async def story(node: fuse_process.Node) -> None:
        async with node.broker() as process:
            await process.said("listening")
            await process.said("self_test_passed")
            pid = process.process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            assert sum(map(pss_mib, [pid, *map(int, children)])) < MEMORY_MAX_MIB
            await process.stop()

    on_a_node(story)


def pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no Pss")
