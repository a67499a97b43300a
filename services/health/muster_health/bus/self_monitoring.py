"""Adapter: publishes watchdog ticks while health works, and notifies people when NATS fails.

While this process leads, it publishes a watchdog tick every few seconds. A tick is published like
an alert, after all pending alerts, so a tick that arrives proves that alerts arrive.

An alarm that NATS itself has failed (health is disconnected, or NATS accepts nothing) is sent as a
Kubernetes Event and as a POST to a webhook. On each channel the newest alarm is retried until it is
accepted, refused, or replaced by a newer one; alarms are not queued.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import msgspec
import prometheus_client

import muster
from muster import escaping, http, leadership, pacing, vocabulary
from muster.service import logs
from muster_health.model import config, signals

_CHECK_S: Final = 0.5
"""A new leader publishes its first tick within this time."""
STUCK_S: Final = 15.0
"""How long one publication may take; it delays all later ones."""

Publish = Callable[[vocabulary.WatchdogTicked, Callable[[], bool]], Awaitable[object]]
"""Publishes an event, retrying while the second argument returns True."""


async def publish_ticks(
    election: leadership.Election,
    publish: Publish,
    *,
    holder: str,
    interval_s: float,
    is_detector_leading: Callable[[int], bool] = lambda _: True,
    is_blind: Callable[[], bool] = lambda: False,
) -> None:
    """Publish a tick when we begin to lead, and then every `interval_s` while we lead.

    `is_detector_leading` returns whether the detector has learned that it leads in this term.
    While events cannot be read (`is_blind`), no tick is published.
    """
    clock = asyncio.get_running_loop().time
    ticked_term: int | None = None
    due = clock()
    while True:
        term = election.term()
        is_due = term != ticked_term or clock() >= due
        if term is not None and is_due and is_detector_leading(term) and not is_blind():
            ticked_term, due = term, clock() + interval_s
            event = vocabulary.WatchdogTicked(
                node=vocabulary.FLEET,
                at=datetime.now(UTC),
                leader=term,
                holder=holder,
                interval_s=interval_s,
            )
            await publish(event, functools.partial(election.is_term, term))
        await asyncio.sleep(min(_CHECK_S, interval_s))


async def watch_publishing(
    stuck_s: Callable[[], float],
    notify: Callable[[signals.Alarm], Awaitable[None]],
    *,
    is_disconnected: Callable[[], bool],
    stuck_max_s: float = STUCK_S,
    check_s: float = _CHECK_S,
) -> None:
    """Notify people, without using NATS, when publishing is stuck and when it works again.

    While health is disconnected from NATS, this sends nothing: the detector raises its own alarm.
    """
    is_notified = False
    while True:
        await asyncio.sleep(check_s)
        seconds = stuck_s()
        is_stuck = seconds > stuck_max_s
        if is_disconnected():
            is_notified = False
            continue
        if is_stuck is is_notified:
            continue
        is_notified = is_stuck
        summary = (
            f"NATS has not accepted an alert or verdict from health for {seconds:.0f} s"
            if is_stuck
            else "NATS accepts alerts and verdicts from health again"
        )
        await notify(signals.Alarm(firing=is_stuck, summary=summary, seconds=seconds))


Post = Callable[[str, object], Awaitable[str]]
"""Creates an object at a path of the Kubernetes API; returns the error, empty if it succeeded."""

_TIMEOUT_S: Final = 5.0
_BACKOFF: Final = pacing.Backoff(first_s=1.0, max_s=30.0)
_USER_AGENT: Final = f"muster-health/{muster.__version__}"

_ALARMS: Final = prometheus_client.Counter(
    "muster_health_out_of_band_alarms_total",
    "Attempts to notify people without the bus, by channel and outcome.",
    ["channel", "outcome"],
)
_ALARM_OUTCOMES: Final = ("accepted", "refused", "failed")


class _Refused(Exception):
    """The receiver will never accept this alarm."""


class AlarmSender:
    """Sends the newest alarm while `run` runs; `name` is this process's name."""

    def __init__(self, settings: config.OutOfBandAlarm, *, name: str, post: Post | None) -> None:
        self._settings = settings
        self._name = name
        self._post = post
        self._newest: signals.Alarm | None = None
        self._changed = asyncio.Condition()
        self._at = datetime.now(UTC)
        for channel in self.channels:
            for outcome in _ALARM_OUTCOMES:
                _ALARMS.labels(channel, outcome)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels configured for notifying people; may be empty."""
        event = ("event",) if self._post is not None and self._settings.namespace else ()
        return (*event, *(("webhook",) if self._settings.webhook_url else ()))

    async def send(self, alarm: signals.Alarm) -> None:
        """Replace the previous alarm with this one; it is sent in the background."""
        event = "alarm_raised" if alarm.firing else "alarm_resolved"
        logs.logger().warning(event, summary=alarm.summary)
        async with self._changed:
            self._newest, self._at = alarm, datetime.now(UTC)
            self._changed.notify_all()

    async def run(self) -> None:
        """Send alarms forever."""
        senders = {"event": self._send_event, "webhook": self._send_webhook}
        async with asyncio.TaskGroup() as tasks:
            for channel in self.channels:
                tasks.create_task(self._work(channel, senders[channel]))
            await asyncio.Event().wait()

    async def _work(self, channel: str, send: Callable[[signals.Alarm], Awaitable[None]]) -> None:
        handled: signals.Alarm | None = None
        while True:
            async with self._changed:
                while self._newest is handled:
                    await self._changed.wait()
                handled = self._newest
            assert handled is not None, "an alarm is only ever replaced by another one"
            await self._deliver(channel, send, handled)

    async def _deliver(
        self, channel: str, send: Callable[[signals.Alarm], Awaitable[None]], alarm: signals.Alarm
    ) -> None:
        failures, problem = 0, ""
        while self._newest is alarm:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await send(alarm)
            except _Refused as error:
                _ALARMS.labels(channel, "refused").inc()
                logs.logger().error("alarm_refused", channel=channel, error=str(error))
                return
            except (OSError, TimeoutError, ValueError) as error:
                _ALARMS.labels(channel, "failed").inc()
                if not problem:
                    problem = str(error) or type(error).__name__
                    logs.logger().warning("alarm_delayed", channel=channel, error=problem)
            else:
                _ALARMS.labels(channel, "accepted").inc()
                logs.logger().info("alarm_accepted", channel=channel, firing=alarm.firing)
                return
            failures += 1
            await self._wait_for_newer(alarm, timeout_s=_BACKOFF.delay_s(failures))

    async def _wait_for_newer(self, alarm: signals.Alarm, *, timeout_s: float) -> None:
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._newest is not alarm)

    async def _send_event(self, alarm: signals.Alarm) -> None:
        assert self._post is not None, "this channel needs the Kubernetes API"
        namespace, pod = self._settings.namespace, self._settings.pod
        at = self._at.strftime("%Y-%m-%dT%H:%M:%SZ")
        about = {"kind": "Pod", "name": pod} if pod else {"kind": "Namespace", "name": namespace}
        problem = await self._post(
            f"/api/v1/namespaces/{namespace}/events",
            {
                "kind": "Event",
                "apiVersion": "v1",
                "metadata": {"generateName": "muster-health-", "namespace": namespace},
                "involvedObject": {"apiVersion": "v1", "namespace": namespace, **about},
                "type": "Warning" if alarm.firing else "Normal",
                "reason": "HealthImpaired" if alarm.firing else "HealthRecovered",
                "message": escaping.plain(alarm.summary[:1024]),
                "source": {"component": "muster-health"},
                "reportingComponent": "muster-health",
                "firstTimestamp": at,
                "lastTimestamp": at,
                "count": 1,
            },
        )
        if problem:
            refused = any(f"HTTP {status} " in problem for status in (400, 401, 403, 404, 422))
            raise _Refused(problem) if refused else OSError(problem)

    async def _send_webhook(self, alarm: signals.Alarm) -> None:
        body = msgspec.json.encode(
            {
                "kind": "blind",
                "state": "firing" if alarm.firing else "resolved",
                "summary": alarm.summary,
                "seconds": alarm.seconds,
                "service": "muster-health",
                "instance": self._name,
                "at": self._at,
            }
        )
        endpoint = http.Endpoint(
            self._settings.webhook_url, timeout_s=_TIMEOUT_S, user_agent=_USER_AGENT
        )
        response = await endpoint.request(
            "POST",
            headers={"Content-Type": "application/json"},
            body=body,
            read=http.Read.NOTHING,
        )
        status = response.status
        if status in {408, 429} or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise OSError(f"HTTP {status}")
        # a redirect (3xx) means that the configured URL is wrong
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            raise _Refused(f"HTTP {status}")
