"""Door to the process: alerts come, groups form, people are told, the ledger remembers.

On start the ledger, the outbox, the silences and the present alerts are read, so that a restart
neither loses nor repeats.
"""

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
import prometheus_client

from muster import (
    bus,
    codec,
    entry,
    logs,
    probes,
    runtime,
    silences,
    streams,
    vocabulary,
    workqueue,
)
from muster_notifier import (
    addresses,
    cluster,
    config,
    configuration,
    deadletters,
    desk,
    files,
    grouping,
    ledger,
    muting,
    owners,
    posting,
    receivers,
    selfwatch,
    senders,
    signals,
    tree,
    vigil,
    watchdog,
)
from muster_notifier import notification as notifications

_ALERTS: Final = "muster.alert.>"
_VERDICTS: Final = "muster.verdict.*.*.verdict.changed"
_TICKS: Final = "muster.sys.*.watchdog.ticked"
_CLOCK_S: Final = 10.0

_WAITING = prometheus_client.Gauge(
    "muster_notification_oldest_waiting_seconds",
    "For how long a receiver has kept its oldest notification waiting.",
    ["receiver"],
)
_UNREADABLE = prometheus_client.Counter(
    "muster_notifier_unreadable_total", "What was remembered and cannot be read.", ["what"]
)
_STALE = prometheus_client.Counter(
    "muster_notifier_stale_alerts_total", "Alerts that a former leader of health told."
)


def main() -> int:
    """Run the notifier; return its exit code."""
    return entry.run(
        "notifier",
        config.Settings,
        lambda settings, _: _serve(settings),
        formats=configuration.FORMATS,
    )


async def _serve(settings: config.Settings) -> None:
    logs.configure("notifier", level=settings.log.level)
    async with bus.Bus(
        settings.bus.url,
        producer="services/notifier",
        name="notifier",
        owner=True,
        replicas=settings.streams.replicas,
    ) as connected:
        notifier = _Notifier(settings, connected)
        async with probes.serve(
            settings.http.host,
            settings.http.port,
            ready=notifier.problem,
            more={"/state": notifier.state},
        ) as address:
            logs.logger().info("listening", http=address)
            await runtime.run(notifier.run())


class _Notifier:
    def __init__(self, settings: config.Settings, connected: bus.Bus) -> None:
        self._settings = settings
        self._bus = connected
        self._is_restored = False
        self._clock = asyncio.get_running_loop().time
        self._inbox: asyncio.Queue[runtime.Delivery[signals.Input]] = asyncio.Queue(
            runtime.INBOX_MAX
        )
        self._muting = tree.muted_by(settings)
        self._machine = grouping.Grouping(
            {receiver.name: receiver.send_resolved for receiver in settings.receivers},
            root=tree.root(settings),
            owners=tree.owners(settings),
            acknowledging=tree.acknowledging(settings),
            muted_by=self._muting,
            at=datetime.now(UTC),
            now=self._clock(),
        )
        self._desks: dict[str, asyncio.Queue[runtime.Delivery[desk.Input]]] = {}
        self._receivers = {r.name: self._receiver(r) for r in settings.receivers}
        voice = selfwatch.Voice(instance=connected.instance, runbook_url=settings.runbook_url)
        self._vigil = vigil.Vigil(voice, self._hear)
        self._ping = _ping(settings)
        self._watchdog = watchdog.Watchdog(patience_s=settings.watchdog.patience_s)
        self._owners = _owners(settings)
        self._ticks: asyncio.Queue[runtime.Delivery[watchdog.Input]] = asyncio.Queue(100)
        for name in self._receivers:
            _WAITING.labels(name).set_function(functools.partial(self._waiting_s, name))

    def problem(self) -> str | None:
        """Return why the notifier is not ready, or None."""
        if not self._bus.link.is_connected:
            return "NATS is away"
        return None if self._is_restored else "the ledger is being read"

    def _is_well(self) -> bool:
        return self.problem() is None

    def state(self) -> probes.Answer:
        """Return every group as it stands, the silences, and who is away."""
        found = {
            "groups": self._machine.view(self._clock()),
            "silences": self._muting.active(datetime.now(UTC)),
            "away": [r.name for r in self._receivers.values() if r.desk.is_away()],
            "health_silent": self._watchdog.is_silent,
        }
        return 200, "application/json", msgspec.json.encode(found)

    async def run(self) -> None:
        """Restore, then notify for ever."""
        follower = workqueue.follow(self._bus.link, streams.SILENCES)
        async for change in follower:
            if change is None:
                break
            self._silence(*change)
        await self._restore()
        self._is_restored = True
        async with asyncio.TaskGroup() as tasks:
            for name, receiver in self._receivers.items():
                tasks.create_task(receiver.work())
                tasks.create_task(runtime.drive(receiver.desk, self._desks[name], receiver.act))
            tasks.create_task(runtime.drive(self._machine, self._inbox, self._act))
            tasks.create_task(self._listen())
            tasks.create_task(self._follow_silences(follower))
            tasks.create_task(self._read_clock())
            tasks.create_task(self._vigil.count_dead(self._dead))
            if self._ping is not None:
                period_s = self._settings.watchdog.ping_interval_s
                tasks.create_task(vigil.ping(self._ping, interval_s=period_s, alive=self._is_well))
            if self._settings.watchdog.enabled:
                tasks.create_task(self._follow_link())
                tasks.create_task(runtime.drive(self._watchdog, self._ticks, self._vigil.tell))

    async def _restore(self) -> None:
        entries = _entries(await self._bus.recall(streams.LEDGER))
        for found in entries:
            if found.receiver in self._receivers:
                self._receivers[found.receiver].recall(found)
        pending = await self._pending()
        for event in await self._bus.newest(streams.ALERTS, _VERDICTS):
            assert isinstance(event.data, vocabulary.VerdictChanged), "the filter says so"
            self._muting.hear_verdict(event.data)
        alerts = [
            await self._owned(event) for event in await self._bus.newest(streams.ALERTS, _ALERTS)
        ]
        self._machine.restore(entries, pending, alerts, now=self._clock())
        logs.logger().info(
            "restored", entries=len(entries), letters=len(pending), alerts=len(alerts)
        )

    async def _pending(self) -> list[notifications.Notification]:
        """Return what is in the outbox; what is for nobody any more becomes a dead letter."""
        found = []
        letters = await workqueue.waiting(self._bus.link, streams.OUTBOX, "muster.outbox.>")
        for subject, body, headers, _ in letters:
            try:
                notification = notifications.decode(body)
            except notifications.MalformedLetter:
                continue  # whoever takes it says so
            if notification.receiver not in self._receivers:
                dead = deadletters.bury(
                    notification, deadletters.TO_NOBODY, attempts=0, at=datetime.now(UTC)
                )
                await self._put(*dead)
                await workqueue.remove(self._bus.link, streams.OUTBOX, subject)
            elif deadletters.REPLAY not in headers and not notification.is_test:
                found.append(notification)
        return found

    def _receiver(self, settings: addresses.Receiver) -> receivers.Receiver:
        try:
            sender = senders.make(settings, self._settings)
        except senders.Unusable as error:
            raise entry.CannotStart(str(error)) from None
        for problem in sender.problems:
            logs.logger().error("template_unusable", receiver=settings.name, error=problem)
        inbox: asyncio.Queue[runtime.Delivery[desk.Input]] = asyncio.Queue(runtime.INBOX_MAX)
        self._desks[settings.name] = inbox

        async def hear(event: desk.Input) -> None:
            await inbox.put(runtime.Delivery(event))

        limits = settings.limits
        return receivers.Receiver(
            settings.name,
            sender.send,
            at_desk=desk.Desk(
                rate_per_s=limits.rate_per_s or sender.rate_per_s,
                burst=limits.burst,
                retry_for_s=limits.retry_for_s,
                at_once=sender.at_once,
            ),
            doors=receivers.Doors(
                put=self._put,
                take=self._take,
                hold_s=workqueue.HOLD_S,
                remember=self._bus.remember,
                publish=self._publish,
                instance=self._bus.instance,
            ),
            hear=hear,
            report=self._hear,
        )

    async def _put(self, subject: str, body: bytes, key: str, headers: Mapping[str, str]) -> None:
        await workqueue.put(self._bus.link, subject, body, key=key, headers=headers)

    def _take(self, durable: str, subject: str) -> AsyncIterator[workqueue.Job]:
        return workqueue.take(self._bus.link, streams.OUTBOX, durable=durable, subject=subject)

    async def _publish(self, event: vocabulary.Event, event_id: str) -> None:
        await self._bus.publish(event, event_id=event_id)

    async def _hear(self, event: signals.Input) -> None:
        await self._inbox.put(runtime.Delivery(event))

    async def _act(self, notification: notifications.Notification) -> None:
        self._receivers[notification.receiver].give(notification)

    def _waiting_s(self, receiver: str) -> float:
        return self._machine.oldest_waiting_s(receiver, self._clock())

    async def _listen(self) -> None:
        filters = [_ALERTS, _VERDICTS, _TICKS]
        deliveries = self._bus.consume(streams.ALERTS, durable="notifier", filters=filters)
        async for delivery in deliveries:
            match delivery.event.data:
                case vocabulary.WatchdogTicked() as tick:
                    if self._watchdog.leader == 0:
                        # an earlier life of ours may have told of a silence
                        await self._hear(self._vigil.well(f"{tick.holder} ticks"))
                    await self._ticks.put(runtime.Delivery(tick, delivery.ack))
                case vocabulary.AlertChanged(leader=leader) if self._watchdog.is_stale(leader):
                    _STALE.inc()
                    await delivery.ack()
                case vocabulary.AlertChanged():
                    owned = await self._owned(delivery.event)
                    await self._inbox.put(runtime.Delivery(owned, delivery.ack))
                case vocabulary.VerdictChanged():
                    await self._inbox.put(runtime.Delivery(delivery.event, delivery.ack))
                case _:
                    await delivery.ack()

    async def _owned(self, event: codec.CloudEvent) -> codec.CloudEvent | signals.Owned:
        """Return an alert with those whom the owners of its pods want to be told."""
        alert = event.data
        if self._owners is None or not isinstance(alert, vocabulary.AlertChanged):
            return event
        if not alert.pods or alert.state is vocabulary.AlertState.RESOLVED:
            return event
        return signals.Owned(event, await self._owners.of(alert.pods))

    async def _follow_silences(self, follower: AsyncIterator[tuple[str, bytes] | None]) -> None:
        async for change in follower:
            if change is not None:
                self._silence(*change)

    def _silence(self, key: str, value: bytes) -> None:
        try:
            found = silences.decode(value) if value else None
        except silences.MalformedSilence as error:
            _UNREADABLE.labels("silence").inc()
            logs.logger().error("silence_unreadable", key=key, error=str(error)[:500])
            return
        self._muting.hear_silence(muting.SilenceChanged(key, found))
        logs.logger().info("silence_changed", id=key, gone=found is None)

    async def _read_clock(self) -> None:
        while True:
            await asyncio.sleep(_CLOCK_S)
            await self._hear(signals.ClockRead(datetime.now(UTC)))

    async def _dead(self) -> list[str]:
        return await workqueue.subjects(self._bus.link, streams.DEAD_LETTERS, deadletters.SUBJECTS)

    async def _follow_link(self) -> None:
        async for is_connected in self._bus.link.changes():
            change = watchdog.BusBack() if is_connected else watchdog.BusLost()
            await self._ticks.put(runtime.Delivery(change))


def _ping(settings: config.Settings) -> posting.Site | None:
    if settings.watchdog.ping is None:
        return None
    try:
        return senders.site(settings.watchdog.ping)
    except (files.NoSecret, ValueError) as error:
        raise entry.CannotStart(f"watchdog.ping: {error}") from None


def _owners(settings: config.Settings) -> owners.Owners | None:
    wanted = settings.owners
    if not wanted.receivers:
        return None
    try:
        found = cluster.Cluster(settings.kubernetes)
    except cluster.NoCluster as error:
        raise entry.CannotStart(f"owners: {error}") from None
    return owners.Owners(
        found,
        annotation=wanted.annotation,
        receivers=wanted.receivers,
        timeout_s=wanted.timeout_s,
    )


def _entries(found: dict[str, bytes]) -> list[ledger.Entry]:
    """Return the entries that can be read; the others cost one repeat each, and are told."""
    entries = []
    for key, value in found.items():
        try:
            entries.append(ledger.decode(value))
        except ledger.MalformedEntry as error:
            _UNREADABLE.labels("ledger").inc()
            logs.logger().error("ledger_entry_unreadable", key=key, error=str(error)[:500])
    return entries


if __name__ == "__main__":
    sys.exit(main())
