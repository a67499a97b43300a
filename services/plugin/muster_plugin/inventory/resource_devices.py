"""Pure: One resource as it is advertised: its units, with what is found against their GPUs.

Much is asked between two changes, and of thousands of replicas at a time; so every answer is kept
until something changes. A finding about one GPU costs as much as that GPU has replicas.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.config import resources
from muster_plugin.inventory import active_faults, device_lifecycle
from muster_plugin.model import advertised, gpu

_CONDITIONS: Final = {
    gpu.Effect.DEGRADED: vocabulary.Condition.DEGRADED,
    gpu.Effect.UNMONITORED: vocabulary.Condition.UNMONITORED,
}
_NO_PODS: Final[Mapping[str, str]] = {}


class Advertised:
    """The devices of one resource. `rule` is what they follow, `against` what holds against GPUs.

    `simulated` says whether its GPUs exist only here.
    """

    def __init__(
        self, name: str, rule: resources.Resource, against: active_faults.Findings
    ) -> None:
        self.name = name
        self.rule = rule
        self.simulated = False
        self._life = device_lifecycle.Lifecycle(name, device_lifecycle.policy(rule))
        self._against = against
        self._pods: Mapping[str, str] = _NO_PODS
        self._units: tuple[advertised.Unit, ...] | None = None
        self._devices: tuple[vocabulary.Device, ...] | None = None
        self._shown: dict[str, vocabulary.Device] = {}
        self._of_gpus: dict[str, list[advertised.Unit]] | None = None
        self._things: frozenset[str] | None = None
        self._holders: dict[str, set[str]] | None = None

    def follow(self, rule: resources.Resource) -> None:
        """Follow a rule from now on."""
        self.rule = rule
        self._life.policy = device_lifecycle.policy(rule)

    def receive(
        self, event: device_lifecycle.Signal, now: float
    ) -> Sequence[device_lifecycle.Fact]:
        """Take what was seen or said of its units."""
        facts = self._life.receive(event, now)
        self._forget()
        return facts

    def tick(self, now: float) -> Sequence[device_lifecycle.Fact]:
        """Let go of what has been lost for long enough."""
        facts = self._life.tick(now)
        if facts:
            self._forget()
        return facts

    def leave(self) -> Sequence[device_lifecycle.Fact]:
        """Let go of everything: nothing of it is meant any more."""
        facts = self._life.leave()
        self._forget()
        return facts

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self._life.next_deadline()

    def held(self, pods: Mapping[str, str] | None, now: float) -> Sequence[device_lifecycle.Fact]:
        """Take which pod holds what, by id; None if nobody knows."""
        self._pods, self._holders = pods or _NO_PODS, None
        facts = self._life.receive(
            device_lifecycle.Held(None if pods is None else frozenset(pods)), now
        )
        if facts:
            self._forget()
        return facts

    def turned(self, part: gpu.Part) -> None:
        """Take that something began or ended to hold against a part of a GPU."""
        for unit in self._by_gpu().get(part.gpu, ()):
            self._shown.pop(unit.id, None)
            self._devices = None

    # What others ask

    def offered(self) -> tuple[advertised.Unit, ...]:
        """Return everything that is in the list, by id."""
        if self._units is None:
            self._units = self._life.offered()
        return self._units

    def unit(self, device_id: str) -> advertised.Unit | None:
        """Return what stands behind an id, or None if it is not advertised."""
        return self._life.unit(device_id)

    def has(self, uuid: str) -> bool:
        """Say whether anything of a GPU or MIG device is in the list."""
        if self._things is None:
            self._things = frozenset(unit.physical for unit in self.offered())
        return uuid in self._things

    def device(self, device_id: str) -> vocabulary.Device | None:
        """Return how an id is advertised, or None if it is not."""
        unit = self.unit(device_id)
        return (self._shown.get(device_id) or self._show(unit)) if unit else None

    def devices(self) -> tuple[vocabulary.Device, ...]:
        """Return what is advertised, by id, with what is found against its GPUs."""
        if self._devices is None:
            shown = self._shown
            self._devices = tuple(shown.get(unit.id) or self._show(unit) for unit in self.offered())
        return self._devices

    def parts(self, part: gpu.Part) -> dict[str, gpu.Part]:
        """Return by its uuid everything here that a part of a GPU covers."""
        return {
            unit.physical: unit.gpu.part
            for unit in self._by_gpu().get(part.gpu, ())
            if unit.gpu is not None and part.covers(unit.gpu.part)
        }

    def to_check(self) -> tuple[advertised.Unit, ...]:
        """Return one unit for each thing that is there to be examined."""
        return self._life.to_check()

    def count(self) -> Counter[vocabulary.Health]:
        """Count the devices by health."""
        return Counter(device.health for device in self.devices())

    def conditions(self) -> Counter[vocabulary.Condition]:
        """Count the Healthy devices of which there is something to be known."""
        counted: Counter[vocabulary.Condition] = Counter()
        healthy = Counter(
            device.physical
            for device in self.devices()
            if device.physical and device.health is vocabulary.Health.HEALTHY
        )
        parts = {unit.physical: unit.gpu.part for unit in self.offered() if unit.gpu is not None}
        for name, replicas in healthy.items():
            for effect, condition in _CONDITIONS.items():
                if self._against.reason(parts[name], effect):
                    counted[condition] += replicas
        return counted

    def holders(self, name: str) -> tuple[str, ...]:
        """Return the pods that hold a device, or a replica of it."""
        if self._holders is None:
            self._holders = {}
            for held, pod in self._pods.items():
                unit = self.unit(held)
                for known in {held, unit.physical if unit else held}:
                    self._holders.setdefault(known, set()).add(pod)
        return tuple(sorted(self._holders.get(name, ())))

    @property
    def problem(self) -> str:
        """Say that there are fewer devices than expected; empty if there are enough."""
        return self._life.problem

    def _forget(self) -> None:
        self._units = self._devices = self._of_gpus = self._things = self._holders = None
        self._shown.clear()

    def _by_gpu(self) -> Mapping[str, Iterable[advertised.Unit]]:
        if self._of_gpus is None:
            self._of_gpus = {}
            for unit in self.offered():
                if unit.gpu is not None:
                    self._of_gpus.setdefault(unit.gpu.part.gpu, []).append(unit)
        return self._of_gpus

    def _show(self, unit: advertised.Unit) -> vocabulary.Device:
        """Return a device with what is found against its GPU."""
        shown = self._shown[unit.id] = self._found(unit, self._life.device(unit.id))
        return shown

    def _found(self, unit: advertised.Unit, device: vocabulary.Device) -> vocabulary.Device:
        if unit.gpu is None:
            return device
        wrong = self._against.reason(unit.gpu.part, gpu.Effect.UNHEALTHY)
        reason = "; ".join(text for text in (device.reason, wrong) if text)
        return msgspec.structs.replace(
            device,
            physical=unit.physical,
            simulated=self.simulated,
            health=vocabulary.Health.UNHEALTHY if wrong else device.health,
            reason=reason,
        )
