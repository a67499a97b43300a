"""Pure. Our words to and from the kubelet's protobuf messages (device plugin API v1beta1)."""

from collections.abc import Iterable
from typing import Final

from muster import vocabulary
from muster.pb import deviceplugin_pb2 as dp
from muster_plugin import allocation

API_VERSION: Final = "v1beta1"
_PERMANENT: Final = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED"})


def options() -> dp.DevicePluginOptions:
    """Say which optional calls we want: advice on allocation, nothing before a start.

    With pre_start_required, containers of a plugin that is away could not even restart.
    """
    return dp.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def register_request(resource: str, endpoint: str) -> dp.RegisterRequest:
    """Ask to be registered. Kubelet 1.20 takes the options from here, 1.36 asks for them."""
    return dp.RegisterRequest(
        version=API_VERSION, endpoint=endpoint, resource_name=resource, options=options()
    )


def device_list(devices: Iterable[vocabulary.Device]) -> dp.ListAndWatchResponse:
    """Advertise the whole list; it replaces the one before."""
    return dp.ListAndWatchResponse(devices=[_device(device) for device in devices])


def requested(request: dp.AllocateRequest) -> list[list[str]]:
    """Return the ids asked for, container by container."""
    return [list(container.devices_ids) for container in request.container_requests]


def allocated(answers: Iterable[allocation.Answer]) -> dp.AllocateResponse:
    """Answer an allocation, container by container in the order asked."""
    return dp.AllocateResponse(container_responses=[_container(answer) for answer in answers])


def preferred(
    request: dp.PreferredAllocationRequest, allocator: allocation.Allocator
) -> dp.PreferredAllocationResponse:
    """Advise which ids to allocate, container by container in the order asked."""
    return dp.PreferredAllocationResponse(
        container_responses=[
            dp.ContainerPreferredAllocationResponse(
                deviceIDs=allocator.prefer(
                    container.available_deviceIDs,
                    container.must_include_deviceIDs,
                    container.allocation_size,
                )
            )
            for container in request.container_requests
        ]
    )


def is_permanent(code: str, text: str) -> bool:
    """Tell a refusal that trying again will not change.

    The kubelet answers UNKNOWN to a wrong version or name, and to much else; its words tell
    (kubelet 1.36.2 plugin/v1beta1/server.go).
    """
    told = "is not supported by kubelet" in text or text.endswith("is invalid")
    return code in _PERMANENT or (code == "UNKNOWN" and told)


def _device(device: vocabulary.Device) -> dp.Device:
    if device.numa_node is None:
        return dp.Device(ID=device.id, health=device.health)
    topology = dp.TopologyInfo(nodes=[dp.NUMANode(ID=device.numa_node)])
    return dp.Device(ID=device.id, health=device.health, topology=topology)


def _container(answer: allocation.Answer) -> dp.ContainerAllocateResponse:
    return dp.ContainerAllocateResponse(
        envs=answer.environment,
        devices=[
            dp.DeviceSpec(
                container_path=node.path, host_path=node.path, permissions=node.permissions
            )
            for node in answer.device_nodes
        ],
    )
