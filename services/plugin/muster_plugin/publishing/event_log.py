"""Adapter: everybody but the kubelet: what happens on the node goes into the log and to the bus.

Events wait here until there is a bus; then they go to it in order.
"""

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, assert_never

from muster import vocabulary
from muster.service import logs
from muster_plugin.kubelet import registration_events

_PENDING_MAX: Final = 1_000
_PROBLEMS_MAX: Final = 20
_REFUSED_MAX: Final = 100
_TEXT_MAX: Final = 2048
"""Of a text in an event (vocabulary.Text)."""
_BAD: Final = frozenset({"device_unhealthy", "device_degraded", "device_unmonitored"})


class Teller:
    """Tells what one plugin sees on one node; what lasts it tells once."""

    def __init__(self, node: str, plugin: str) -> None:
        self._node = node
        self._plugin = plugin
        self._log = logs.logger()
        self._pending: collections.deque[vocabulary.Event] = collections.deque(maxlen=_PENDING_MAX)
        self._publish: Callable[[vocabulary.Event], None] = self._pending.append
        self._problems: tuple[str, ...] = ()
        self._short: dict[str, str] = {}
        self._refusal: tuple[str, ...] = ()
        self.refusals = 0
        """How often a changed configuration could not be used."""
        self.refused_at: float | None = None
        """Since when, in monotonic seconds, there is one that cannot be used."""

    def publish_to(self, publish: Callable[[vocabulary.Event], None]) -> None:
        """Hand over the events that wait, and every later one."""
        while self._pending:
            publish(self._pending.popleft())
        self._publish = publish

    def registration(
        self, resource: str, report: registration_events.Report, endpoint: str
    ) -> None:
        """Tell that the kubelet lists a resource, or has lost it."""
        at = datetime.now(UTC)
        match report:
            case registration_events.Listed(reason=reason, registrations=registrations):
                self._publish(
                    vocabulary.PluginRegistered(
                        node=self._node,
                        plugin=self._plugin,
                        at=at,
                        resource=resource,
                        endpoint=endpoint,
                        reason=reason,
                        registrations=registrations,
                    )
                )
            case registration_events.Lost(reason=reason, detail=detail):
                self._publish(
                    vocabulary.PluginDeregistered(
                        node=self._node,
                        plugin=self._plugin,
                        at=at,
                        resource=resource,
                        reason=reason,
                        detail=detail,
                    )
                )
            case _:
                assert_never(report)

    def allocation(self, resource: str, device_ids: tuple[str, ...], *, pod: str = "") -> None:
        """Tell which devices a container was given."""
        self._publish(
            vocabulary.AllocationObserved(
                node=self._node,
                plugin=self._plugin,
                at=datetime.now(UTC),
                resource=resource,
                device_ids=device_ids,
                pod=pod,
            )
        )

    def device(self, event: vocabulary.PluginEvent) -> None:
        """Tell that a device came, went or changed its health."""
        self.log_device(event)
        self._publish(event)

    def log_device(self, event: vocabulary.PluginEvent) -> None:
        """Tell it the log only, where a snapshot tells the bus."""
        count = 1
        match event:
            case vocabulary.DeviceAdded(device=device):
                count = device.count
                name, resource, device_id, reason = (
                    "device_added",
                    device.resource,
                    device.id,
                    device.reason,
                )
            case vocabulary.DeviceRemoved():
                name, reason, count = "device_removed", event.reason, event.count
                resource, device_id = event.resource, event.device_id
            case vocabulary.DeviceHealthChanged():
                healthy = event.health is vocabulary.Health.HEALTHY
                name, reason = "device_healthy" if healthy else "device_unhealthy", event.reason
                resource, device_id = event.resource, event.device_id
            case vocabulary.DeviceConditionChanged():
                name = (
                    f"device_{event.condition}" if event.holds else f"device_not_{event.condition}"
                )
                resource, device_id, reason = event.resource, event.device_id, event.reason
            case _:
                return
        log = self._log.warning if name in _BAD else self._log.info
        together = {"count": count} if count > 1 else {}
        log(name, resource=resource, device=device_id, reason=reason, **together)

    @property
    def standing(self) -> tuple[str, ...]:
        """What is wrong now, in words: with the devices, and with the configuration file."""
        if not self._refusal:
            return self._problems
        first, *others = self._refusal
        more = f" (and {len(others)} more)" if others else ""
        return (f"the changed configuration cannot be used: {first}{more}", *self._problems)

    def problems(self, found: Iterable[str]) -> bool:
        """Tell what is wrong with what was seen, when it begins and when it ends.

        Return whether something did. Of too many problems the first are told, and how many more.
        """
        now = _bounded(sorted({problem[:_TEXT_MAX] for problem in found}), _PROBLEMS_MAX)
        changes = [(problem, True) for problem in now if problem not in self._problems]
        changes += [(problem, False) for problem in self._problems if problem not in now]
        self._problems = now
        for problem, holds in changes:
            if holds:
                self._log.warning("devices_problem", problem=problem)
            else:
                self._log.info("devices_problem_over", problem=problem)
            self._publish(
                vocabulary.ProblemChanged(
                    node=self._node,
                    plugin=self._plugin,
                    at=datetime.now(UTC),
                    problem=problem,
                    holds=holds,
                )
            )
        return bool(changes)

    def shortage(self, resource: str, short: str) -> bool:
        """Tell that there are too few devices, or enough again; return whether that is new."""
        if short == self._short.get(resource, ""):
            return False
        self._short[resource] = short
        if short:
            self._log.warning("devices_short", resource=resource, problem=short)
        else:
            self._log.info("devices_enough", resource=resource)
        self._publish(
            vocabulary.ExpectationChanged(
                node=self._node,
                plugin=self._plugin,
                at=datetime.now(UTC),
                resource=resource,
                short=short,
            )
        )
        return True

    def applied(
        self,
        config_hash: str,
        *,
        added: tuple[str, ...],
        removed: tuple[str, ...],
        again: tuple[str, ...],
        restart: tuple[str, ...],
    ) -> None:
        """Tell that a changed configuration is in force, and for which resources."""
        self._refusal, self.refused_at = (), None
        event = vocabulary.ConfigurationApplied(
            node=self._node,
            plugin=self._plugin,
            at=datetime.now(UTC),
            config_hash=config_hash,
            added=added,
            removed=removed,
            registered_again=again,
            restart=restart,
        )
        self._log.info(
            "configuration_applied",
            config_hash=config_hash,
            added=added,
            removed=removed,
            registered_again=again,
            restart=restart,
        )
        self._publish(event)

    def mended(self, config_hash: str) -> None:
        """Tell that the file says again what is in force, if it was refused before."""
        if self._refusal:
            self.applied(config_hash, added=(), removed=(), again=(), restart=())

    def refused(self, problems: tuple[str, ...], *, in_force: str) -> None:
        """Tell that a changed configuration cannot be used."""
        if problems == self._refusal:
            return
        self._refusal = problems
        self.refusals += 1
        self.refused_at = self.refused_at or time.monotonic()
        self._log.warning("configuration_refused", problems=problems, in_force=in_force)
        self._publish(
            vocabulary.ConfigurationRefused(
                node=self._node,
                plugin=self._plugin,
                at=datetime.now(UTC),
                config_hash=in_force,
                problems=_bounded([text[:_TEXT_MAX] for text in problems], _REFUSED_MAX),
            )
        )


def _bounded(problems: Sequence[str], most: int) -> tuple[str, ...]:
    left = len(problems) - most
    return (*problems[:most], *([f"{left} more problems"] if left > 0 else []))
