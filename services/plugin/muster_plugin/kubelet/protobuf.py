"""Pure: translates to and from the kubelet's protobuf messages (device plugin API v1beta1)."""

from collections.abc import Iterable
from typing import Final

from muster import vocabulary
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster_plugin.kubelet import allocation
from muster_plugin.model import advertised

API_VERSION: Final = "v1beta1"
PLUGIN_TYPE: Final = "DevicePlugin"
_PERMANENT: Final = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "PERMISSION_DENIED"})


def options(*, pre_start: bool) -> dp.DevicePluginOptions:
    """Return which optional calls the plugin serves; GetPreferredAllocation is always one of them.

    With `pre_start` the kubelet also calls PreStartContainer before each start of a container, so
    containers cannot even restart while the plugin is down.
    """
    return dp.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=True
    )


def register_request(resource: str, endpoint: str, *, pre_start: bool) -> dp.RegisterRequest:
    """Return a registration request.

    Kubelet 1.20 uses the request's options; 1.36 calls GetDevicePluginOptions.
    """
    return dp.RegisterRequest(
        version=API_VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=options(pre_start=pre_start),
    )


def plugin_info(resource: str) -> pr.PluginInfo:
    """Return the answer to the plugin watcher; an empty endpoint means the watcher's socket."""
    return pr.PluginInfo(
        type=PLUGIN_TYPE, name=resource, endpoint="", supported_versions=[API_VERSION]
    )


def device_list(devices: Iterable[vocabulary.Device]) -> dp.ListAndWatchResponse:
    """Return the whole device list, which replaces the previous list."""
    return dp.ListAndWatchResponse(devices=[_device(device) for device in devices])


def requested(request: dp.AllocateRequest) -> list[list[str]]:
    """Return the requested ids, container by container."""
    return [list(container.devices_ids) for container in request.container_requests]


def allocated(answers: Iterable[advertised.ContainerResponse]) -> dp.AllocateResponse:
    """Return the answer to an allocation, container by container in the order requested."""
    return dp.AllocateResponse(container_responses=[_container(answer) for answer in answers])


def preferred(
    request: dp.PreferredAllocationRequest, allocator: allocation.Allocator
) -> dp.PreferredAllocationResponse:
    """Return the preferred ids, container by container in the order requested."""
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
    """Return whether the kubelet would refuse the same registration again.

    The kubelet answers UNKNOWN to a wrong version or name, and to many other errors; only the text
    differs (kubelet 1.36.2 plugin/v1beta1/server.go).
    """
    is_invalid = "is not supported by kubelet" in text or text.endswith("is invalid")
    return code in _PERMANENT or (code == "UNKNOWN" and is_invalid)


def _device(device: vocabulary.Device) -> dp.Device:
    if device.numa_node is None:
        return dp.Device(ID=device.id, health=device.health)
    topology = dp.TopologyInfo(nodes=[dp.NUMANode(ID=device.numa_node)])
    return dp.Device(ID=device.id, health=device.health, topology=topology)


def _container(answer: advertised.ContainerResponse) -> dp.ContainerAllocateResponse:
    return dp.ContainerAllocateResponse(
        envs=answer.environment,
        devices=[
            dp.DeviceSpec(
                container_path=device.container_path,
                host_path=device.host_path,
                permissions=device.permissions,
            )
            for device in answer.devices
        ],
        mounts=[
            dp.Mount(
                container_path=mount.container_path,
                host_path=mount.host_path,
                read_only=mount.read_only,
            )
            for mount in answer.mounts
        ],
        annotations=answer.annotations,
        cdi_devices=[dp.CDIDevice(name=name) for name in answer.cdi_devices],
    )
