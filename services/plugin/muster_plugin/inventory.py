"""Pure. Every device of the node as it is advertised, and what a container is given with each.

Device nodes come from rules and from what was seen (`units`), and each has a `lifecycle`. GPUs are
there from the start; faults hold against them, told apart by their code, and one is Healthy while
nothing holds. Whatever is asked, the same question gets the same answer.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from muster import vocabulary
from muster_plugin import config, ids, lifecycle, rules, units

CONFIGURATION = "no longer configured"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One id: what stands behind it, and what a container gets that is given it."""

    id: vocabulary.DeviceId
    physical: str
    devices: tuple[units.DeviceSpec, ...] = ()
    mounts: tuple[units.Mount, ...] = ()
    visible: str = ""
    """The GPU's name for NVIDIA_VISIBLE_DEVICES."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something holds against a GPU from now on."""

    physical: str
    code: str
    reason: str
    at: datetime


class Mended(msgspec.Struct, frozen=True, kw_only=True):
    """Something no longer holds against a GPU."""

    physical: str
    code: str
    at: datetime


Change = Fault | Mended


class Inventory:
    """The devices of one node as one plugin advertises them."""

    def __init__(self, *, node: str, plugin: str, gpus: config.SimulatedGpus | None = None) -> None:
        self._node = node
        self._plugin = plugin
        self._gpus = {device.id: device for device in _simulated(gpus, node)} if gpus else {}
        self._holding: dict[str, dict[str, str]] = {name: {} for name in self._gpus}
        self._rules: dict[str, rules.Resource] = {}
        self._lives: dict[str, lifecycle.Lifecycle] = {}
        self.problems: tuple[str, ...] = ()
        """What the last look found wrong, for people."""

    # What changes it; each returns what it led to, for the kubelet first and then for the bus

    def look(
        self, plan: units.Plan, configured: Sequence[rules.Resource], *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take one look at the node, by the rules that are in force.

        A resource stays, with an empty list if need be, while it is configured by name. One that a
        match gave its name goes when its last device has left.
        """
        self.problems = plan.problems
        offers = {offer.name: offer for offer in plan.offers}
        events: list[vocabulary.PluginEvent] = []
        for name in [*self._lives]:
            if name not in offers and self._rules[name] not in configured:
                events += self._forget(name, at)
        for name, offer in offers.items():
            policy = lifecycle.policy(offer.rule)
            life = self._lives.setdefault(name, lifecycle.Lifecycle(name, policy))
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
        self, holders: Mapping[str, frozenset[str]] | None, *, now: float, at: datetime
    ) -> list[vocabulary.PluginEvent]:
        """Take what pods hold, by resource; None if nobody knows."""
        events: list[vocabulary.PluginEvent] = []
        for name, life in self._lives.items():
            held = None if holders is None else holders.get(name, frozenset())
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

    def apply(self, change: Change) -> list[vocabulary.PluginEvent]:
        """Take one fault of a GPU, or its end; nothing comes of what was known."""
        holding = self._holding.get(change.physical)
        if holding is None:
            return []
        was_healthy = not holding
        match change:
            case Fault():
                holding[change.code] = change.reason
            case Mended():
                holding.pop(change.code, None)
        if was_healthy == (not holding):
            return []
        return [
            vocabulary.DeviceHealthChanged(
                node=self._node,
                at=change.at,
                plugin=self._plugin,
                resource=self._gpus[change.physical].resource,
                device_id=change.physical,
                health=_health(holding),
                reason=_reason(holding) if holding else f"{change.code} no longer holds",
                code=change.code,
            )
        ]

    # What others ask

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource that is advertised now."""
        gpus = (device.resource for device in self._gpus.values())
        return tuple(dict.fromkeys(itertools.chain(self._lives, gpus)))

    def rule(self, resource: str) -> rules.Resource | None:
        """Return the rule that a resource follows; simulated GPUs follow none."""
        return self._rules.get(resource)

    def devices(self, resource: str) -> tuple[vocabulary.Device, ...]:
        """Return the devices of a resource as they are now, in an order that is always the same."""
        life = self._lives.get(resource)
        if life is not None:
            return life.devices()
        return tuple(
            self._now(device) for device in self._gpus.values() if device.resource == resource
        )

    def entry(self, resource: str, device_id: str) -> Entry | None:
        """Return what stands behind an id, or None if it is none of ours."""
        life = self._lives.get(resource)
        unit = life.unit(device_id) if life else None
        if unit is not None:
            return Entry(
                id=unit.id, physical=unit.physical, devices=unit.devices, mounts=unit.mounts
            )
        gpu = self._gpus.get(device_id)
        if gpu is None or gpu.resource != resource:
            return None
        return Entry(id=gpu.id, physical=gpu.id, visible=gpu.id)

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

    def shortage(self, resource: str) -> str:
        """Say that there are fewer devices than expected; empty if there are enough."""
        life = self._lives.get(resource)
        return life.problem if life else ""

    def snapshot(self, at: datetime) -> vocabulary.InventoryReported:
        """Return the whole inventory as an event."""
        return vocabulary.InventoryReported(
            node=self._node,
            at=at,
            plugin=self._plugin,
            devices=tuple(device for name in self.resources for device in self.devices(name)),
            resources=self.resources,
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
            lifecycle.Removed(device.id, CONFIGURATION) for device in self._lives[name].devices()
        ]
        life = self._lives.pop(name)
        del self._rules[name]
        return self._events(life, gone, at)

    def _events(
        self, life: lifecycle.Lifecycle, facts: Iterable[lifecycle.Fact], at: datetime
    ) -> Iterator[vocabulary.PluginEvent]:
        for fact in facts:
            yield self._event(life.resource, fact, at)

    def _event(self, resource: str, fact: lifecycle.Fact, at: datetime) -> vocabulary.PluginEvent:
        match fact:
            case lifecycle.Added(device=device):
                return vocabulary.DeviceAdded(
                    node=self._node, plugin=self._plugin, at=at, device=device
                )
            case lifecycle.Removed(device_id=device_id, reason=reason):
                return vocabulary.DeviceRemoved(
                    node=self._node,
                    plugin=self._plugin,
                    at=at,
                    resource=resource,
                    device_id=device_id,
                    reason=reason,
                )
            case lifecycle.Turned(device_id=device_id, health=health, reason=reason, code=code):
                return vocabulary.DeviceHealthChanged(
                    node=self._node,
                    plugin=self._plugin,
                    at=at,
                    resource=resource,
                    device_id=device_id,
                    health=health,
                    reason=reason,
                    code=code,
                )

    def _now(self, gpu: vocabulary.Device) -> vocabulary.Device:
        holding = self._holding[gpu.id]
        if not holding:
            return gpu
        return msgspec.structs.replace(gpu, health=_health(holding), reason=_reason(holding))


def resource_of(event: vocabulary.PluginEvent) -> str:
    """Return the resource whose list an event changes; empty if none does."""
    match event:
        case vocabulary.DeviceAdded(device=device):
            return device.resource
        case vocabulary.DeviceRemoved() | vocabulary.DeviceHealthChanged():
            return event.resource
        case _:
            return ""


def _simulated(gpus: config.SimulatedGpus, node: str) -> Iterator[vocabulary.Device]:
    for index in range(gpus.count):
        name = ids.gpu_uuid(node, index)
        yield vocabulary.Device(
            id=name,
            resource=gpus.resource,
            simulated=True,
            gpu=vocabulary.Gpu(uuid=name, product=gpus.product, memory_mib=gpus.memory_mib),
        )


def _health(holding: Mapping[str, str]) -> vocabulary.Health:
    return vocabulary.Health.UNHEALTHY if holding else vocabulary.Health.HEALTHY


def _reason(holding: Mapping[str, str]) -> str:
    return "; ".join(holding.values())
