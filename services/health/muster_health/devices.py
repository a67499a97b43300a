"""Pure. Which devices of one plugin are unhealthy; a snapshot heals what single events lost."""

from collections.abc import Mapping
from dataclasses import dataclass

from muster import vocabulary
from muster.vocabulary import Health

_Id = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A device became unhealthy, or is no longer; `why` in words."""

    resource: str
    device: str
    unhealthy: bool
    why: str


class Devices:
    """The unhealthy devices of one plugin, by resource and id, and how many there are in all."""

    def __init__(self) -> None:
        self.totals: Mapping[str, int] = {}
        """By resource; empty until the first snapshot."""
        self._unhealthy: dict[_Id, str] = {}

    def restore(self, resource: str, device: str, why: str) -> None:
        """Take a device as unhealthy, as it was known before a restart."""
        self._unhealthy[resource, device] = why

    def unhealthy(self) -> dict[_Id, str]:
        """Return why, by resource and id."""
        return dict(self._unhealthy)

    def apply(self, event: vocabulary.Event) -> list[Turned]:
        """Take what a plugin reports about its devices; return what changed, in a fixed order."""
        match event:
            case vocabulary.DeviceHealthChanged():
                code = f" ({event.code})" if event.code else ""
                return self._set(
                    event.resource, event.device_id, event.health, f"{event.reason}{code}"
                )
            case vocabulary.DeviceAdded(device=device):
                return self._set(device.resource, _key(device), device.health, device.reason)
            case vocabulary.DeviceRemoved():
                why = f"removed: {event.reason}" if event.reason else "removed"
                gone = event.physical or event.device_id
                return self._set(event.resource, gone, Health.HEALTHY, why)
            case vocabulary.InventoryReported():
                return self._replace(event.devices)
            case _:
                return []

    def _set(self, resource: str, device: str, health: Health, why: str) -> list[Turned]:
        known = (resource, device) in self._unhealthy
        if health is Health.HEALTHY:
            if not known:
                return []
            del self._unhealthy[resource, device]
            said = why or "the plugin reports it Healthy"
            return [Turned(resource=resource, device=device, unhealthy=False, why=said)]
        said = why or "the plugin gives no reason"
        self._unhealthy[resource, device] = said
        if known:
            return []
        return [Turned(resource=resource, device=device, unhealthy=True, why=said)]

    def _replace(self, devices: tuple[vocabulary.Device, ...]) -> list[Turned]:
        totals: dict[str, int] = {}
        present: dict[_Id, vocabulary.Device] = {}
        for device in devices:
            totals[device.resource] = totals.get(device.resource, 0) + 1
            known = present.setdefault((device.resource, _key(device)), device)
            if known.health is Health.HEALTHY:
                present[device.resource, _key(device)] = device
        turned: list[Turned] = []
        for (resource, key), device in present.items():
            healthy = device.health is Health.HEALTHY
            why = "the plugin's inventory shows it Healthy" if healthy else device.reason
            turned += self._set(resource, key, device.health, why)
        for resource, device_id in sorted(self._unhealthy.keys() - present.keys()):
            why = "the plugin's inventory no longer lists it"
            turned += self._set(resource, device_id, Health.HEALTHY, why)
        self.totals = totals
        return turned


def _key(device: vocabulary.Device) -> str:
    """Return what is unhealthy as one: the replicas of a GPU share its faults."""
    return device.physical or device.id
