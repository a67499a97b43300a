"""Pure: What became of devices, as the events that tell it.

A GPU has one life, whatever the number of its replicas: what befalls them alike is told once.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.inventory import active_faults, device_lifecycle, resource_devices
from muster_plugin.model import gpu

_CONDITIONS: Final = {
    gpu.Effect.DEGRADED: vocabulary.Condition.DEGRADED,
    gpu.Effect.UNMONITORED: vocabulary.Condition.UNMONITORED,
}


class Reports:
    """Makes the events of one plugin on one node."""

    def __init__(self, node: str, plugin: str, against: active_faults.Findings) -> None:
        self._node = node
        self._plugin = plugin
        self._against = against

    def of_units(
        self,
        resource: resource_devices.Advertised,
        facts: Iterable[device_lifecycle.Fact],
        at: datetime,
    ) -> Iterator[vocabulary.PluginEvent]:
        """Tell what became of units, in order; the resource stands as it does after it."""
        turned: set[tuple[str, vocabulary.Health]] = set()
        for same in _together(resource, facts):
            match same[0]:
                case device_lifecycle.Added():
                    yield self._added(resource, same[0], len(same), at)
                case device_lifecycle.Removed():
                    yield self._removed(resource, same[0], len(same), at)
                case device_lifecycle.Turned(device_id=device_id, health=health) as fact:
                    unit = resource.unit(device_id)
                    part = unit.gpu.part if unit and unit.gpu else None
                    name = unit.physical if unit and part else device_id
                    is_bad = part and self._against.reason(part, gpu.Effect.UNHEALTHY)
                    if (name, health) not in turned and not (
                        is_bad and health is vocabulary.Health.HEALTHY
                    ):
                        turned.add((name, health))
                        yield self._turned(resource, name, fact, at)

    def of_finding(
        self,
        resource: resource_devices.Advertised,
        name: str,
        part: gpu.Part,
        finding: gpu.FaultChange,
    ) -> vocabulary.PluginEvent:
        """Tell of a finding about one device of a resource."""
        condition = _CONDITIONS.get(finding.effect)
        if condition is not None:
            return vocabulary.DeviceConditionChanged(
                node=self._node,
                plugin=self._plugin,
                at=finding.at,
                resource=resource.name,
                device_id=name,
                condition=condition,
                holds=isinstance(finding, gpu.FaultBegan),
                reason=finding.reason,
                code=finding.code,
                policy=finding.policy,
                evidence=finding.evidence,
                pods=resource.holders(name),
            )
        left = self._against.reason(part, gpu.Effect.UNHEALTHY)
        still = f"{finding.reason}; but {left}" if left else finding.reason
        is_over = isinstance(finding, gpu.FaultEnded)
        return vocabulary.DeviceHealthChanged(
            node=self._node,
            plugin=self._plugin,
            at=finding.at,
            resource=resource.name,
            device_id=name,
            health=vocabulary.Health.HEALTHY if not left else vocabulary.Health.UNHEALTHY,
            reason=still if is_over else finding.reason,
            code=finding.code,
            policy=finding.policy,
            evidence=finding.evidence,
            pods=resource.holders(name),
        )

    def _added(
        self,
        resource: resource_devices.Advertised,
        fact: device_lifecycle.Added,
        count: int,
        at: datetime,
    ) -> vocabulary.PluginEvent:
        # one that came and went at once is told as it came
        device = resource.device(fact.device.id) or fact.device
        return vocabulary.DeviceAdded(
            node=self._node,
            plugin=self._plugin,
            at=at,
            device=msgspec.structs.replace(device, count=count),
        )

    def _removed(
        self,
        resource: resource_devices.Advertised,
        fact: device_lifecycle.Removed,
        count: int,
        at: datetime,
    ) -> vocabulary.PluginEvent:
        return vocabulary.DeviceRemoved(
            node=self._node,
            plugin=self._plugin,
            at=at,
            resource=resource.name,
            device_id=fact.device_id,
            reason=fact.reason,
            physical="" if resource.has(fact.physical) else fact.physical,
            count=count,
        )

    def _turned(
        self,
        resource: resource_devices.Advertised,
        name: str,
        fact: device_lifecycle.Turned,
        at: datetime,
    ) -> vocabulary.PluginEvent:
        return vocabulary.DeviceHealthChanged(
            node=self._node,
            plugin=self._plugin,
            at=at,
            resource=resource.name,
            device_id=name,
            health=fact.health,
            reason=fact.reason,
            code=fact.code,
            pods=resource.holders(name),
        )


def _together(
    resource: resource_devices.Advertised, facts: Iterable[device_lifecycle.Fact]
) -> Iterable[Sequence[device_lifecycle.Fact]]:
    """Lay the replicas of one GPU together that came, or went, alike."""
    found: dict[Hashable, list[device_lifecycle.Fact]] = {}
    for number, fact in enumerate(facts):
        key: Hashable = number
        match fact:
            case device_lifecycle.Added(device=device):
                unit = resource.unit(device.id)
                if unit is not None and unit.gpu is not None:
                    key = device_lifecycle.Added, unit.physical, device.health, device.reason
            case device_lifecycle.Removed(physical=physical, reason=reason) if physical:
                key = device_lifecycle.Removed, physical, reason
            case _:
                pass
        found.setdefault(key, []).append(fact)
    return found.values()
