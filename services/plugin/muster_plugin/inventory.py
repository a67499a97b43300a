"""Pure. Every device of the node as it is advertised, and what a container is given with each.

Device nodes come from rules and from what was seen (`units`), GPUs from rules and from what NVML
said (`gpu_units`); each has a `lifecycle`. What is found to be wrong with a GPU (`findings`) holds
against every device made of it, in every resource. Whatever is asked, the same question gets the
same answer.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin import findings, gpu, gpu_answer, lifecycle, rules, units

_CONDITIONS: Final = {
    gpu.Effect.DEGRADED: vocabulary.Condition.DEGRADED,
    gpu.Effect.UNMONITORED: vocabulary.Condition.UNMONITORED,
}


class Inventory:
    """The devices of one node as one plugin advertises them."""

    def __init__(self, *, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._findings = findings.Findings()
        self._rules: dict[str, rules.Resource] = {}
        self._lives: dict[str, lifecycle.Lifecycle] = {}
        self._pods: Mapping[str, Mapping[str, str]] = {}
        self.gpus: vocabulary.GpuNode | None = None
        """What a snapshot tells about the GPUs themselves."""
        self.terms = gpu_answer.Terms()
        """By what terms GPUs are given now."""
        self._gpu_rules = self.terms.rules

    # What changes it; each returns what it led to, for the kubelet first and then for the bus

    def look(
        self, plan: units.Plan, configured: Sequence[rules.Resource], *, now: float, at: datetime
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
        for name in [*self._lives]:
            if name not in offers and self._rules[name] not in configured:
                events += self._forget(name, at)
        for name, offer in offers.items():
            policy = lifecycle.policy(offer.rule)
            life = self._lives.setdefault(name, lifecycle.Lifecycle(name, policy))
            was = self._rules.get(name, offer.rule)
            if was != offer.rule or (are_new and not offer.rule.groups):
                meant = lifecycle.Reconfigured(offer.units)
                events += self._events(life, life.receive(meant, now), at)
            life.policy = policy
            self._rules[name] = offer.rule
        for name, life in self._lives.items():
            there = offers[name].units if name in offers else ()
            events += self._events(life, life.receive(lifecycle.Looked(there), now), at)
        self._drop_empty(offers)
        return events

    def checked(
        self, resource: str, unit: units.Unit, problem: str, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take the result of a check; empty `problem` if the device is well."""
        life = self._lives.get(resource)
        if life is None:
            return []
        return [*self._events(life, life.receive(lifecycle.Checked(unit, problem), now), at)]

    def held(
        self, pods: Mapping[str, Mapping[str, str]] | None, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take which pod holds what, by resource and device id; None if nobody knows."""
        self._pods = pods or {}
        events: list[vocabulary.PluginEvent] = []
        for name, life in self._lives.items():
            held = None if pods is None else frozenset(pods.get(name, ()))
            events += self._events(life, life.receive(lifecycle.Held(held), now), at)
        self._drop_empty()
        return events

    def tick(self, *, now: float, at: datetime) -> list[vocabulary.PluginEvent]:
        """Let go of what has been lost for long enough."""
        events: list[vocabulary.PluginEvent] = []
        for life in self._lives.values():
            events += self._events(life, life.tick(now), at)
        self._drop_empty()
        return events

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        deadlines = (life.next_deadline() for life in self._lives.values())
        return min((at for at in deadlines if at is not None), default=None)

    def apply(self, finding: gpu.Finding) -> list[vocabulary.PluginEvent]:
        """Take what began or ended to hold against a part of a GPU; nothing comes of old news.

        There is one event for each resource and device that the part covers, whatever the number of
        its replicas.
        """
        if not self._findings.apply(finding):
            return []
        met = {
            (name, unit.physical): unit.gpu.part
            for name in self._lives
            for unit in self.offered(name)
            if unit.gpu is not None and finding.part.covers(unit.gpu.part)
        }
        return [self._found(name, key, part, finding) for (name, key), part in sorted(met.items())]

    # What others ask

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource that is advertised now."""
        return tuple(self._lives)

    @property
    def standing(self) -> dict[str, str]:
        """Which match has the name of each resource that a match gave its name."""
        return {
            name: units[0].physical
            for name in self._lives
            if self._rules[name].per_match and (units := self.offered(name))
        }

    def rule(self, resource: str) -> rules.Resource | None:
        """Return the rule that a resource follows."""
        return self._rules.get(resource)

    def devices(self, resource: str) -> tuple[vocabulary.Device, ...]:
        """Return the devices of a resource as they are now, in an order that is always the same."""
        life = self._lives.get(resource)
        return tuple(self._now(life, device) for device in life.devices()) if life else ()

    def unit(self, resource: str, device_id: str) -> units.Unit | None:
        """Return what stands behind an id, or None if it is none of ours."""
        life = self._lives.get(resource)
        return life.unit(device_id) if life else None

    def offered(self, resource: str) -> tuple[units.Unit, ...]:
        """Return everything of a resource that a container could be given."""
        life = self._lives.get(resource)
        found = (life.unit(device.id) for device in life.devices()) if life else ()
        return tuple(unit for unit in found if unit is not None)

    def to_check(self, resource: str) -> tuple[units.Unit, ...]:
        """Return one unit for each thing of a resource that is there to be examined."""
        life = self._lives.get(resource)
        return life.to_check() if life else ()

    def count(self, resource: str) -> Counter[vocabulary.Health]:
        """Count the devices of a resource by health."""
        return Counter(device.health for device in self.devices(resource))

    def conditions(self, resource: str) -> Counter[vocabulary.Condition]:
        """Count the Healthy devices of a resource of which there is something to be known."""
        counted: Counter[vocabulary.Condition] = Counter()
        for device in self.devices(resource):
            unit = self.unit(resource, device.id)
            if device.health is vocabulary.Health.HEALTHY and unit and unit.gpu:
                counted.update(
                    condition
                    for effect, condition in _CONDITIONS.items()
                    if self._findings.reason(unit.gpu.part, effect)
                )
        return counted

    def shortage(self, resource: str) -> str:
        """Say that there are fewer devices than expected; empty if there are enough."""
        life = self._lives.get(resource)
        if life is None or life.problem:
            return life.problem if life else ""
        look, rule = self.terms.look, self._rules[resource]
        if rule.groups or look.driver is gpu.Driver.READY or not look.on_bus:
            return ""
        # a node without GPUs may well be configured for them; one that has some offers none
        return f"{look.on_bus} NVIDIA GPUs on the PCI bus, and {look.driver}: {look.problem}"[:1000]

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the whole inventory as an event."""
        return vocabulary.InventoryReported(
            node=self._node,
            at=at,
            plugin=self._plugin,
            devices=tuple(device for name in self.resources for device in self.devices(name)),
            resources=self.resources,
            gpus=self.gpus,
        )

    def _drop_empty(self, offered: Iterable[str] = ()) -> None:
        for name in [*self._lives]:
            if (
                self._rules[name].per_match
                and name not in offered
                and not self._lives[name].devices()
            ):
                del self._lives[name], self._rules[name]

    def _forget(self, name: str, at: datetime) -> Iterator[vocabulary.PluginEvent]:
        gone = [
            lifecycle.Removed(unit.id, lifecycle.CONFIGURATION, unit.physical if unit.gpu else "")
            for unit in self.offered(name)
        ]
        life = self._lives.pop(name)
        del self._rules[name]
        return self._events(life, gone, at)

    def _now(self, life: lifecycle.Lifecycle, device: vocabulary.Device) -> vocabulary.Device:
        """Return a device with what is found against its GPU."""
        unit = life.unit(device.id)
        if unit is None or unit.gpu is None:
            return device
        told = msgspec.structs.replace(
            device, physical=unit.physical, simulated=bool(self.gpus and self.gpus.simulated)
        )
        wrong = self._findings.reason(unit.gpu.part, gpu.Effect.UNHEALTHY)
        if not wrong:
            return told
        reason = f"{told.reason}; {wrong}" if told.reason else wrong
        return msgspec.structs.replace(told, health=vocabulary.Health.UNHEALTHY, reason=reason)

    def _events(
        self, life: lifecycle.Lifecycle, facts: Iterable[lifecycle.Fact], at: datetime
    ) -> Iterator[vocabulary.PluginEvent]:
        """Tell of what became of units; of a GPU once, not for each of its replicas."""
        told: set[tuple[str, vocabulary.Health]] = set()
        for fact in facts:
            match fact:
                case lifecycle.Added(device=device):
                    yield self._added(self._now(life, device), at)
                case lifecycle.Removed(device_id=device_id, reason=reason, physical=physical):
                    is_left = any(u.physical == physical for u in self.offered(life.resource))
                    yield vocabulary.DeviceRemoved(
                        node=self._node,
                        plugin=self._plugin,
                        at=at,
                        resource=life.resource,
                        device_id=device_id,
                        reason=reason,
                        physical="" if is_left else physical,
                    )
                case lifecycle.Turned(device_id=device_id, health=health):
                    unit = life.unit(device_id)
                    part = unit.gpu.part if unit and unit.gpu else None
                    name = unit.physical if unit and part else device_id
                    is_bad = part and self._findings.reason(part, gpu.Effect.UNHEALTHY)
                    if (name, health) not in told and not (
                        is_bad and health is vocabulary.Health.HEALTHY
                    ):
                        told.add((name, health))
                        yield self._turned(life.resource, name, fact, at)

    def _added(self, device: vocabulary.Device, at: datetime) -> vocabulary.PluginEvent:
        return vocabulary.DeviceAdded(node=self._node, plugin=self._plugin, at=at, device=device)

    def _turned(
        self, resource: str, name: str, fact: lifecycle.Turned, at: datetime
    ) -> vocabulary.PluginEvent:
        return vocabulary.DeviceHealthChanged(
            node=self._node,
            plugin=self._plugin,
            at=at,
            resource=resource,
            device_id=name,
            health=fact.health,
            reason=fact.reason,
            code=fact.code,
            pods=self._holders(resource, name),
        )

    def _found(
        self, resource: str, name: str, part: gpu.Part, finding: gpu.Finding
    ) -> vocabulary.PluginEvent:
        """Tell of a finding about one device of a resource."""
        condition = _CONDITIONS.get(finding.effect)
        if condition is not None:
            return vocabulary.DeviceConditionChanged(
                node=self._node,
                plugin=self._plugin,
                at=finding.at,
                resource=resource,
                device_id=name,
                condition=condition,
                holds=isinstance(finding, gpu.Began),
                reason=finding.reason,
                code=finding.code,
                policy=finding.policy,
                evidence=finding.evidence,
                pods=self._holders(resource, name),
            )
        left = self._findings.reason(part, gpu.Effect.UNHEALTHY)
        still = f"{finding.reason}; but {left}" if left else finding.reason
        is_over = isinstance(finding, gpu.Ended)
        return vocabulary.DeviceHealthChanged(
            node=self._node,
            plugin=self._plugin,
            at=finding.at,
            resource=resource,
            device_id=name,
            health=vocabulary.Health.HEALTHY if not left else vocabulary.Health.UNHEALTHY,
            reason=still if is_over else finding.reason,
            code=finding.code,
            policy=finding.policy,
            evidence=finding.evidence,
            pods=self._holders(resource, name),
        )

    def _holders(self, resource: str, name: str) -> tuple[str, ...]:
        """Return the pods that hold a device, or a replica of it."""
        pods = self._pods.get(resource, {})
        found = {pod for held, pod in pods.items() if self._is_of(resource, held, name)}
        return tuple(sorted(found))

    def _is_of(self, resource: str, device_id: str, name: str) -> bool:
        unit = self.unit(resource, device_id)
        return device_id == name or (unit is not None and unit.physical == name)


def resource_of(event: vocabulary.PluginEvent) -> str:
    """Return the resource whose list an event changes; empty if none does."""
    match event:
        case vocabulary.DeviceAdded(device=device):
            return device.resource
        case vocabulary.DeviceRemoved() | vocabulary.DeviceHealthChanged():
            return event.resource
        case _:
            return ""
