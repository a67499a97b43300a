"""Adapter: podresources clients: answers which pod has which devices, and which are allocatable."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping

import grpc

from muster.local.kubelet import device_manager, pods
from muster.pb import podresources_pb2 as podres
from muster.pb import rpc

_NO_NODE = -1
# One bucket for all clients (pkg/kubelet/apis/podresources/constants.go, 1.36).
_CALLS_PER_S = 100.0
_BURST = 10.0
_TOO_OFTEN = grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"


class PodResources:
    """Answers from the state of one kubelet run; `pods` are by uid."""

    def __init__(self, manager: device_manager.DeviceManager, pods: Mapping[str, pods.Pod]) -> None:
        self._manager = manager
        self._pods = pods
        self._tokens = _BURST
        self._filled_s = asyncio.get_running_loop().time()

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
        now = asyncio.get_running_loop().time()
        self._tokens = min(_BURST, self._tokens + (now - self._filled_s) * _CALLS_PER_S)
        self._filled_s = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

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
