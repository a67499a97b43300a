"""Pure: What a person sees of a fleet: folded from beats and events, a row for each resource."""

import collections
from dataclasses import dataclass, field
from typing import Final

from muster import codec, vocabulary

_RECENT_MAX: Final = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One resource of one node, ready to be shown."""

    node: str
    resource: str
    healthy: int
    devices: int
    allocated: int
    verdict: str
    problem: str


@dataclass(slots=True)
class Fleet:
    """The present state; `apply` and `beat` fold news into it, order within one node kept."""

    verdicts: dict[tuple[str, str], vocabulary.VerdictChanged] = field(default_factory=dict)
    beats: dict[tuple[str, str], vocabulary.Heartbeat] = field(default_factory=dict)
    alerts: dict[str, vocabulary.AlertChanged] = field(default_factory=dict)
    labels: dict[str, vocabulary.LabelEvent] = field(default_factory=dict)
    recent: collections.deque[codec.CloudEvent] = field(
        default_factory=lambda: collections.deque(maxlen=_RECENT_MAX)
    )

    def beat(self, beat: vocabulary.Heartbeat) -> None:
        """Take a sign of life."""
        self.beats[beat.node, beat.plugin] = beat

    def apply(self, event: codec.CloudEvent) -> None:
        """Take an event."""
        self.recent.append(event)
        match event.data:
            case vocabulary.VerdictChanged() as verdict:
                self.verdicts[verdict.node, verdict.plugin] = verdict
            case vocabulary.AlertChanged(state=vocabulary.AlertState.FIRING) as alert:
                self.alerts[alert.fingerprint] = alert
            case vocabulary.AlertChanged() as alert:
                self.alerts.pop(alert.fingerprint, None)
            case vocabulary.LabelEvent() as labels:
                self.labels[labels.node] = labels
            case _:
                pass

    def rows(self) -> list[Row]:
        """Return the rows by node, plugin and resource name."""
        return [
            self._row(beat, resource)
            for _, beat in sorted(self.beats.items())
            for resource in beat.resources
        ]

    def firing(self) -> list[vocabulary.AlertChanged]:
        """Return the alerts that fire, oldest first."""
        return sorted(self.alerts.values(), key=lambda alert: (alert.starts_at, alert.fingerprint))

    def _row(self, beat: vocabulary.Heartbeat, resource: vocabulary.ResourceBeat) -> Row:
        verdict = self.verdicts.get((beat.node, beat.plugin))
        return Row(
            node=beat.node,
            resource=resource.name,
            healthy=resource.healthy,
            devices=resource.devices,
            allocated=resource.allocated,
            verdict=verdict.verdict if verdict else "",
            problem=resource.problem or _unhealthy(resource),
        )


def _unhealthy(resource: vocabulary.ResourceBeat) -> str:
    count = resource.devices - resource.healthy
    return f"{count} Unhealthy" if count else ""
