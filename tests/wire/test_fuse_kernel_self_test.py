"""The broker's self-test mounts through the broker's own socket, and leaves nothing behind."""

import asyncio
import errno
import os
import socket
import struct
import time
from pathlib import Path

import pytest

from muster_fuse import protocol
from muster_fuse.kernel import jobs, mounter_client
from tests.worlds import fuse_pods

pytestmark = fuse_pods.needs_pods()
MOUNT = protocol.Operation.MOUNT


def test_the_self_test_passes_where_mounts_work_and_leaves_nothing(tmp_path: Path) -> None:
    mounts = own_mounts()
    connections = set(fuse_pods.connections().items())
    for attempt in range(3):
        assert asyncio.run(outcome_at(tmp_path / str(attempt), None)) == jobs.Outcome()
    assert own_mounts() == mounts
    # other connections of this machine come and go
    while set(fuse_pods.connections().items()) - connections:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (
            protocol.reply(MOUNT, errno=errno.EPERM, text="not today"),
            jobs.Outcome(errno.EPERM, "not today", "mount"),
        ),
        (
            protocol.reply(MOUNT),
            jobs.Outcome(errno.EIO, "the broker sent no descriptor of /dev/fuse", "mount"),
        ),
        (
            b"HTTP/1.1",
            jobs.Outcome(
                errno.EIO,
                "the broker's reply is malformed: a packet of 8 bytes is shorter than its header",
                "mount",
            ),
        ),
    ],
)
def test_the_self_test_fails_with_what_the_broker_did(
    reply: bytes, outcome: jobs.Outcome, tmp_path: Path
) -> None:
    assert asyncio.run(outcome_at(tmp_path / "socket", reply)) == outcome


def test_the_self_test_fails_where_nobody_listens(tmp_path: Path) -> None:
    async def story() -> None:
        async with mounter_client.Mounter() as mounter:
            assert await mounter.self_test(jobs.SelfTestJob(str(tmp_path / "no"))) == jobs.Outcome(
                errno.ENOENT, "cannot connect to the broker: No such file or directory", "connect"
            )

    asyncio.run(story())


def own_mounts() -> list[str]:
    """Return the mounts of this machine that the self-test could have made."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4] == "/" or "self-test" in line]


async def outcome_at(path: Path, reply: bytes | None) -> jobs.Outcome:
    """Return the outcome of a self-test of a broker that sends `reply`, or that works if None."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.settimeout(0)
        listening.bind(str(path))
        listening.listen()
        async with mounter_client.Mounter() as mounter:
            serving = asyncio.create_task(_serve(listening, mounter, reply))
            outcome = await mounter.self_test(jobs.SelfTestJob(str(path)))
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    return outcome


async def _serve(
    listening: socket.socket, mounter: mounter_client.Mounter, reply: bytes | None
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        asking, _ = await loop.sock_accept(listening)
        with asking:
            is_readable = asyncio.Event()
            loop.add_reader(asking, is_readable.set)
            await is_readable.wait()
            loop.remove_reader(asking)
            packet, descriptors, _, _ = socket.recv_fds(asking, protocol.PACKET_MAX, 2)
            if reply is not None:
                asking.send(reply)
            elif packet:
                await _allow(mounter, asking, packet, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


async def _allow(
    mounter: mounter_client.Mounter, asking: socket.socket, packet: bytes, descriptors: list[int]
) -> None:
    request = protocol.parse(packet, descriptors=len(descriptors))
    credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("3i", credentials)
    peer = os.pidfd_open(pid)
    caller = jobs.Caller(uid, gid, (), uid, gid, user_namespace=False, overrides=True)
    if request.operation is MOUNT:
        job = jobs.MountJob(caller, (("source", "self-test"),), (), 0)
        await mounter.mount(job, peer=peer, directory=descriptors[0], reply=asking.fileno())
    else:
        unmount = jobs.UnmountJob(caller, lazy=False)
        root = mounter_client.PodDescriptor(descriptors[0])
        outcome = await mounter.unmount(unmount, peer=peer, root=root)
        asking.send(protocol.reply(request.operation, errno=outcome.errno, text=outcome.text))
    os.close(peer)
