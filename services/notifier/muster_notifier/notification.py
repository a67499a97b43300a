"""Pure. One message about one group of alerts to one receiver, before it has words."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster import vocabulary

_URGENCY: Final = tuple(vocabulary.Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What is true of a group at the moment it is decided that a receiver must hear of it.

    `id` is the same for the same news, so that a receiver can drop a repeat after a crash.
    `send_resolved` is the receiver's wish; `decided_at` is monotonic seconds.
    """

    id: str
    receiver: str
    group: str
    labels: Mapping[str, str]
    reason: vocabulary.NotificationReason
    firing: tuple[vocabulary.AlertChanged, ...]
    resolved: tuple[vocabulary.AlertChanged, ...]
    send_resolved: bool
    decided_at: float

    @property
    def node(self) -> str:
        """The node it is about, or the fleet."""
        return self.labels.get("node", vocabulary.FLEET)

    @property
    def state(self) -> vocabulary.AlertState:
        """Whether anything still fires."""
        return vocabulary.AlertState.FIRING if self.firing else vocabulary.AlertState.RESOLVED

    @property
    def is_silent(self) -> bool:
        """Whether the receiver hears nothing and only the ledger learns that all is resolved."""
        return not self.firing and not self.send_resolved

    @property
    def told_resolved(self) -> tuple[vocabulary.AlertChanged, ...]:
        """The resolved alerts that the receiver hears of."""
        return self.resolved if self.send_resolved else ()


def name_group(labels: Mapping[str, str]) -> str:
    """Return the group's name as Alertmanager writes it: `{kind="stuck",node="node-a"}`."""
    return "{" + ",".join(f'{name}="{labels[name]}"' for name in sorted(labels)) + "}"


def most_urgent_first(
    alerts: Sequence[vocabulary.AlertChanged],
) -> tuple[vocabulary.AlertChanged, ...]:
    """Return the alerts in the order people read them; the same alerts, always the same order."""
    return tuple(
        sorted(alerts, key=lambda a: (_URGENCY.index(a.severity), a.node, a.devices, a.fingerprint))
    )


def identify(
    *,
    after: str,
    receiver: str,
    group: str,
    reason: vocabulary.NotificationReason,
    firing: Sequence[vocabulary.AlertChanged],
    resolved: Sequence[vocabulary.AlertChanged],
) -> str:
    """Return the notification's id. `after` is the id of what the receiver heard last, or empty.

    A notifier that crashed between sending and remembering decides the same again and gives it the
    same id; a reminder follows another message, so it gets another.
    """
    told = [after, receiver, group, reason]
    told += sorted(f"firing {alert.fingerprint} {alert.starts_at.isoformat()}" for alert in firing)
    told += sorted(
        f"resolved {alert.fingerprint} {alert.starts_at.isoformat()}" for alert in resolved
    )
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]
