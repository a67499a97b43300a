"""Pure: From the kubelet's request to what a container is given, or the reason why it is not.

Answers come from memory: while Allocate hangs, the kubelet admits no pod at all on the node.
The kubelet never says which devices are free again; it shows when it offers them the next time.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from muster_plugin.config import gpus
from muster_plugin.gpu import container_spec, placement
from muster_plugin.inventory import inventory
from muster_plugin.model import advertised, names

Answer = advertised.ContainerResponse
Refusal = advertised.AllocationError

_SHOWN_MAX: Final = 5


class Allocator:
    """Allocates the devices of one resource; remembers what it gave away.

    `gpus` tells by what terms GPUs are given now.
    """

    def __init__(
        self,
        devices: inventory.Inventory,
        resource: str,
        gpus: Callable[[], container_spec.AllocationContext] = container_spec.AllocationContext,
    ) -> None:
        self._inventory = devices
        self._resource = resource
        self._gpus = gpus
        self._given: set[str] = set()

    @property
    def allocated(self) -> int:
        """How many ids were given away and not offered again since: at least those in use."""
        return len(self._given)

    def allocate(
        self,
        containers: Sequence[Collection[str]],
        *,
        present: Collection[str] = (),
        annotation: str = "",
    ) -> tuple[advertised.ContainerResponse, ...]:
        """Answer each container's request, in order; raises Refusal for what may not be.

        `present` are those of `optional_paths` that are there now, and `annotation` is a name that
        no other answer has.

        Health is not looked at: the kubelet offers only what we called Healthy, and a veto would
        make it fail one pod after the other (kubelet devicemanager/manager.go).
        """
        wanted = [self._units(ids) for ids in containers]
        given = [self._answer(asked, present, annotation) for asked in wanted]
        self._given.update(unit.id for asked in wanted for unit in asked)
        return tuple(given)

    def host_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return what has to be there on the host; raises Refusal like `allocate`."""
        asked = [unit for ids in containers for unit in self._units(ids)]
        gpus = [unit.gpu for unit in asked if unit.gpu]
        terms = self._gpus()
        needed = container_spec.device_nodes(gpus, terms.rules.given, caps=terms.look.caps)
        devices = (device.host_path for unit in asked for device in unit.devices)
        mounts = (mount.host_path for unit in asked for mount in unit.mounts)
        return tuple(dict.fromkeys([*(node.host_path for node in needed), *devices, *mounts]))

    def optional_paths(self, containers: Sequence[Collection[str]]) -> tuple[str, ...]:
        """Return what a container is given only if it is there on the host; raises Refusal."""
        asked = (unit for ids in containers for unit in self._units(ids))
        if any(unit.gpu for unit in asked):
            return container_spec.optional_paths(self._gpus().rules.given)
        return ()

    def prefer(
        self, available: Collection[str], must_include: Collection[str], size: int
    ) -> list[str]:
        """Return `size` of the `available` ids, best first; fewer if there are fewer.

        Must-include ids come first, the others as `placement` says; of device nodes those whose
        physical device serves the fewest containers. Never raises.
        """
        self._given -= set(available).difference(must_include)
        known = {unit.id: unit for unit in self._inventory.offered(self._resource)}
        terms = self._gpus()
        is_gpu = any(unit.gpu for unit in known.values())
        return placement.prefer(
            available,
            must_include,
            size,
            known=known,
            policy=terms.rules.placement if is_gpu else gpus.Placement.DISTRIBUTED,
            links=terms.look.links,
        )

    def _units(self, ids: Collection[str]) -> list[advertised.Unit]:
        """Return what one container asks for; raises Refusal if it may not have that."""
        asked = [self._unit(name) for name in dict.fromkeys(ids)]
        if any(unit.gpu for unit in asked):
            problem = container_spec.request_problem(self._resource, asked, self._gpus())
            if problem:
                raise advertised.AllocationError(problem)
        return asked

    def _unit(self, device_id: str) -> advertised.Unit:
        unit = self._inventory.unit(self._resource, device_id)
        if unit is None:
            known = [device.id for device in self._inventory.devices(self._resource)]
            more = f" and {len(known) - _SHOWN_MAX} more" if len(known) > _SHOWN_MAX else ""
            has = f"it has {', '.join(known[:_SHOWN_MAX])}{more}" if known else "it has none"
            raise advertised.AllocationError(f"{self._resource} has no device {device_id!r}; {has}")
        return unit

    def _answer(
        self, asked: Sequence[advertised.Unit], present: Collection[str], annotation: str
    ) -> advertised.ContainerResponse:
        gpus = [unit.gpu for unit in asked if unit.gpu]
        if not gpus:
            return self._nodes(asked)
        terms = self._gpus()
        missing = container_spec.missing_channel(terms.rules.given, present)
        if missing:
            raise advertised.AllocationError(f"{self._resource}: {missing}")
        return container_spec.container_response(
            gpus,
            terms.rules.given,
            caps=terms.look.caps,
            present=present,
            annotation=annotation,
        )

    def _nodes(self, asked: Sequence[advertised.Unit]) -> advertised.ContainerResponse:
        """Answer for device nodes and mounts."""
        devices = tuple(dict.fromkeys(device for unit in asked for device in unit.devices))
        mounts = tuple(dict.fromkeys(mount for unit in asked for mount in unit.mounts))
        rule = self._inventory.rule(self._resource)
        if rule is None:
            return advertised.ContainerResponse(devices=devices, mounts=mounts)
        environment = {}
        seen = [spec.container_path for spec in devices] + [m.container_path for m in mounts]
        variable = names.environment_variable(self._resource) if rule.env is None else rule.env
        if variable and seen:
            environment[variable] = ",".join(seen)
        if rule.cdi:
            qualified = tuple(f"{self._resource}={unit.id}" for unit in asked)
            return advertised.ContainerResponse(environment=environment, cdi_devices=qualified)
        return advertised.ContainerResponse(devices=devices, mounts=mounts, environment=environment)
