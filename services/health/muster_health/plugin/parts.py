"""Pure: combines the parts of one tracked plugin; saves, restores and shows their state.

The parts do not depend on this class. `tracked_plugin` extends it, and passes events to the parts.
No part refers to itself, not even indirectly, so the garbage collector need not track the parts
(`gc=False`): this saves 16 bytes for each of the 18 parts of each plugin.
"""

from datetime import UTC, datetime
from typing import Any, ClassVar, Final

import msgspec

from muster import pacing
from muster.vocabulary import AlertKind, Verdict
from muster_health.alerting import (
    alert_lifecycle,
    device_alerts,
    flap_damping,
    mount_alerts,
    plugin_alert,
    publication,
    refused_configuration,
)
from muster_health.model import alerts, config, signals, snapshot, steps
from muster_health.model.snapshot import State
from muster_health.model.steps import Rule
from muster_health.plugin import (
    device_counts,
    investigation,
    liveness,
    self_reported,
    verdict_machine,
    verdict_state,
)

_DAY_S: Final = 86_400.0
_SAVES_BURST: Final = 32
_NOT_EXPECTED: Final = "it stopped, and is no longer expected on this node"
_FORGOTTEN: Final = {
    True: "it stopped as planned a day ago, and is not expected to return",
    False: "no heartbeat for a week, and it is not expected on this node",
}


class Removal(msgspec.Struct, eq=False, gc=False):
    """When to drop a plugin from tracking: never while it is expected or alive.

    `was_dropped` means that the plugin was expected on this node before. `has_no_pod` means that
    the node has no pod of the plugin, according to the last answer from Kubernetes.
    """

    due: float | None = None
    was_dropped: bool = False
    has_no_pod: bool = False

    def restart(self, state: State, now: float, *, is_expected: bool) -> None:
        """Restart the wait, because another verdict was reached."""
        self.due = now + wait_s(state) if _may_go(state, is_expected=is_expected) else None

    def next_due(self, state: State, *, is_expected: bool) -> float | None:
        """Return the time at which the plugin is dropped from tracking; None means never."""
        return self.due if _may_go(state, is_expected=is_expected) else None

    def reason(
        self, state: State, rule: Rule | None, now: float, *, is_expected: bool, is_placed: bool
    ) -> str:
        """Return why this plugin is dropped from tracking, or '' to keep it.

        `is_placed` means that Kubernetes reports on which nodes this plugin should run.
        """
        if not _may_go(state, is_expected=is_expected):
            return ""
        if rule is Rule.NODE_GONE:
            return "the node is no longer in the cluster"
        has_left = state is State.MAINTENANCE
        if is_placed and (has_left or self.was_dropped or self.has_no_pod):
            return _NOT_EXPECTED
        is_forgotten = self.due is not None and now >= self.due
        return _FORGOTTEN[has_left] if is_forgotten else ""


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def wait_s(state: State) -> float:
    """Return for how many seconds to keep a plugin that is not expected."""
    return _DAY_S if state is State.MAINTENANCE else 7 * _DAY_S


def _may_go(state: State, *, is_expected: bool) -> bool:
    return state in {State.MAINTENANCE, State.LOST} and not is_expected


class PluginState:
    """The state of one plugin on one node, in parts; `now` is health's monotonic time."""

    __slots__ = (
        "alive",
        "causes",
        "context",
        "counts",
        "faults",
        "has_counts_to_store",
        "is_restored",
        "is_unsaved",
        "key",
        "looks",
        "mounts",
        "node",
        "plugin",
        "pods",
        "problems",
        "publication",
        "refused",
        "removal",
        "reported",
        "restart_decided_for",
        "restarts",
        "saves",
        "verdict",
    )

    _machine: ClassVar[type[verdict_machine.VerdictMachine]] = verdict_machine.VerdictMachine

    def __init__(self, node: str, plugin: str, context: config.Context, *, now: float) -> None:
        settings = context.settings
        self.node, self.plugin = node, plugin
        self.key = snapshot.key_of(node, plugin)
        order = liveness.HeartbeatOrder(settings.interval_s)
        self.alive = liveness.Liveness(context, now, order)
        self.reported = self_reported.SelfReported(settings, now)
        self.verdict = self._machine(
            context=context,
            alive=self.alive,
            reported=self.reported,
            standing=verdict_state.StandingVerdict(settings, flap_damping.FlapDamping(settings)),
            recovery=verdict_state.Recovery(settings),
            investigation=investigation.Investigation(node, plugin, settings, context.has_cluster),
        )
        lifecycle = alert_lifecycle.AlertLifecycle(settings, context.bounds)
        self.publication = publication.Publication(node, plugin, context, lifecycle)
        self.faults = device_alerts.DeviceFaults(context.bounds.devices_per_plugin)
        self.mounts = mount_alerts.MountFaults()
        self.counts = device_counts.DeviceCounts()
        self.refused = refused_configuration.RefusedConfiguration(settings.configuration_s)
        self.removal = Removal()
        self.causes: tuple[str, ...] = ()
        """Possible common causes of failures, such as the plugin's zone or revision."""
        self.problems: tuple[str, ...] = ()
        """Problems that raise no alert, such as those with the configuration."""
        self.pods: tuple[signals.Pod, ...] = ()
        self.is_restored = False
        """Whether the state was restored from that of the previous leader."""
        self.restart_decided_for: datetime | None = None
        """The start of the verdict for which a restart was last decided or refused."""
        self.context = context
        self.restarts: tuple[datetime, ...] = ()
        self.is_unsaved = False
        """Whether an event changed the state to save, with nothing to publish."""
        self.has_counts_to_store = False
        """Whether expected device counts have changed; saving them may wait."""
        self.looks: pacing.TokenBucket | None = None
        """The limit on evaluations of alerts caused by events; None before the first evaluation."""
        self.saves: pacing.TokenBucket | None = None
        """The limit on saving while there is nothing to publish; None before the first saving."""

    @property
    def clock(self) -> liveness.ClockOffset:
        """Return the offset of the node's clock from ours."""
        return self.alive.clock

    @property
    def current_verdict(self) -> Verdict | None:
        """Return the current verdict; None before the first."""
        return self.verdict.standing.verdict

    @property
    def rule(self) -> Rule | None:
        """Return the rule behind the current verdict; None before the first."""
        return self.verdict.standing.rule

    @property
    def is_suspended(self) -> bool:
        """Return whether verdicts are suspended, because many plugins are suspected."""
        return self.verdict.is_suspended or self.reported.suspended

    def standing(self) -> steps.Standing:
        """Return the current verdict, with its reason."""
        stands = self.verdict.standing
        return steps.Standing(
            state=self.verdict.state,
            verdict=stands.verdict,
            rule=stands.rule,
            resources=stands.resources,
            is_flapping=stands.is_flapping,
            failed_at=stands.failed_at,
        )

    def removal_reason(self, now: float, *, is_placed: bool) -> str:
        """Return why the plugin is dropped from tracking, or '' to keep it.

        `is_placed` means that Kubernetes reports on which nodes this plugin should run.
        """
        stands, is_expected = self.verdict.standing, self.alive.is_expected
        return self.removal.reason(
            self.verdict.state, stands.rule, now, is_expected=is_expected, is_placed=is_placed
        )

    def needs_restart(self, now: float) -> bool:
        """Return whether the published verdict still needs a decision about a restart."""
        if self.restart_decided_for == self.publication.since:
            return False
        return self.publication.is_repairable(self.standing(), now)

    def open_kinds(self) -> list[AlertKind]:
        """Return the kinds of the open alerts."""
        return [alert.kind for alert in self.publication.lifecycle.published.values()]

    def ask_kubernetes(self) -> signals.AskCluster:
        """Return a new query to Kubernetes for the plugin's pods, outside any investigation."""
        return self.verdict.investigation.ask_kubernetes()

    def _look_at(self, due: float) -> None:
        planned = self.publication.look_due
        self.publication.look_due = due if planned is None else min(due, planned)

    def _may_save(self, now: float) -> bool:
        """Return whether to save now although nothing is published; if not, plan to save later.

        Without this limit, a plugin that constantly reports changes would have its whole state
        stored each time. If health crashes meanwhile, the next inventory restores what is lost.
        """
        if self.saves is None:
            per_s = 1 / self.context.bounds.update_s
            self.saves = pacing.TokenBucket(per_s=per_s, burst=_SAVES_BURST, now=now)
        if self.saves.try_take(now):
            return True
        self.is_unsaved, self.has_counts_to_store = True, False
        self._look_at(self.saves.ready_at(now))
        return False

    def restore(self, before: snapshot.Snapshot, now: float) -> None:
        """Restore the published state, and other saved state unless newer state is known."""
        alive, machine = self.alive, self.verdict
        self.is_restored = True
        self.publication.load(before)
        self.restart_decided_for, self.restarts = before.remedied, before.remedies
        self.publication.touch(now)
        if machine.standing.verdict is not None:
            self.has_counts_to_store |= dict(before.had) != self.counts.had
            return
        firing = {(alert.kind, alert.resource): alert for alert in before.firing}
        # waits must not start from the beginning at each of several restarts in a row
        wall = self.context.wall_zero + now
        waited_s = 0.0 if before.since is None else max(0.0, wall - before.since.timestamp())
        alive.restore(before.instance, before.seq, before.interval_s, now=now)
        # a plugin that never sent a heartbeat is saved as well, without instance and order
        alive.is_known = bool(before.instance or before.order)
        alive.event_order = before.order
        self.reported.resources = before.resources
        is_overdue = (AlertKind.MAINTENANCE_OVERDUE, "") in firing
        machine.restore(before, now, waited_s=waited_s, is_overdue=is_overdue)
        self.publication.restore(
            before,
            self.standing(),
            pause_due=now + alive.remaining_s(self.context.settings.patience_s, waited_s),
            repair_due=now + alive.remaining_s(plugin_alert.SELF_REPAIR_S, waited_s),
        )
        if (AlertKind.CLOCK_SKEW, "") in firing:
            alive.clock.restore()
        self.faults.restore(before.bad)
        self.mounts.restore(before.bad)
        if before.refused is not None:
            waited_s = max(0.0, wall - before.refused.since)
            self.refused.restore(before.refused, now - waited_s)
        short = {
            resource: alert.evidence[0].observed
            for (kind, resource), alert in firing.items()
            if kind is AlertKind.DEVICES_SHORT
        }
        self.counts.restore(before.had, before.configuration, short)
        self.removal.due = now + alive.remaining_s(wait_s(machine.state), waited_s)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the state that `/state` shows; ages are in seconds by our clock."""
        alive, machine, publication = self.alive, self.verdict, self.publication
        return {
            "node": self.node,
            "plugin": self.plugin,
            "state": machine.state.shown,
            "verdict": machine.standing.verdict,
            "flapping": machine.standing.is_flapping,
            "since": publication.since,
            "rule": publication.rule,
            "evidence": publication.evidence,
            "evidence_age_s": _age(publication.observed_at, now),
            "instance": alive.order.instance,
            "interval_s": alive.order.interval_s,
            "beat_age_s": _age(alive.last_heard_at, now),
            "clock_skew_s": round(alive.clock.seconds, 3),
            "expected": alive.is_expected,
            "frozen": self.is_suspended,
            "resources": self.reported.resources,
            "devices": dict(self.counts.has or self.faults.totals),
            "allocatable": self._allocatable(),
            "unhealthy": [
                {"kind": kind, "resource": resource, "device": device, "why": fault.why}
                for (kind, resource), devices in sorted(self.faults.by_group.items())
                for device, fault in sorted(devices.items())
            ]
            + self.mounts.shown(),
            "mounts": self.mounts.total or 0,
            "problems": self.problems,
            "recovery": self._recovery(),
            "alerts": [self._alert(alert) for alert in publication.lifecycle.published.values()],
        }

    def _recovery(self) -> dict[str, datetime] | None:
        recovery = self.verdict.recovery
        return None if recovery.due is None else self._times(recovery.since, recovery.due)

    def _alert(self, alert: alerts.Alert) -> Any:
        """Return a firing alert as an event; add `recovery` if its problem has ended."""
        event = self.publication.event_of(alert, 0)
        times = self.publication.lifecycle.recovery(alert.key)
        recovery = self._times(*times) if times else None
        if plugin_alert.is_of_plugin(alert.key):
            recovery = self._recovery()
        if recovery is None:
            return event
        return msgspec.to_builtins(event) | {"recovery": recovery}

    def _times(self, since: float, until: float) -> dict[str, datetime]:
        """Return when the problem ended, and when it will count as resolved, in UTC."""
        zero = self.context.wall_zero
        return {
            "since": datetime.fromtimestamp(zero + since, UTC),
            "until": datetime.fromtimestamp(zero + until, UTC),
        }

    def _allocatable(self) -> dict[str, int]:
        """Return the allocatable devices of each of the plugin's resources, if known."""
        devices = self.counts.has or self.faults.totals
        offers = self.reported.offers or {}
        return {name: offers[name].allocatable for name in devices if name in offers}

    def stored(self, leader: int) -> snapshot.Snapshot:
        """Return the state to save."""
        machine, publication, order = self.verdict, self.publication, self.alive.order
        return snapshot.Snapshot(
            node=self.node,
            plugin=self.plugin,
            state=machine.settled,
            interval_s=order.interval_s,
            verdict=publication.published_verdict,
            since=publication.since,
            rule=publication.rule,
            evidence=publication.evidence,
            resources=self.reported.resources,
            accused=machine.standing.resources,
            instance=order.instance,
            seq=order.seq,
            leaving=machine.planned.instance,
            return_s=machine.planned.return_s,
            falls=machine.standing.damping.level,
            flapping=machine.standing.is_flapping,
            order=self.alive.event_order,
            bad=(*self.faults.known(), *self.mounts.known()),
            had=tuple(self.counts.had.items()),
            configuration=self.counts.configuration,
            refused=self.refused.known,
            firing=tuple(publication.lifecycle.published.values()),
            unpublished_verdict=publication.pending_verdict,
            unpublished_alerts=publication.lifecycle.pending,
            remedied=self.restart_decided_for,
            remedies=self.restarts,
            leader=leader,
        )
