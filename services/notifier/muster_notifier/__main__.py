"""Adapter: runs the notifier: receives and groups alerts, notifies people, and updates the ledger.

When it becomes the leader, it reads the ledger, the outbox, the silences and the current alerts, so
that a restart neither loses nor repeats a notification.
"""

from muster.service import start  # isort: skip  # before everything else

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Final

import msgspec
import prometheus_client

from muster import matching, vocabulary
from muster.nats import bus, consumers, leader_lock, storage, streams
from muster.service import entry, logs, metrics, probes, runtime
from muster_notifier import election, monitor
from muster_notifier.config import files, schema
from muster_notifier.delivery import dead_letters, dispatcher, without_nats
from muster_notifier.receivers import directory, endpoint, factory, kubernetes_api
from muster_notifier.routing import alert_index, grouping, muting, notifications

start.end_imports()

_ALERTS: Final = "muster.alert.>"
_VERDICTS: Final = "muster.verdict.*.*.verdict.changed"
_TICKS: Final = "muster.sys.*.watchdog.ticked"
_CLOCK_S: Final = 10.0

_WAITING = prometheus_client.Gauge(
    "muster_notifier_oldest_waiting_timestamp_seconds",
    "When the oldest waiting notification of a receiver was queued; 0 if none is waiting.",
    ["receiver"],
)
_STALE_ALERTS = prometheus_client.Counter(
    "muster_notifier_stale_alerts_total",
    "Alerts dropped because a former leader of the health service sent them.",
)


def main() -> int:
    """Run the notifier and return its exit code."""
    return entry.run(
        "notifier",
        schema.Settings,
        lambda settings, _: _serve(settings),
        formats=files.FORMATS,
        resolve=_checked,
    )


def _checked(settings: schema.Settings) -> schema.Settings:
    """Return the settings if all receivers and templates are usable. Raises CannotStart."""
    for receiver in settings.receivers:
        try:
            sender = factory.make(receiver, settings)
        except factory.Unusable as error:
            raise entry.CannotStart(str(error)) from None
        for problem in sender.problems:
            raise entry.CannotStart(f"receiver {receiver.name}: template {problem}")
    return settings


async def _serve(settings: schema.Settings) -> None:
    logs.configure("notifier", level=settings.log.level)
    await runtime.run(_serve_receivers(settings))


async def _serve_receivers(settings: schema.Settings) -> None:
    """Serve until shutdown, or until another notifier replaces this one as the leader.

    When the receivers directory changes, the notifier starts again with the new receivers.
    """
    more = directory.Directory(settings.receivers_directory)
    has_changed = True

    async def change() -> None:
        nonlocal has_changed
        await more.changed()
        has_changed = True

    while has_changed:
        has_changed = False
        content = await more.read(settings)
        monitor.log_refused(content.refused)
        chosen = schema.with_receivers(settings, content.receivers)
        await _serve_until(chosen, content, over=change)
        if has_changed:
            logs.logger().info("receivers_changed", directory=settings.receivers_directory)


async def _serve_until(
    settings: schema.Settings,
    content: directory.Content,
    *,
    over: Callable[[], Coroutine[object, object, None]],
) -> None:
    monitor.count_receivers(_kinds(settings))
    _WAITING.clear()
    async with bus.Bus(
        settings.bus.url,
        producer="services/notifier",
        name="notifier",
    ) as connected:
        notifier = _Notifier(settings, connected, content)
        async with (
            notifier.election,
            probes.serve(
                settings.http.host,
                settings.http.port,
                ready=notifier.problem,
                more={"/state": notifier.state},
            ) as address,
        ):
            logs.logger().info("listening", http=address)
            await runtime.until_one_ends(
                notifier.run(), notifier.lost(), notifier.election.failed(), over()
            )


class _Notifier:
    def __init__(
        self, settings: schema.Settings, connected: bus.Bus, content: directory.Content
    ) -> None:
        self._settings = settings
        self._refused = tuple(content.refused)
        self._bus = connected
        self._is_restored = False
        self._clock = asyncio.get_running_loop().time
        self._inbox: asyncio.Queue[runtime.Delivery[grouping.Input]] = asyncio.Queue(
            runtime.INBOX_MAX
        )
        self._muting = schema.initial_muting(settings)
        self._routes = schema.route_tree(settings)
        self._machine = grouping.Grouping(
            {receiver.name: receiver.send_resolved for receiver in settings.receivers},
            root=self._routes,
            owners=schema.owners_route(settings),
            ungrouped=schema.ungrouped_receivers(settings),
            acknowledging=schema.acknowledging_receivers(settings),
            muted_by=self._muting,
            at=datetime.now(UTC),
            now=self._clock(),
        )
        self.election = election.Election(
            settings.acting,
            leader_lock.Key(connected.link, streams.TENURE, "notifier"),
            us=leader_lock.this_process(connected.instance),
        )
        self._dispatcher = dispatcher.Dispatcher(
            settings,
            connected,
            report=self._enqueue,
            may_act=self.election.wait_until_leader,
            firing=self._machine.firing,
            is_left_out=lambda name: not content.is_complete or name in content.refused,
        )
        self._own_alerts = monitor.OwnAlerts(
            self._enqueue, instance=connected.instance, runbook_url=settings.runbook_url
        )
        self._outage_alarm = without_nats.OutageAlarm(
            self._dispatcher.receivers,
            problem=self._nats_problem,
            choose=self._receivers_of,
            patience_s=settings.watchdog.patience_s,
            runbook_url=settings.runbook_url,
        )
        self._ping = _ping(settings)
        self._watchdog = monitor.Watchdog(patience_s=settings.watchdog.patience_s)
        self._owners = _owners(settings, self._enqueue)
        self._ticks: asyncio.Queue[runtime.Delivery[monitor.Input]] = asyncio.Queue(100)
        for name in self._dispatcher.names():
            _WAITING.labels(name).set_function(functools.partial(self._waiting_since, name))

    def problem(self) -> str | None:
        """Return why the notifier is not ready; None if it is ready. A standby is ready."""
        if not self._bus.link.is_connected:
            return "NATS is disconnected"
        if not self.election.is_leader:
            unknown = None if self.election.known_leader else "no notifier has become the leader"
            return self.election.problem() or unknown
        restoring = None if self._is_restored else "the ledger is being read"
        return self._bus.link.problem() or restoring

    def _nats_problem(self) -> str:
        """Return why a notifier that has lost the leadership is not ready; otherwise empty."""
        if not self.election.has_led or self.election.is_leader:
            return ""
        return self.problem() or ""

    def _receivers_of(self, alert: vocabulary.AlertChanged) -> set[str]:
        """Return the receivers that the routes select for an alert now; empty if it is muted."""
        labels = matching.labels_of(alert)
        if self._muting.muted_by(labels, alert.at) is not None:
            return set()
        unmuted = (
            route
            for route in self._routes.find(labels)
            if self._muting.route_muted_by(route, alert.at) is None
        )
        return {name for route in unmuted for name in route.receivers}

    def _is_working(self) -> bool:
        return self.election.is_leader and self.problem() is None

    def state(self) -> probes.Answer:
        """Return role, groups, active silences, and problems of receivers and health, as JSON."""
        state = {
            "acts": self.election.is_leader,
            "groups": self._machine.view(self._clock()),
            "silences": self._muting.active(datetime.now(UTC)),
            "away": self._dispatcher.failing(),
            "closed_s": self._dispatcher.paused_s(self._clock()),
            "health_silent": self._watchdog.is_silent,
        }
        return 200, "application/json", msgspec.json.encode(state)

    async def lost(self) -> None:
        """Wait until another notifier leads; then briefly, until our NATS alert is resolved."""
        await self.election.lost()
        await self._outage_alarm.settle()

    async def run(self) -> None:
        """Notify people forever; during an outage of NATS, send an alert about it without NATS."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lead())
            if self._settings.watchdog.enabled:
                tasks.create_task(self._outage_alarm.run())

    async def _lead(self) -> None:
        """Wait until we are the leader, restore the state, then notify people forever."""
        await self.election.wait_until_leader()
        follower = storage.follow(self._bus.link, streams.SILENCES)
        async for change in follower:
            if change is None:
                break
            self._silence(*change)
        await self._restore()
        self._is_restored = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._dispatcher.work())
            tasks.create_task(runtime.drive(self._machine, self._inbox, self._act))
            tasks.create_task(self._listen())
            tasks.create_task(self._follow_silences(follower))
            tasks.create_task(self._read_clock())
            tasks.create_task(
                monitor.announce(
                    self._bus.publish,
                    _kinds(self._settings),
                    self._own_alerts,
                    refused=self._refused,
                )
            )
            tasks.create_task(self._own_alerts.watch_dead_letters(self._dead_letters))
            if self._owners is not None:
                tasks.create_task(self._owners.run())
            if self._ping is not None:
                period_s = self._settings.watchdog.ping_interval_s
                tasks.create_task(
                    monitor.ping(self._ping, interval_s=period_s, alive=self._is_working)
                )
            if self._settings.watchdog.enabled:
                tasks.create_task(self._follow_link())
                tasks.create_task(
                    runtime.drive(self._watchdog, self._ticks, self._own_alerts.on_watchdog)
                )

    async def _restore(self) -> None:
        entries = await self._dispatcher.restore()
        receivers = set(self._dispatcher.names())
        self._own_alerts.restore(entry for entry in entries if entry.receiver in receivers)
        pending = await self._dispatcher.pending()
        for event in await consumers.newest(self._bus.link, streams.ALERTS, _VERDICTS):
            assert isinstance(event.data, vocabulary.VerdictChanged), "only verdicts were read"
            self._muting.observe_verdict(event.data)
        alerts = await consumers.newest(self._bus.link, streams.ALERTS, _ALERTS)
        self._machine.restore(entries, pending, alerts, now=self._clock())
        if self._owners is not None:
            for event in alerts:
                self._owners.look_up(event)
        logs.logger().info(
            "state_restored",
            ledger_entries=len(entries),
            pending_notifications=len(pending),
            alerts=len(alerts),
        )

    async def _enqueue(self, event: grouping.Input) -> None:
        await self._inbox.put(runtime.Delivery(event))

    async def _act(self, notification: notifications.Notification) -> None:
        self._dispatcher.enqueue(notification)

    def _waiting_since(self, receiver: str) -> float:
        now = self._clock()
        waited_s = self._machine.oldest_waiting_s(receiver, now)
        return metrics.timestamp(now - waited_s) if waited_s else 0.0

    async def _listen(self) -> None:
        filters = [_ALERTS, _VERDICTS, _TICKS]
        deliveries = consumers.consume(
            self._bus.link, streams.ALERTS, durable="notifier", filters=filters
        )
        async for delivery in deliveries:
            await self.election.wait_until_leader()
            match delivery.event.data:
                case vocabulary.WatchdogTicked() as tick:
                    if self._watchdog.term == 0:
                        # an earlier notifier process may have raised the alert
                        await self._own_alerts.health_recovered(
                            f"{tick.holder} sends watchdog ticks"
                        )
                    await self._ticks.put(runtime.Delivery(tick, delivery.ack))
                case vocabulary.AlertChanged(leader=term) if self._watchdog.is_stale(term):
                    _STALE_ALERTS.inc()
                    await delivery.ack()
                case vocabulary.AlertChanged():
                    await self._inbox.put(runtime.Delivery(delivery.event, delivery.ack))
                    if self._owners is not None:
                        self._owners.look_up(delivery.event)
                case vocabulary.VerdictChanged():
                    await self._inbox.put(runtime.Delivery(delivery.event, delivery.ack))
                case _:
                    await delivery.ack()

    async def _follow_silences(self, follower: AsyncIterator[tuple[str, bytes] | None]) -> None:
        async for change in follower:
            if change is not None:
                self._silence(*change)

    def _silence(self, key: str, value: bytes) -> None:
        try:
            silence = matching.decode_silence(value) if value else None
        except matching.MalformedSilence as error:
            dispatcher.UNREADABLE.labels("silence").inc()
            logs.logger().error("silence_unreadable", id=key, error=str(error)[:500])
            return
        self._muting.observe_silence(muting.SilenceChanged(key, silence))
        logs.logger().info("silence_changed", id=key, removed=silence is None)

    async def _read_clock(self) -> None:
        while True:
            await asyncio.sleep(_CLOCK_S)
            await self._enqueue(grouping.ClockRead(datetime.now(UTC)))

    async def _dead_letters(self) -> list[str]:
        return await storage.waiting_subjects(
            self._bus.link, streams.DEAD_LETTERS, dead_letters.SUBJECTS
        )

    async def _follow_link(self) -> None:
        async for is_connected in self._bus.link.changes():
            change = monitor.BusRestored() if is_connected else monitor.BusLost()
            await self._ticks.put(runtime.Delivery(change))


def _kinds(settings: schema.Settings) -> dict[str, str]:
    return {receiver.name: receiver.way for receiver in settings.receivers}


def _ping(settings: schema.Settings) -> endpoint.Endpoint | None:
    if settings.watchdog.ping is None:
        return None
    try:
        return factory.make_endpoint(settings.watchdog.ping)
    except (files.NoSecret, ValueError) as error:
        raise entry.CannotStart(f"watchdog.ping: {error}") from None


def _owners(
    settings: schema.Settings, report: Callable[[alert_index.OwnedAlert], Awaitable[None]]
) -> kubernetes_api.Owners | None:
    owners_settings = settings.owners
    if not owners_settings.receivers:
        return None
    try:
        api = kubernetes_api.KubernetesApi(settings.kubernetes)
    except kubernetes_api.NoKubernetes as error:
        raise entry.CannotStart(f"owners: {error}") from None
    return kubernetes_api.Owners(
        api,
        annotation=owners_settings.annotation,
        receivers=owners_settings.receivers,
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
