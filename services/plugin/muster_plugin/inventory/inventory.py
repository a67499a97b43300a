"""Pure: tracks every device of the node, as planned from rules and scans and as advertised.

Device nodes come from rules and scans (`discovery.resource_plan`), GPUs from rules and NVML
(`gpu.replicas`); each unit has a life cycle. An Unhealthy fault of a part of a GPU makes every
device that the fault affects Unhealthy, in every resource. All queries are deterministic.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from muster import inventory_pages, vocabulary, wording
from muster_plugin.config import resources as config_resources
from muster_plugin.config import settings
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import container_spec, replicas
from muster_plugin.inventory import device_lifecycle, device_messages, resource_devices
from muster_plugin.model import advertised, gpu


class Snapshot(NamedTuple):
    """The whole inventory as an event; `problem` says which devices are only counted, if any."""

    event: vocabulary.InventoryReported
    problem: str


class Inventory:
    """The devices of one node as one plugin advertises them."""

    def __init__(self, *, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._faults = resource_devices.ActiveFaults()
        self._events = device_messages.DeviceEvents(node, plugin, self._faults)
        self._resources: dict[str, resource_devices.ResourceDevices] = {}
        self.gpus: vocabulary.GpuNode | None = None
        """The description of the GPUs in snapshots; None unless GPUs are configured and scanned."""
        self.gpu_context = container_spec.AllocationContext()
        """The rules and scan results for allocating GPUs; defaults unless both are known."""
        self._gpu_rules = self.gpu_context.rules

    # Changes; each returns the events to send to the kubelet first and then to the bus

    def observe(
        self,
        plan: resource_plan.Plan,
        configured: Sequence[config_resources.Resource],
        *,
        now: float,
        at: datetime,
    ) -> list[vocabulary.PluginEvent]:
        """Apply one scan of the node, using the current rules.

        A resource that is configured by name stays, even with an empty list. A resource named after
        a matched device or a MIG profile is removed with its last device.
        """
        offers = {offer.name: offer for offer in plan.resources}
        # naming and sharing of GPUs are not part of a single resource's rule
        has_new_gpu_rules = self._gpu_rules != self.gpu_context.rules
        self._gpu_rules = self.gpu_context.rules
        events: list[vocabulary.PluginEvent] = []
        for name, resource in [*self._resources.items()]:
            if name not in offers and resource.rule not in configured:
                events += self._remove(name, at)
        for name, offer in offers.items():
            resource = self._resources.setdefault(name, self._added(offer))
            if resource.rule != offer.rule or (has_new_gpu_rules and not offer.rule.groups):
                configured_units = device_lifecycle.Reconfigured(offer.units)
                events += self._events.for_units(
                    resource, resource.receive(configured_units, now), at
                )
            resource.set_rule(offer.rule)
        for name, resource in self._resources.items():
            present = offers[name].units if name in offers else ()
            resource.simulated = bool(self.gpus and self.gpus.simulated)
            events += self._events.for_units(
                resource, resource.receive(device_lifecycle.Observed(present), now), at
            )
        self._drop_empty(offers)
        return events

    def record_check(
        self, resource: str, unit: advertised.Unit, problem: str, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Record the result of a check; `problem` is empty if it passed."""
        advertised = self._resources.get(resource)
        if advertised is None:
            return []
        facts = advertised.receive(device_lifecycle.Checked(unit, problem), now)
        return [*self._events.for_units(advertised, facts, at)]

    def record_pods(
        self, pods: Mapping[str, Mapping[str, str]] | None, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Record which pod holds which device, by resource and id; None if that is unknown."""
        events: list[vocabulary.PluginEvent] = []
        for name, resource in self._resources.items():
            facts = resource.record_pods(None if pods is None else pods.get(name, {}), now)
            events += self._events.for_units(resource, facts, at)
        self._drop_empty()
        return events

    def tick(self, *, now: float, at: datetime) -> list[vocabulary.PluginEvent]:
        """Remove devices that have been missing or replaced for long enough."""
        events: list[vocabulary.PluginEvent] = []
        for resource in self._resources.values():
            events += self._events.for_units(resource, resource.tick(now), at)
        self._drop_empty()
        return events

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None if no device is to be removed."""
        deadlines = (resource.lifecycle.next_deadline() for resource in self._resources.values())
        return min((at for at in deadlines if at is not None), default=None)

    def apply_fault(self, fault: gpu.FaultChange) -> list[vocabulary.PluginEvent]:
        """Apply a fault that began or ended; return no events if it changes nothing.

        There is one event for each resource and device that the faulty part covers, however many
        replicas there are.
        """
        if not self._faults.apply(fault):
            return []
        events: list[vocabulary.PluginEvent] = []
        for _, resource in sorted(self._resources.items()):
            resource.invalidate(fault.part)
            events += (
                self._events.for_fault(resource, name, part, fault)
                for name, part in sorted(resource.parts(fault.part).items())
            )
        return events

    # Queries

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource that is advertised now."""
        return tuple(self._resources)

    @property
    def matched_devices(self) -> dict[str, str]:
        """The first device of each resource with `per_match`, by resource."""
        return {
            name: units[0].physical
            for name, resource in self._resources.items()
            if resource.rule.per_match and (units := resource.offered())
        }

    @property
    def rules(self) -> dict[str, config_resources.Resource]:
        """The rule that each advertised resource follows."""
        return {name: resource.rule for name, resource in self._resources.items()}

    def devices(self, resource: str) -> tuple[vocabulary.Device, ...]:
        """Return the devices of a resource, in a stable order."""
        advertised = self._resources.get(resource)
        return advertised.devices() if advertised else ()

    def unit(self, resource: str, device_id: str) -> advertised.Unit | None:
        """Return the unit with this id, or None if it is not advertised."""
        advertised = self._resources.get(resource)
        return advertised.unit(device_id) if advertised else None

    def offered(self, resource: str) -> tuple[advertised.Unit, ...]:
        """Return every unit of a resource."""
        advertised = self._resources.get(resource)
        return advertised.offered() if advertised else ()

    def units_to_check(self, resource: str) -> tuple[advertised.Unit, ...]:
        """Return one unit of each present physical device of a resource."""
        advertised = self._resources.get(resource)
        return advertised.lifecycle.units_to_check() if advertised else ()

    def count(self, resource: str) -> Counter[vocabulary.Health]:
        """Count the devices of a resource by health."""
        advertised = self._resources.get(resource)
        return advertised.count() if advertised else Counter()

    def conditions(self, resource: str) -> Counter[vocabulary.Condition]:
        """Count the Healthy devices of a resource by condition."""
        advertised = self._resources.get(resource)
        return advertised.conditions() if advertised else Counter()

    def fault_counts(self) -> Counter[tuple[gpu.Effect, str]]:
        """Count the active faults of GPUs by effect and code."""
        return self._faults.count()

    def shortage(self, resource: str) -> str:
        """Describe a shortage of devices, or unusable GPUs; empty if there is neither."""
        advertised = self._resources.get(resource)
        if advertised is None or advertised.lifecycle.problem:
            return advertised.lifecycle.problem if advertised else ""
        scan = self.gpu_context.scan
        if advertised.rule.groups or scan.driver is gpu.Driver.READY or not scan.on_bus:
            return ""
        # GPUs may be configured on a node without GPUs; only unusable GPUs are a problem
        return (
            f"{wording.counted(scan.on_bus, 'NVIDIA GPU')} on the PCI bus cannot be used "
            f"({scan.driver}): {scan.problem}"
        )[:1000]

    def pods_holding(self, resource: str, name: str) -> tuple[str, ...]:
        """Return the pods that hold a device, or a replica of it."""
        advertised = self._resources.get(resource)
        return advertised.pods_holding(name) if advertised else ()

    def snapshot(self, at: datetime) -> Snapshot:
        """Return the whole inventory as one event, shortened if it would be too long."""
        devices = device_messages.group_replicas(
            (device, unit.physical)
            for resource in self._resources.values()
            for device, unit in zip(resource.devices(), resource.offered(), strict=True)
        )
        event = vocabulary.InventoryReported(
            node=self._node,
            at=at,
            plugin=self._plugin,
            devices=(),
            resources=self.resources,
            gpus=self.gpus,
        )

        def fits(some: tuple[vocabulary.Device, ...]) -> bool:
            if len(some) > resource_plan.DEVICES_MAX:
                return False
            whole = msgspec.structs.replace(event, devices=some)
            return len(inventory_pages.split(whole)) <= vocabulary.PAGES_MAX

        listed = device_messages.fit_list(devices, fits)
        return Snapshot(msgspec.structs.replace(event, devices=listed.devices), listed.problem)

    def _added(self, offer: resource_plan.PlannedResource) -> resource_devices.ResourceDevices:
        return resource_devices.ResourceDevices(offer.name, offer.rule, self._faults)

    def _drop_empty(self, offered: Iterable[str] = ()) -> None:
        for name, resource in [*self._resources.items()]:
            if resource.rule.per_match and name not in offered and not resource.offered():
                del self._resources[name]

    def _remove(self, name: str, at: datetime) -> Iterator[vocabulary.PluginEvent]:
        resource = self._resources.pop(name)
        gone = resource.remove_all()
        return self._events.for_units(resource, gone, at)


def resource_of(event: vocabulary.PluginEvent) -> str:
    """Return the resource whose list an event changes; empty if it changes no list."""
    match event:
        case vocabulary.DeviceAdded(device=device):
            return device.resource
        case vocabulary.DeviceRemoved() | vocabulary.DeviceHealthChanged():
            return event.resource
        case _:
            return ""


class Planner:
    """Combines the last plan of device nodes (`devices`) with the last valid scan of the GPUs."""

    def __init__(self, configuration: settings.NodeConfiguration) -> None:
        self.devices = resource_plan.Plan()
        self.gpu_scan: gpu.Scan | None = None
        self._configuration = configuration
        self._gpu_rules: dict[str, config_resources.Resource] = {}

    def configure(self, configuration: settings.NodeConfiguration) -> None:
        """Apply new rules from now on."""
        self._gpu_rules.clear()
        self._configuration = configuration

    @property
    def resources(self) -> tuple[config_resources.Resource, ...]:
        """The rules for device nodes."""
        return self._configuration.resources

    @property
    def gpu_context(self) -> container_spec.AllocationContext:
        """The rules and scan results for allocating GPUs.

        They are defaults if the section `gpus` is not configured, or before the first scan.
        """
        if self.gpu_scan is None or self._configuration.gpus is None:
            return container_spec.AllocationContext()
        return container_spec.AllocationContext(rules=self._configuration.gpus, scan=self.gpu_scan)

    @property
    def gpus(self) -> vocabulary.GpuNode | None:
        """The description of the GPUs for a snapshot.

        None if the section `gpus` is not configured, or before the first scan.
        """
        if self.gpu_scan is None or self._configuration.gpus is None:
            return None
        return replicas.node(self.gpu_scan, self._configuration.gpus)

    def plan(
        self, resources_max: int, *, standing: Collection[str]
    ) -> tuple[resource_plan.Plan, tuple[config_resources.Resource, ...]]:
        """Return the plan and the rules of all resources.

        If there are too many resources, those that are already advertised are kept first.
        """
        plan, configured = self.devices, self._configuration.resources
        if self.gpu_scan is not None and self._configuration.gpus is not None:
            of_gpus = replicas.plan(self.gpu_scan, self._configuration.gpus)
            # the rule of a removed MIG profile stays until its devices are removed
            self._gpu_rules.update({offer.name: offer.rule for offer in of_gpus.resources})
            configured += tuple(self._gpu_rules.values())
            plan = resource_plan.merged(plan, of_gpus)
        return resource_plan.limited(plan, resources_max, current_names=standing), configured
