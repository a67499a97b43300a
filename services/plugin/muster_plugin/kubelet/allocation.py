"""Pure: answers the kubelet's allocation requests, or says why one is refused.

Answers come from memory: while Allocate hangs, the kubelet admits no pod at all on the node. The
kubelet never reports that a device is free again; it only offers it again.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from muster_plugin.config import gpus
from muster_plugin.gpu import container_spec, placement
from muster_plugin.inventory import inventory
from muster_plugin.model import advertised, errors, names

_SHOWN_MAX: Final = 5


class Allocator:
    """Allocates the devices of one resource, and counts the allocated ids.

    `gpu_context` returns the current rules and capabilities for GPUs.
    """

    def __init__(
        self,
        devices: inventory.Inventory,
        resource: str,
        gpu_context: Callable[
            [], container_spec.AllocationContext
        ] = container_spec.AllocationContext,
    ) -> None:
        self._inventory = devices
        self._resource = resource
        self._gpu_context = gpu_context
        self._allocated: set[str] = set()

    @property
    def allocated(self) -> int:
        """How many ids were allocated and not offered since, an upper bound of those in use."""
        return len(self._allocated)

    def allocate(
        self,
        containers: Sequence[Collection[str]],
        *,
        present: Collection[str] = (),
        annotation: str = "",
    ) -> tuple[advertised.ContainerResponse, ...]:
        """Answer each container's request, in order; raises AllocationError if one is invalid.

        `present` are those of `optional_paths` that exist now, and `annotation` is a name that no
        other answer has.

        Health is not checked: the kubelet offers only Healthy devices, and a refusal would make it
        fail one pod after the other (kubelet devicemanager/manager.go).
        """
        requested = [self._units(ids) for ids in containers]
        answers = [
            self._answer(container_units, present, annotation) for container_units in requested
        ]
        self._allocated.update(unit.id for container_units in requested for unit in container_units)
        return tuple(answers)

    def host_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return the host paths that must exist; raises AllocationError like `allocate`."""
        requested = [unit for ids in containers for unit in self._units(ids)]
        gpus = [unit.gpu for unit in requested if unit.gpu]
        context = self._gpu_context()
        needed = container_spec.device_nodes(gpus, context.rules.given, caps=context.scan.caps)
        devices = (device.host_path for unit in requested for device in unit.devices)
        mounts = (mount.host_path for unit in requested for mount in unit.mounts)
        return tuple(dict.fromkeys([*(node.host_path for node in needed), *devices, *mounts]))

    def optional_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return the paths that a container gets only if they exist; raises AllocationError."""
        if any(unit.gpu for ids in containers for unit in self._units(ids)):
            return container_spec.optional_paths(self._gpu_context().rules.given)
        return ()

    def prefer(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> list[str]:
        """Return `size` of the `available` ids, best first; fewer if there are fewer.

        Must-include ids come first, the others in the order of `placement`; for device nodes, those
        whose physical device serves the fewest containers. Never raises.
        """
        self._allocated -= set(available).difference(must_include)
        offered = {unit.id: unit for unit in self._inventory.offered(self._resource)}
        context = self._gpu_context()
        is_gpu = any(unit.gpu for unit in offered.values())
        return placement.prefer(
            available,
            must_include,
            size,
            units=offered,
            policy=context.rules.placement if is_gpu else gpus.Placement.DISTRIBUTED,
            links=context.scan.links,
        )

    def _units(self, ids: Collection[str]) -> list[advertised.Unit]:
        """Return the units that one container requests; raises AllocationError."""
        requested = [self._unit(device_id) for device_id in dict.fromkeys(ids)]
        if any(unit.gpu for unit in requested):
            problem = container_spec.request_problem(self._resource, requested, self._gpu_context())
            if problem:
                raise advertised.AllocationError(problem)
        return requested

    def _unit(self, device_id: str) -> advertised.Unit:
        unit = self._inventory.unit(self._resource, device_id)
        if unit is None:
            ids = [device.id for device in self._inventory.devices(self._resource)]
            has = f"it has {errors.listed(ids, most=_SHOWN_MAX)}" if ids else "it has none"
            raise advertised.AllocationError(f"{self._resource} has no device {device_id!r}; {has}")
        return unit

    def _answer(
        self, requested: Sequence[advertised.Unit], present: Collection[str], annotation: str
    ) -> advertised.ContainerResponse:
        gpus = [unit.gpu for unit in requested if unit.gpu]
        if not gpus:
            return self._device_nodes(requested)
        context = self._gpu_context()
        missing = container_spec.missing_channel(context.rules.given, present)
        if missing:
            raise advertised.AllocationError(f"{self._resource}: {missing}")
        return container_spec.container_response(
            gpus,
            context.rules.given,
            caps=context.scan.caps,
            present=present,
            annotation=annotation,
        )

    def _device_nodes(self, requested: Sequence[advertised.Unit]) -> advertised.ContainerResponse:
        """Return the answer for device nodes and mounts."""
        devices = tuple(dict.fromkeys(device for unit in requested for device in unit.devices))
        mounts = tuple(dict.fromkeys(mount for unit in requested for mount in unit.mounts))
        rule = self._inventory.rule(self._resource)
        if rule is None:
            return advertised.ContainerResponse(devices=devices, mounts=mounts)
        environment = {}
        paths = [spec.container_path for spec in devices] + [m.container_path for m in mounts]
        variable = names.environment_variable(self._resource) if rule.env is None else rule.env
        if variable and paths:
            environment[variable] = ",".join(paths)
        if rule.cdi:
            # a CDI device's name is vendor/class=name: a resource name has the first two
            cdi_devices = tuple(f"{self._resource}={unit.id}" for unit in requested)
            return advertised.ContainerResponse(environment=environment, cdi_devices=cdi_devices)
        return advertised.ContainerResponse(devices=devices, mounts=mounts, environment=environment)
