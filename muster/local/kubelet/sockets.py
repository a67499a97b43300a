"""Adapter for the kubelet's own sockets: serves them, and answers podresources clients.

It also reads and writes the checkpoint file, which is beside the registration socket.
"""

import asyncio
import contextlib
import os
import pathlib
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

import grpc
import grpc.aio
import msgspec

from muster import pacing
from muster.local import httpd
from muster.local.kubelet import device_manager, pods
from muster.pb import podresources_pb2 as podres
from muster.pb import rpc

CHECKPOINT = "kubelet_internal_checkpoint"
# `sun_path` has 108 bytes, the last of which is 0.
_PATH_BYTES_MAX = 107


def prepare(directory: pathlib.Path, *, own_socket: str) -> None:
    """Create the directory.

    Raises UsageError if `own_socket` cannot be served in it. A server that answers there is another
    kubelet. The real kubelet would replace its socket without a check; a stand-in that was started
    with the wrong directory must not do so.
    """
    path = directory / own_socket
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise httpd.UsageError(f"{path}: a socket's path may have at most {_PATH_BYTES_MAX} bytes")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise httpd.UsageError(f"cannot create {directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise httpd.UsageError(f"no permission to write in {directory}")
    if _is_served(path):
        raise httpd.UsageError(f"another kubelet serves {path}")


def wipe(directory: pathlib.Path) -> None:
    """Remove every socket in the directory, but nothing else (CleanupPluginDirectory, 1.36)."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()


@contextlib.asynccontextmanager
async def serving(path: pathlib.Path, handler: grpc.GenericRpcHandler) -> AsyncIterator[None]:
    """Serve on a socket while the block runs; then end every call and remove the socket.

    Raises UsageError.
    """
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise httpd.UsageError(f"cannot serve on {path}: {error}") from error
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


class _File(msgspec.Struct, frozen=True, rename="pascal"):
    """The checkpoint file; its checksum is 0, because the kubelet's is a hash of Go structures."""

    data: device_manager.Checkpoint
    checksum: int = 0


def write_checkpoint(directory: pathlib.Path, checkpoint: device_manager.Checkpoint) -> None:
    """Replace the checkpoint atomically, so that a kill leaves either the old or the new file."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{CHECKPOINT}.", delete=False) as new:
        new.write(msgspec.json.encode(_File(data=checkpoint)))
    pathlib.Path(new.name).replace(directory / CHECKPOINT)


def read_checkpoint(directory: pathlib.Path) -> device_manager.Checkpoint:
    """Read the checkpoint of an earlier kubelet; empty if there is none. Raises UsageError."""
    path = directory / CHECKPOINT
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).data
    except FileNotFoundError:
        return device_manager.Checkpoint()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise httpd.UsageError(f"cannot read checkpoint {path}: {error}") from error


def _is_served(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


_NO_NODE = -1
# One bucket for all clients (pkg/kubelet/apis/podresources/constants.go, 1.36).
_CALLS_PER_S = 100.0
_BURST = 10.0
_TOO_OFTEN = grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"


class PodResources:
    """Serves the podresources API from the state of one kubelet run; `pods` has uids as keys."""

    def __init__(self, manager: device_manager.DeviceManager, pods: Mapping[str, pods.Pod]) -> None:
        self._manager = manager
        self._pods = pods
        now = asyncio.get_running_loop().time()
        self._bucket = pacing.TokenBucket(per_s=_CALLS_PER_S, burst=_BURST, now=now)

    async def list(
        self,
        _request: podres.ListPodResourcesRequest,
        context: rpc.Context[podres.ListPodResourcesRequest, podres.ListPodResourcesResponse],
    ) -> podres.ListPodResourcesResponse:
        """List every active pod, including those without devices."""
        if not self._has_token():
            await context.abort(*_TOO_OFTEN)
        return podres.ListPodResourcesResponse(pod_resources=map(self._of, self._pods.values()))

    async def get_allocatable_resources(
        self,
        _request: podres.AllocatableResourcesRequest,
        context: rpc.Context[
            podres.AllocatableResourcesRequest, podres.AllocatableResourcesResponse
        ],
    ) -> podres.AllocatableResourcesResponse:
        """List the healthy ids, including allocated ones."""
        if not self._has_token():
            await context.abort(*_TOO_OFTEN)
        return podres.AllocatableResourcesResponse(
            devices=(
                _entry(resource, id_, node)
                for resource, lists in self._manager.lists().items()
                for id_ in sorted(lists.healthy)
                for node in lists.numa_nodes.get(id_) or (_NO_NODE,)
            )
        )

    async def get(
        self,
        request: podres.GetPodResourcesRequest,
        context: rpc.Context[podres.GetPodResourcesRequest, podres.GetPodResourcesResponse],
    ) -> podres.GetPodResourcesResponse:
        """Return one pod, or abort with code UNKNOWN."""
        if not self._has_token():
            await context.abort(*_TOO_OFTEN)
        key = request.pod_namespace, request.pod_name
        matching = [pod for pod in self._pods.values() if (pod.namespace, pod.name) == key]
        if not matching:
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
            )
        return podres.GetPodResourcesResponse(pod_resources=self._of(matching[0]))

    def _has_token(self) -> bool:
        return self._bucket.try_take(asyncio.get_running_loop().time())

    def _of(self, pod: pods.Pod) -> podres.PodResources:
        grants = [grant for grant in self._manager.grants() if grant.pod == pod.uid]
        return podres.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=(
                podres.ContainerResources(
                    name=container.name, devices=_entries(grants, container.name)
                )
                for container in pod.containers
                if container.role is not pods.Role.INIT
            ),
        )


def _entries(
    grants: Iterable[device_manager.Grant], container: str
) -> Iterator[podres.ContainerDevices]:
    for grant in grants:
        if grant.container == container:
            for node, ids in grant.ids_by_node.items():
                for id_ in ids:
                    yield _entry(grant.resource, id_, node)


def _entry(resource: str, id_: str, node: int) -> podres.ContainerDevices:
    topology = podres.TopologyInfo(nodes=[podres.NUMANode(ID=node)]) if node != _NO_NODE else None
    return podres.ContainerDevices(resource_name=resource, device_ids=[id_], topology=topology)
