import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

import muster
from muster.pb import csi_pb2 as csi
from muster.pb import csi_rpc
from muster_fuse import config
from muster_fuse.broker import service
from muster_fuse.kernel import mounter_client
from muster_fuse.request import caller
from muster_fuse.volume import csi as csi_driver
from muster_fuse.volume import tmpfs, volumes
from tests.worlds import csi_kubelet, mount_namespace

pytestmark = mount_namespace.needs_root

OTHER = "7f0e6a52-93b1-4a3c-8a0e-0d3b6e2f9c11"


class Node:
    """A node: a stand-in for the kubelet, and the broker's CSI driver that it calls."""

    def __init__(self, tmp: Path, mounter: mounter_client.Mounter) -> None:
        self.state = tmp / "s"
        self.kubelet = csi_kubelet.Kubelet(tmp / "k")
        self.helper = tmp / "helper"
        self.helper.write_text("helper")
        self.mounter = mounter
        self.broker = self.new_broker()
        self.volumes = volumes.Volumes(self.state, self.helper, self.broker, pods_max=2)
        self.driver = csi_driver.Driver(
            "node-a", self.volumes, kubelet=str(self.kubelet.root), namespaces=("team*", "ml")
        )
        self.registration = csi_driver.offered(self.driver, self.kubelet.root)

    def new_broker(self) -> service.Broker:
        return service.Broker(
            config.Limits(), self.mounter, observe=lambda _: None, records=self.state / "mounts"
        )

    def pod(self, uid: str = csi_kubelet.UID) -> Path:
        return self.state / "pods" / uid

    def mounts(self) -> int:
        return Path("/proc/thread-self/mountinfo").read_text().count(" muster-fuse ")

    def left(self) -> list[str]:
        return sorted(path.name for path in self.state.glob("*/*"))


@pytest.fixture
def in_node() -> Callable[[Callable[[Node], Awaitable[None]]], None]:
    """Return a function that runs a test on a node, in a mount namespace of its own."""

    def run(body: Callable[[Node], Awaitable[None]]) -> None:
        async def whole(root: Path) -> None:
            async with (
                mounter_client.Mounter() as mounter,
                _serving(Node(root, mounter)) as node,
            ):
                await body(node)

        # the path of a socket has at most 107 characters
        root = Path(f"/tmp/volumes-{os.getpid()}")
        root.mkdir(mode=0o700)
        try:
            mount_namespace.inside(lambda: asyncio.run(whole(root)))
        finally:
            _remove_tree(root)

    return run


InNode = Callable[[Callable[[Node], Awaitable[None]]], None]


def test_the_kubelet_learns_the_driver_and_counts_no_volumes(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        info, answer = await node.kubelet.register()
        assert (info.type, info.name, info.endpoint, list(info.supported_versions)) == (
            "CSIPlugin",
            "fuse.muster.dev",
            str(node.kubelet.socket),
            ["1.0.0"],
        )
        assert answer == csi.NodeGetInfoResponse(node_id="node-a")
        assert (node.registration.problem, node.registration.registrations) == ("", 1)
        call = node.kubelet.call
        assert await call(csi_rpc.PLUGIN_INFO, csi.GetPluginInfoRequest()) == (
            csi.GetPluginInfoResponse(name="fuse.muster.dev", vendor_version=muster.__version__)
        )
        nothing = b""
        capabilities = await call(csi_rpc.PLUGIN_CAPABILITIES, csi.GetPluginCapabilitiesRequest())
        assert capabilities.SerializeToString() == nothing
        of_node = await call(csi_rpc.NODE_CAPABILITIES, csi.NodeGetCapabilitiesRequest())
        assert of_node.SerializeToString() == nothing
        # google.protobuf.BoolValue in field 1 of the answer, with true in its field 1
        ready = await call(csi_rpc.PROBE, csi.ProbeRequest())
        assert ready.SerializeToString() == b"\x0a\x02\x08\x01"

    in_node(body)


def test_a_kubelet_that_refuses_the_driver_is_quoted(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.register()
        await node.kubelet.register(error="driver name is not unique")
        assert node.registration.registered_at is None
        assert node.registration.problem == (
            "the kubelet did not register the driver: driver name is not unique"
        )

    in_node(body)


def test_a_socket_that_is_removed_is_made_again_and_registered_again(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.register()
        before = node.kubelet.socket.stat().st_ctime_ns
        node.registration.changed.clear()
        node.kubelet.socket.unlink()
        await node.registration.changed.wait()
        assert node.registration.problem == f"{node.kubelet.socket} was removed or replaced"
        await node.kubelet.wait_for_socket(other_than=before)
        await node.kubelet.register()
        assert (node.registration.problem, node.registration.registrations) == ("", 2)

    in_node(body)


def test_a_kubelet_that_never_asks_is_offered_a_new_socket(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        kubelet = csi_kubelet.Kubelet(node.kubelet.root / "second")
        offered = csi_driver.offered(node.driver, kubelet.root, unregistered_s=0.1)
        task = asyncio.create_task(offered.run())
        first = await kubelet.wait_for_socket()
        await kubelet.wait_for_socket(other_than=first)
        task.cancel()
        await asyncio.wait([task])

    in_node(body)


def test_a_volume_has_the_pods_socket_and_is_gone_without_a_trace(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish()
        assert node.volumes.pod(csi_kubelet.UID) == caller.Pod(
            uid=csi_kubelet.UID, namespace="team", name="train-0"
        )
        target = node.kubelet.target()
        assert sorted(path.name for path in target.iterdir()) == [
            "broker.sock",
            "dev-fuse",
            "fusermount3",
        ]
        assert os.statvfs(target).f_flag & os.ST_RDONLY
        assert (target / "broker.sock").is_socket()
        await node.kubelet.unpublish()
        assert (node.mounts(), node.left(), target.exists()) == (0, [], False)
        assert node.volumes.pods == 0

    in_node(body)


def test_publishing_again_serves_the_same_socket(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish()
        before = (node.pod() / tmpfs.SOCKET).stat().st_ino, node.mounts()
        await node.kubelet.publish()
        assert ((node.pod() / tmpfs.SOCKET).stat().st_ino, node.mounts()) == before

    in_node(body)


def test_publishing_again_heals_a_lost_mount_and_a_lost_socket(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish()
        tmpfs.remove(node.kubelet.target())
        tmpfs.remove(node.pod())
        await node.kubelet.publish()
        assert (node.kubelet.target() / tmpfs.SOCKET).is_socket()
        tmpfs.set_read_only(node.pod(), read_only=False)
        (node.pod() / tmpfs.SOCKET).unlink()
        await node.kubelet.publish()
        assert (node.kubelet.target() / tmpfs.SOCKET).is_socket()

    in_node(body)


def test_a_volume_that_cannot_be_made_read_only_is_not_given_to_its_pod_before_it_can(
    in_node: InNode,
) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish()
        tmpfs.set_read_only(node.pod(), read_only=False)
        (node.pod() / tmpfs.SOCKET).unlink()
        stray = node.pod() / "stray"
        # the kernel makes no mount read-only while a removed file is open
        with stray.open("w"):
            stray.unlink()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await node.kubelet.publish()
            assert failed.value.code() is grpc.StatusCode.INTERNAL
        await node.kubelet.publish()
        assert os.statvfs(node.kubelet.target()).f_flag & os.ST_RDONLY

    in_node(body)


def test_unpublishing_is_success_however_often_and_without_a_record(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.unpublish()
        await node.kubelet.publish()
        (record,) = (node.state / "records").iterdir()
        record.write_text("{")
        await node.volumes.restore()
        await node.kubelet.unpublish()
        await node.kubelet.unpublish()
        assert (node.mounts(), node.left()) == (0, [])

    in_node(body)


def test_the_last_volume_of_a_pod_takes_its_socket_with_it(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish(volume="csi-1")
        await node.kubelet.publish(volume="csi-2")
        await node.kubelet.unpublish(volume="csi-1")
        assert (node.kubelet.target(volume="csi-2") / tmpfs.SOCKET).is_socket()
        assert node.volumes.pods == 1
        await node.kubelet.unpublish(volume="csi-2")
        assert (node.mounts(), node.left(), node.volumes.pods) == (0, [], 0)

    in_node(body)


def test_a_new_broker_serves_the_pods_of_the_old_one_on_a_new_socket(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish()
        await node.kubelet.publish(uid=OTHER)
        before = (node.pod() / tmpfs.SOCKET).stat().st_ctime_ns
        await node.broker.stop()
        node.broker = node.new_broker()
        served = volumes.Volumes(node.state, node.helper, node.broker, pods_max=2)
        # after a restart, a node has the record but no mount
        tmpfs.remove(node.pod(OTHER))
        await served.restore()
        assert (node.kubelet.target() / tmpfs.SOCKET).stat().st_ctime_ns > before
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(node.pod() / tmpfs.SOCKET))
        assert os.statvfs(node.pod()).f_flag & os.ST_RDONLY
        assert (node.left(), served.pods) == ([csi_kubelet.UID, f"{csi_kubelet.UID}.json"], 1)

    in_node(body)


@pytest.mark.parametrize(
    ("attributes", "code", "text"),
    [
        (
            {"csi.storage.k8s.io/pod.namespace": "kube-system"},
            grpc.StatusCode.PERMISSION_DENIED,
            (
                "pods in namespace kube-system may not mount FUSE file systems: "
                "it matches none of `namespaces` in the settings of muster-fuse"
            ),
        ),
        (
            {"mode": "volume"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "volumeAttributes: remove 'mode'; fuse.muster.dev takes no attributes",
        ),
        (
            {"csi.storage.k8s.io/ephemeral": "false"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "fuse.muster.dev supports only inline volumes of pods, not PersistentVolumes",
        ),
        (
            {"csi.storage.k8s.io/pod.uid": ""},
            grpc.StatusCode.FAILED_PRECONDITION,
            (
                "the request does not name the pod; is podInfoOnMount set in "
                "CSIDriver fuse.muster.dev?"
            ),
        ),
    ],
)
def test_what_is_refused_says_why_and_leaves_nothing(
    in_node: InNode, attributes: dict[str, str], code: grpc.StatusCode, text: str
) -> None:
    async def body(node: Node) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.kubelet.publish(attributes=attributes)
        assert (refused.value.code(), refused.value.details()) == (code, text)
        assert (node.mounts(), node.left(), node.driver.refused) == (0, [], 1)

    in_node(body)


def test_a_node_has_only_so_many_pods_with_volumes(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        await node.kubelet.publish(uid="a")
        await node.kubelet.publish(uid="b")
        await node.kubelet.publish(uid="a", volume="csi-2")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.kubelet.publish(uid="c")
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "2 pods on this node have volumes of fuse.muster.dev; the settings allow no more",
        )
        await node.kubelet.unpublish(uid="b")
        await node.kubelet.publish(uid="c")

    in_node(body)


def test_a_helper_that_is_missing_fails_the_pod_with_its_path(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        node.helper.unlink()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await node.kubelet.publish()
        assert (failed.value.code(), failed.value.details()) == (
            grpc.StatusCode.INTERNAL,
            f"[Errno 2] No such file or directory: '{node.helper}'",
        )
        assert node.mounts() == 0

    in_node(body)


def test_a_hundred_volumes_come_and_go_in_seconds(in_node: InNode) -> None:
    async def body(node: Node) -> None:
        node.volumes = volumes.Volumes(node.state, node.helper, node.broker, pods_max=100)
        node.driver._volumes = node.volumes
        uids = [f"pod-{number}" for number in range(100)]
        began = time.process_time()
        await asyncio.gather(*(node.kubelet.publish(uid=uid) for uid in uids))
        assert node.mounts() == 200
        await asyncio.gather(*(node.kubelet.unpublish(uid=uid) for uid in uids))
        assert (node.mounts(), node.left()) == (0, [])
        # processor time, since other programs may slow down this machine
        assert time.process_time() - began < 10

    in_node(body)


@contextlib.asynccontextmanager
async def _serving(node: Node) -> AsyncIterator[Node]:
    await node.volumes.restore()
    task = asyncio.create_task(node.registration.run())
    try:
        await node.kubelet.wait_for_socket()
        yield node
    finally:
        task.cancel()
        await asyncio.wait([task])
        await node.broker.stop()


def _remove_tree(root: Path) -> None:
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
