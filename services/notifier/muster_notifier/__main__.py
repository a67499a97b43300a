"""Door to the process: alerts come, groups form, people are told, the ledger remembers.

On start the ledger and the present alerts are read, so that a restart neither loses nor repeats.
"""

import asyncio
import functools
import sys
from datetime import UTC, datetime
from typing import Final

import msgspec
import prometheus_client

from muster import bus, entry, logs, probes, runtime, streams, vocabulary
from muster_notifier import config, console, grouping, ledger, receivers, webhook
from muster_notifier import notification as notifications

_ALERTS: Final = "muster.alert.>"

_WAITING = prometheus_client.Gauge(
    "muster_notification_oldest_waiting_seconds",
    "For how long a receiver has kept its oldest notification waiting.",
    ["receiver"],
)
_UNREADABLE = prometheus_client.Counter(
    "muster_notifier_ledger_unreadable_total", "Ledger entries that could not be read."
)


def main() -> int:
    """Run the notifier; return its exit code."""
    return entry.main("notifier", config.Settings, _serve)


async def _serve(settings: config.Settings) -> None:
    logs.configure("notifier", level=settings.log.level)
    async with bus.Bus(
        settings.bus.url, producer="services/notifier", name="notifier", owner=True
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
        self._bus = connected
        self._is_restored = False
        self._inbox: asyncio.Queue[runtime.Delivery[grouping.Input]] = asyncio.Queue(
            runtime.INBOX_MAX
        )
        self._machine = grouping.Grouping(
            {receiver.name: receiver.send_resolved for receiver in settings.receivers},
            group_by=settings.group_by,
            timing=grouping.Timing(
                group_wait_s=settings.group_wait_s,
                group_interval_s=settings.group_interval_s,
                repeat_interval_s=settings.repeat_interval_s,
            ),
        )
        self._receivers = {
            receiver.name: _receiver(receiver, connected) for receiver in settings.receivers
        }
        self._clock = asyncio.get_running_loop().time
        for name in self._receivers:
            _WAITING.labels(name).set_function(functools.partial(self._waiting_s, name))

    def problem(self) -> str | None:
        """Return why the notifier is not ready, or None."""
        if not self._bus.link.is_connected:
            return "NATS is away"
        return None if self._is_restored else "the ledger is being read"

    def state(self) -> probes.Answer:
        """Return every group as it stands."""
        groups = self._machine.view(self._clock())
        return 200, "application/json", msgspec.json.encode({"groups": groups})

    async def run(self) -> None:
        """Restore, then notify for ever."""
        entries = await self._bus.recall(streams.LEDGER)
        alerts = await self._bus.newest(streams.ALERTS, _ALERTS)
        recalled = _recalled(entries)
        self._machine.restore(recalled, alerts, now=self._clock())
        self._is_restored = True
        logs.logger().info("restored", entries=len(recalled), alerts=len(alerts))
        async with asyncio.TaskGroup() as tasks:
            for receiver in self._receivers.values():
                tasks.create_task(receiver.work(self._report))
            tasks.create_task(runtime.drive(self._machine, self._inbox, self._act))
            tasks.create_task(self._listen())

    def _waiting_s(self, receiver: str) -> float:
        return self._machine.oldest_waiting_s(receiver, self._clock())

    async def _listen(self) -> None:
        deliveries = self._bus.consume(streams.ALERTS, durable="notifier", filters=[_ALERTS])
        async for delivery in deliveries:
            await self._inbox.put(runtime.Delivery(delivery.event, delivery.ack))

    async def _act(self, notification: notifications.Notification) -> None:
        self._receivers[notification.receiver].give(notification)

    async def _report(self, outcome: grouping.Delivered | grouping.Failed) -> None:
        await self._inbox.put(runtime.Delivery(outcome))


def _receiver(settings: config.Receiver, connected: bus.Bus) -> receivers.Receiver:
    send: receivers.Send = console.send
    retry_for_s = 0.0
    if settings.webhook is not None:
        try:
            hook = webhook.Webhook(settings.webhook.url, timeout_s=settings.webhook.timeout_s)
        except ValueError as error:
            raise entry.CannotStart(f"receiver {settings.name}: webhook.url: {error}") from None
        send = hook.send
        retry_for_s = settings.webhook.retry_for_s

    async def publish(event: vocabulary.Event, event_id: str) -> None:
        await connected.publish(event, event_id=event_id)

    return receivers.Receiver(
        settings.name,
        send,
        retry_for_s=retry_for_s,
        bus=receivers.Bus(remember=connected.remember, publish=publish),
    )


def _recalled(entries: dict[str, bytes]) -> list[grouping.Recalled]:
    """Return the entries that can be read; the others cost one repeat each, and are told."""
    found = []
    now = datetime.now(UTC)
    for key, value in entries.items():
        try:
            read = ledger.decode(value)
        except ledger.MalformedEntry as error:
            _UNREADABLE.inc()
            logs.logger().error("ledger_entry_unreadable", key=key, error=str(error)[:500])
            continue
        found.append(grouping.Recalled(entry=read, age_s=(now - read.at).total_seconds()))
    return found


if __name__ == "__main__":
    sys.exit(main())
