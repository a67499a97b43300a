"""Pure. Verdicts and unhealthy devices become alerts: how urgent, under which name, in words."""

import hashlib
from datetime import datetime
from typing import assert_never

import msgspec

from muster import vocabulary
from muster.vocabulary import AlertKind, Severity, Verdict

Key = tuple[AlertKind, str, str]
"""Kind, resource, device: what tells the alerts of one plugin apart."""


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One alert of one plugin, from its first moment to its last."""

    kind: AlertKind
    summary: str
    evidence: tuple[vocabulary.Evidence, ...]
    starts_at: datetime
    resource: str = ""
    device: str = ""
    ends_at: datetime | None = None

    @property
    def key(self) -> Key:
        """What tells it from the plugin's other alerts."""
        return self.kind, self.resource, self.device

    def resolved(self, at: datetime, evidence: tuple[vocabulary.Evidence, ...]) -> "Alert":
        """Return its last state; the evidence is now what ended it."""
        return msgspec.structs.replace(self, ends_at=at, evidence=evidence)


def kind_of(verdict: Verdict) -> AlertKind | None:
    """Return what a verdict alerts about; None needs nobody."""
    match verdict:
        case Verdict.HEALTHY | Verdict.MAINTENANCE:
            return None
        case (
            Verdict.DEGRADED
            | Verdict.PLUGIN_DOWN
            | Verdict.STUCK
            | Verdict.UNREACHABLE
            | Verdict.NODE_DOWN
            | Verdict.DEREGISTERED
            | Verdict.MISMATCH
            | Verdict.MISSING
            | Verdict.FLAPPING
            | Verdict.SPLIT_BRAIN
        ):
            return AlertKind(verdict.value.lower())
        case _:
            assert_never(verdict)


def severity_of(kind: AlertKind) -> Severity:
    """Return how soon a person is needed: at once where pods get no device, or a broken one."""
    match kind:
        case (
            AlertKind.PLUGIN_DOWN
            | AlertKind.STUCK
            | AlertKind.NODE_DOWN
            | AlertKind.DEREGISTERED
            | AlertKind.MISMATCH
            | AlertKind.MISSING
            | AlertKind.DEVICE_UNHEALTHY
            | AlertKind.STORM
        ):
            return Severity.CRITICAL
        case (
            AlertKind.UNREACHABLE
            | AlertKind.MAINTENANCE_OVERDUE
            | AlertKind.FLAPPING
            | AlertKind.SPLIT_BRAIN
            | AlertKind.DEVICE_UNMONITORED
            | AlertKind.DEVICES_SHORT
            | AlertKind.MORE_ALERTS
        ):
            return Severity.WARNING
        case AlertKind.DEGRADED | AlertKind.DEVICE_DEGRADED | AlertKind.CLOCK_SKEW:
            return Severity.INFO
        case _:
            assert_never(kind)


def fingerprint(
    node: str, plugin: str, kind: AlertKind, *, resource: str = "", device: str = ""
) -> str:
    """Return the name an alert has from first to last, and again when it comes back."""
    text = f"{node}|{plugin}|{kind}|{resource}|{device}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed(alert: Alert, *, node: str, plugin: str, runbook_url: str) -> vocabulary.AlertChanged:
    """Return the fact that an alert fires, or is resolved; the same alert gives the same fact."""
    return vocabulary.AlertChanged(
        node=node,
        at=alert.ends_at or alert.starts_at,
        plugin=plugin,
        kind=alert.kind,
        severity=severity_of(alert.kind),
        state=(vocabulary.AlertState.RESOLVED if alert.ends_at else vocabulary.AlertState.FIRING),
        fingerprint=fingerprint(
            node, plugin, alert.kind, resource=alert.resource, device=alert.device
        ),
        summary=alert.summary,
        starts_at=alert.starts_at,
        ends_at=alert.ends_at,
        resource=alert.resource,
        devices=(alert.device,) if alert.device else (),
        evidence=alert.evidence,
        runbook=f"{runbook_url}{alert.kind}.md",
    )


def event_id(alert: vocabulary.AlertChanged) -> str:
    """Return the id of an alert's change: repeated after a crash, it is known as a repeat."""
    return f"{alert.fingerprint}:{alert.state}:{alert.starts_at.isoformat()}"


def summary_of(kind: AlertKind, *, node: str, plugin: str, resources: tuple[str, ...]) -> str:
    """Return in one line what is wrong with a plugin."""
    what = f"{plugin} on {node}"
    those = ", ".join(resources[:4]) + (", ..." if len(resources) > 4 else "")  # noqa: PLR2004  # one line
    match kind:
        case AlertKind.PLUGIN_DOWN:
            return f"{what} is down"
        case AlertKind.STUCK:
            return f"{what} is stuck: it runs and does not answer"
        case AlertKind.DEREGISTERED:
            return f"{what} is not registered with the kubelet: {those}"
        case AlertKind.MAINTENANCE_OVERDUE:
            return f"{what} stopped as planned and is not back"
        case _:
            return f"{what}: {kind.replace('_', ' ')}"
