"""Pure: Every device of the node as it is advertised, and what a container is given with each.

Device nodes come from rules and from what was seen (`units`), GPUs from rules and from what NVML
said (`gpu_units`); each has a `lifecycle`. What is found to be wrong with a GPU (`findings`) holds
against every device made of it, in every resource. Whatever is asked, the same question gets the
same answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from muster import vocabulary
from muster_plugin.config import resources as config_resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import container_spec
from muster_plugin.inventory import (
    active_faults,
    device_events,
    device_lifecycle,
    resource_devices,
    snapshot,
)
from muster_plugin.model import advertised, gpu

_ENVELOPE_BYTES: Final = 32 * 1024
"""What is in the message beside devices and GPUs: the names of all resources, CloudEvents' own."""


class Snapshot(NamedTuple):
    """All there is, as an event; `problem` says what it leaves out, empty if nothing."""

    event: vocabulary.InventoryReported
    problem: str


class Inventory:
    """The devices of one node as one plugin advertises them."""

    def __init__(self, *, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._findings = active_faults.Findings()
        self._reports = device_events.Reports(node, plugin, self._findings)
        self._resources: dict[str, resource_devices.Advertised] = {}
        self.gpus: vocabulary.GpuNode | None = None
        """What a snapshot tells about the GPUs themselves."""
        self.terms = container_spec.AllocationContext()
        """By what terms GPUs are given now."""
        self._gpu_rules = self.terms.rules

    # What changes it; each returns what it led to, for the kubelet first and then for the bus

    def look(
        self,
        plan: resource_plan.Plan,
        configured: Sequence[config_resources.Resource],
        *,
        now: float,
        at: datetime,
    ) -> list[vocabulary.PluginEvent]:
        """Take one look at the node, by the rules that are in force.

        A resource stays, with an empty list if need be, while it is configured by name. One that a
        match gave its name goes when its last device has left.
        """
        offers = {offer.name: offer for offer in plan.offers}
        # how GPUs are named and shared stands in no rule of a single resource
        are_new = self._gpu_rules != self.terms.rules
        self._gpu_rules = self.terms.rules
        events: list[vocabulary.PluginEvent] = []
        for name, one in [*self._resources.items()]:
            if name not in offers and one.rule not in configured:
                events += self._forget(name, at)
        for name, offer in offers.items():
            one = self._resources.setdefault(name, self._begun(offer))
            if one.rule != offer.rule or (are_new and not offer.rule.groups):
                meant = device_lifecycle.Reconfigured(offer.units)
                events += self._reports.of_units(one, one.receive(meant, now), at)
            one.follow(offer.rule)
        for name, one in self._resources.items():
            there = offers[name].units if name in offers else ()
            one.simulated = bool(self.gpus and self.gpus.simulated)
            events += self._reports.of_units(
                one, one.receive(device_lifecycle.Looked(there), now), at
            )
        self._drop_empty(offers)
        return events

    def checked(
        self, resource: str, unit: advertised.Unit, problem: str, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take the result of a check; empty `problem` if the device is well."""
        one = self._resources.get(resource)
        if one is None:
            return []
        facts = one.receive(device_lifecycle.Checked(unit, problem), now)
        return [*self._reports.of_units(one, facts, at)]

    def held(
        self, pods: Mapping[str, Mapping[str, str]] | None, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take which pod holds what, by resource and device id; None if nobody knows."""
        events: list[vocabulary.PluginEvent] = []
        for name, one in self._resources.items():
            facts = one.held(None if pods is None else pods.get(name, {}), now)
            events += self._reports.of_units(one, facts, at)
        self._drop_empty()
        return events

    def tick(self, *, now: float, at: datetime) -> list[vocabulary.PluginEvent]:
        """Let go of what has been lost for long enough."""
        events: list[vocabulary.PluginEvent] = []
        for one in self._resources.values():
            events += self._reports.of_units(one, one.tick(now), at)
        self._drop_empty()
        return events

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        deadlines = (one.next_deadline() for one in self._resources.values())
        return min((at for at in deadlines if at is not None), default=None)

    def apply(self, finding: gpu.FaultChange) -> list[vocabulary.PluginEvent]:
        """Take what began or ended to hold against a part of a GPU; nothing comes of old news.

        There is one event for each resource and device that the part covers, whatever the number of
        its replicas.
        """
        if not self._findings.apply(finding):
            return []
        events: list[vocabulary.PluginEvent] = []
        for _, one in sorted(self._resources.items()):
            one.turned(finding.part)
            events += (
                self._reports.of_finding(one, name, part, finding)
                for name, part in sorted(one.parts(finding.part).items())
            )
        return events

    # What others ask

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource that is advertised now."""
        return tuple(self._resources)

    @property
    def standing(self) -> dict[str, str]:
        """Which match has the name of each resource that a match gave its name."""
        return {
            name: units[0].physical
            for name, one in self._resources.items()
            if one.rule.per_match and (units := one.offered())
        }

    def rule(self, resource: str) -> config_resources.Resource | None:
        """Return the rule that a resource follows."""
        one = self._resources.get(resource)
        return one.rule if one else None

    def devices(self, resource: str) -> tuple[vocabulary.Device, ...]:
        """Return the devices of a resource as they are now, in an order that is always the same."""
        one = self._resources.get(resource)
        return one.devices() if one else ()

    def unit(self, resource: str, device_id: str) -> advertised.Unit | None:
        """Return what stands behind an id, or None if it is none of ours."""
        one = self._resources.get(resource)
        return one.unit(device_id) if one else None

    def offered(self, resource: str) -> tuple[advertised.Unit, ...]:
        """Return everything of a resource that a container could be given."""
        one = self._resources.get(resource)
        return one.offered() if one else ()

    def to_check(self, resource: str) -> tuple[advertised.Unit, ...]:
        """Return one unit for each thing of a resource that is there to be examined."""
        one = self._resources.get(resource)
        return one.to_check() if one else ()

    def count(self, resource: str) -> Counter[vocabulary.Health]:
        """Count the devices of a resource by health."""
        one = self._resources.get(resource)
        return one.count() if one else Counter()

    def conditions(self, resource: str) -> Counter[vocabulary.Condition]:
        """Count the Healthy devices of a resource of which there is something to be known."""
        one = self._resources.get(resource)
        return one.conditions() if one else Counter()

    def findings(self) -> dict[tuple[gpu.Effect, str], int]:
        """Count what holds against GPUs, by what it does and its code."""
        return self._findings.count()

    def shortage(self, resource: str) -> str:
        """Say that there are fewer devices than expected; empty if there are enough."""
        one = self._resources.get(resource)
        if one is None or one.problem:
            return one.problem if one else ""
        look = self.terms.look
        if one.rule.groups or look.driver is gpu.Driver.READY or not look.on_bus:
            return ""
        # a node without GPUs may well be configured for them; one that has some offers none
        return f"{look.on_bus} NVIDIA GPUs on the PCI bus, and {look.driver}: {look.problem}"[:1000]

    def snapshot(self, at: datetime, *, bytes_max: int) -> Snapshot:
        """Return the whole inventory as an event of so many bytes at most."""
        alike = snapshot.alike(
            (device, unit.physical)
            for one in self._resources.values()
            for device, unit in zip(one.devices(), one.offered(), strict=True)
        )
        room = bytes_max - _ENVELOPE_BYTES - len(msgspec.json.encode(self.gpus))
        listed = snapshot.fitting(alike, room)
        event = vocabulary.InventoryReported(
            node=self._node,
            at=at,
            plugin=self._plugin,
            devices=listed.devices,
            resources=self.resources,
            gpus=self.gpus,
        )
        return Snapshot(event, listed.problem)

    def _begun(self, offer: resource_plan.PlannedResource) -> resource_devices.Advertised:
        return resource_devices.Advertised(offer.name, offer.rule, self._findings)

    def _drop_empty(self, offered: Iterable[str] = ()) -> None:
        for name, one in [*self._resources.items()]:
            if one.rule.per_match and name not in offered and not one.offered():
                del self._resources[name]

    def _forget(self, name: str, at: datetime) -> Iterator[vocabulary.PluginEvent]:
        one = self._resources.pop(name)
        gone = one.leave()
        return self._reports.of_units(one, gone, at)


def resource_of(event: vocabulary.PluginEvent) -> str:
    """Return the resource whose list an event changes; empty if none does."""
    match event:
        case vocabulary.DeviceAdded(device=device):
            return device.resource
        case vocabulary.DeviceRemoved() | vocabulary.DeviceHealthChanged():
            return event.resource
        case _:
            return ""
