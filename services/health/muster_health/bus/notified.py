"""Adapter: tracks the notifier's receivers and its own alerts, which `muster status` shows.

The leading notifier publishes both every minute. Alerting does not depend on these messages.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from muster import codec, vocabulary
from muster.nats import connection

SUBJECT: Final = vocabulary.ReceiversConfigured.SUBJECT.replace("{node}", "*")
_PATIENCE_S: Final = 180.0
_INTERVALS: Final = 3.0
_NOBODY: Final = (
    f"{vocabulary.NOBODY_NOTIFIED}; "
    "`muster notify setup slack --context CONTEXT` adds a receiver (docs/notifier.md)"
)


class ReceiverStatus:
    """The receivers and the alerts that the notifier published last."""

    def __init__(self, *, began_at: float) -> None:
        """Begin without receivers; `began_at` is when this process began, in monotonic seconds."""
        self._receivers: Mapping[str, str] | None = None
        self._refused: tuple[str, ...] = ()
        self._alerts: tuple[vocabulary.AlertChanged, ...] = ()
        self._due = began_at + _PATIENCE_S

    async def receive(self, message: connection.Message) -> None:
        """Record the receivers and alerts in a message on `SUBJECT`; count malformed messages."""
        try:
            event = codec.decode(message.subject, message.data).data
        except codec.MalformedEvent as error:
            connection.RECEIVED.labels(f"malformed_{error.reason}").inc()
            return
        assert isinstance(event, vocabulary.ReceiversConfigured), "the subject determines the type"
        self.observe(event, asyncio.get_running_loop().time())

    def observe(self, event: vocabulary.ReceiversConfigured, now: float) -> None:
        """Record receivers, alerts, and the time by which the notifier must publish them again."""
        self._receivers, self._refused = event.receivers, event.refused
        self._alerts = event.alerts
        self._due = now + max(_PATIENCE_S, _INTERVALS * event.interval_s)

    def alerts(self, now: float) -> tuple[vocabulary.AlertChanged, ...]:
        """Return the notifier's own firing alerts; none if it has been silent for too long."""
        return () if now > self._due else self._alerts

    def problem(self, now: float) -> str:
        """Return why alerts may not reach people; empty if no reason is known."""
        if now > self._due:
            return (
                "no notifier has published its receivers; check that one is running and connected "
                "to NATS"
            )
        if self._receivers is None:
            return ""
        nobody = "" if set(self._receivers.values()) - {vocabulary.CONSOLE} else _NOBODY
        names = ", ".join(self._refused)
        refused = f"the notifier ignores receivers, as its log explains: {names}" if names else ""
        return "; ".join(filter(None, (nobody, refused)))
