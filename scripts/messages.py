"""Adapter for files: renders each kind of alert for each receiver, into tests/golden/messages.

    python scripts/messages.py            write the files
    python scripts/messages.py --check    write nothing; print stale files and exit with 1

The alerts have the texts of the services that raise them, if these are available without a cluster;
the other texts are written here.
"""

import argparse
import email
import email.policy
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from muster import vocabulary
from muster.vocabulary import AlertKind, NotificationReason
from muster_health.alerting import (
    device_alerts,
    mount_alerts,
    refused_configuration,
    watched_alerts,
)
from muster_health.model import alerts, steps
from muster_notifier import monitor
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import chat, message, pagerduty, webhook
from muster_notifier.receivers import email as mails
from muster_notifier.routing import notifications

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "tests/golden/messages"
COMPOSER: Final = message.Composer(in_cluster=True)
NODE: Final = "gpu-node-7"
GPU: Final = "GPU-8d4f2a6e-51c3-9b7a-0e2d-7f1c6b3a9e54"
_T0: Final = datetime(2026, 1, 1, 3, 12, 7, tzinfo=UTC)
_LASTED: Final = timedelta(minutes=12, seconds=20)
_RUNBOOKS: Final = "https://example.com/muster/docs/runbooks/"
_PLUGIN: Final = "device-plugin"
_PODS: Final = ("ml/train-0", "ml/train-1")
_RESOURCES: Final = ("nvidia.com/gpu",)

_SILENT: Final = ("heartbeat", "none for 6.5 s, 6.5 intervals of 1 s")
_POD_RUNS: Final = ("kubernetes", "pod muster-plugin-x7k2p Running, Ready")
_CRASHED: Final = (
    "pod muster-plugin-x7k2p Running, not Ready, CrashLoopBackOff, 4 restarts, "
    "last exit code 137 (OOMKilled) at 2026-01-01T03:11:58Z"
)
_NODE_READY: Final = ("kubernetes", "node lease renewed 3 s ago; node Ready")
_REFUSED: Final = (
    "nvidia.com/gpu: kubelet refuses registration (UNAVAILABLE: failed to connect to all addresses;"
    " last error: UNKNOWN: unix:///var/lib/kubelet/device-plugins/kubelet.sock: connect: "
    "Connection refused (111)), for 31.0 s; registering"
)
_EVIDENCE: Final[Mapping[AlertKind, tuple[tuple[str, str], ...]]] = {
    AlertKind.PLUGIN_DOWN: (
        _SILENT,
        ("probe", "no process is subscribed to the plugin's subject in NATS"),
        ("kubernetes", _CRASHED),
        ("kubernetes", "nvidia.com/gpu allocatable 0 of 8"),
    ),
    AlertKind.STUCK: (
        _SILENT,
        ("probe", "the plugin is subscribed but did not answer within 1 s"),
        _POD_RUNS,
    ),
    AlertKind.DEREGISTERED: (("plugin", _REFUSED), _NODE_READY),
    AlertKind.NODE_DOWN: (_SILENT, ("kubernetes", "node lease renewed 58 s ago; node not Ready")),
    AlertKind.UNREACHABLE: (_SILENT, _NODE_READY, _POD_RUNS),
    AlertKind.MISMATCH: (("kubernetes", "nvidia.com/gpu allocatable 7 of 8, the plugin has 8"),),
    AlertKind.MISSING: (
        ("heartbeat", "none yet; waited 120.0 s, 120.0 intervals of 1 s"),
        ("kubernetes", "the plugin has no pod on the node"),
    ),
    AlertKind.MAINTENANCE_OVERDUE: (("clock", "not back 600 s after it announced its stop"),),
    AlertKind.FLAPPING: (("health", "failed 4 times within 10 min"),),
    AlertKind.SPLIT_BRAIN: (("heartbeat", "2 processes: a1b2 and c3d4, both since 03:11"),),
    AlertKind.DEGRADED: (("plugin", "checks of nvidia.com/gpu take 6.1 s, more than 5 s"),),
}
_FLEET: Final[Mapping[AlertKind, tuple[str, str, str]]] = {
    AlertKind.CLOCK_SKEW: (
        f"the clock of node {NODE} differs from the clock of health's node",
        "heartbeat",
        "94.0 s behind health's",
    ),
    AlertKind.NOISY_NODE: (
        f"{NODE} sends more than allowed: events; the excess is not read",
        "bus",
        "at least 12,000 events within 10.0 s; from device-plugin",
    ),
    AlertKind.STORM: (
        "35 of 40 plugins went silent at the same time; in common: zone=a",
        "health",
        "35 suspected; no verdicts about them until the mass failure is over",
    ),
    AlertKind.EVICTIONS: (
        "a full stream removes messages before all consumers have read them",
        "bus",
        "MUSTER_EVENTS: 310 messages removed within 60 s, which health had not read",
    ),
    AlertKind.MORE_ALERTS: (
        "14 more plugins have alerts, which the rate limit delays",
        "health",
        "device-plugin on gpu-node-9 is down",
    ),
    AlertKind.HEALTH_SILENT: (
        "the health service is silent: plugins are not monitored",
        "notifier",
        "no watchdog tick for 26 s; the last leader was health-0",
    ),
    AlertKind.DEAD_LETTERS: (
        "notifications could not be delivered",
        "notifier",
        "2 dead letters",
    ),
}


def samples() -> dict[str, vocabulary.AlertChanged]:
    """Return a firing alert of each kind, and one about a watched plugin, by name."""
    made = {str(kind): _of_plugin(kind) for kind in _EVIDENCE}
    made |= {str(kind): _of_fleet(kind) for kind in _FLEET}
    for alert in (*_of_devices(), *_of_mounts(), *_of_configuration()):
        made[str(alert.kind)] = alert
    made["watched_plugin"] = _watched()
    missing = set(map(str, AlertKind)) - set(made)
    assert not missing, f"kinds without a sample: {missing}"
    return dict(sorted(made.items()))


def documents() -> dict[Path, str]:
    """Return the text of every file, by its path."""
    return {FOLDER / f"{name}.txt": _document(alert) for name, alert in samples().items()}


def notify(
    alert: vocabulary.AlertChanged, *, reason: NotificationReason = NotificationReason.FIRST
) -> notifications.Notification:
    """Return a notification about one alert, which is resolved if the reason is ALL_RESOLVED."""
    over = reason is NotificationReason.ALL_RESOLVED
    at = alert.starts_at + (_LASTED if reason is not NotificationReason.FIRST else timedelta())
    resolved = msgspec.structs.replace(
        alert, state=vocabulary.AlertState.RESOLVED, ends_at=at, evidence=()
    )
    labels = {"kind": str(alert.kind), "node": alert.node}
    return notifications.create(
        after="",
        receiver="ops",
        group=f'{{}}:{{kind="{alert.kind}",node="{alert.node}"}}',
        labels=labels,
        reason=reason,
        firing=[] if over else [alert],
        resolved=[resolved] if over else [],
        send_resolved=True,
        at=at,
    )


def _event(alert: alerts.Alert, *, watched: str = "") -> vocabulary.AlertChanged:
    fleet = alert.kind in alerts.OF_FLEET - {AlertKind.NOISY_NODE}
    return alerts.changed(
        alert,
        node=vocabulary.FLEET if fleet else NODE,
        plugin="health" if fleet else _PLUGIN,
        runbook_url=_RUNBOOKS,
        leader=1,
        watched=watched,
    )


def _evidence(items: tuple[tuple[str, str], ...]) -> tuple[vocabulary.Evidence, ...]:
    return tuple(vocabulary.Evidence(source=source, observed=text) for source, text in items)


def _of_plugin(kind: AlertKind) -> vocabulary.AlertChanged:
    summary = alerts.summary_of(kind, node=NODE, plugin=_PLUGIN, resources=_RESOURCES)
    items = _evidence(_EVIDENCE[kind])
    alert = alerts.Alert(
        kind=kind, summary=summary, evidence=items, starts_at=_T0, changed_at=_T0
    ).naming(_PODS, len(_PODS))
    return _event(alert)


def _of_fleet(kind: AlertKind) -> vocabulary.AlertChanged:
    summary, source, text = _FLEET[kind]
    alert = alerts.Alert(
        kind=kind,
        summary=summary,
        evidence=_evidence(((source, text),)),
        starts_at=_T0,
        changed_at=_T0,
        resource=NODE if kind is AlertKind.NOISY_NODE else "",
    )
    event = _event(alert)
    if kind in monitor.ADVICE:
        advice = monitor.ADVICE[kind]
        return msgspec.structs.replace(
            event, node=vocabulary.FLEET, plugin=monitor.PLUGIN, advice=advice
        )
    return event


def _of_devices() -> Iterator[vocabulary.AlertChanged]:
    faults = device_alerts.DeviceFaults(devices_max=100)
    about: dict[str, Any] = {"node": NODE, "at": _T0, "plugin": _PLUGIN, "pods": _PODS[:1]}
    about |= {"resource": _RESOURCES[0], "device_id": GPU}
    faults.apply(
        vocabulary.DeviceHealthChanged(
            **about,
            health=vocabulary.Health.UNHEALTHY,
            reason="XID 79: GPU has fallen off the bus",
            code="xid-79",
        )
    )
    for condition, reason in (
        (vocabulary.Condition.DEGRADED, "12 ECC errors corrected within an hour"),
        (vocabulary.Condition.UNMONITORED, "the driver does not report XIDs of this GPU"),
    ):
        faults.apply(
            vocabulary.DeviceConditionChanged(
                **about, condition=condition, holds=True, reason=reason
            )
        )
    short = {_RESOURCES[0]: "7 of the 8 devices that it had"}
    for alert in device_alerts.of(faults, node=NODE, at=_T0, missed=short):
        yield _event(alert)


def _of_mounts() -> Iterator[vocabulary.AlertChanged]:
    faults = mount_alerts.MountFaults()
    for number, condition in enumerate(vocabulary.FuseCondition):
        faults.apply(
            vocabulary.FuseMountChanged(
                node=NODE,
                at=_T0,
                plugin="fuse-broker",
                mount=vocabulary.FuseMount(
                    id=str(number),
                    pod="data/reader-0",
                    connection=40 + number,
                    source="bucket-a",
                    subtype="s3fs",
                    mount_point="/data",
                ),
                condition=condition,
                holds=True,
                text="12 requests wait, the oldest for 45 s",
            )
        )
    for alert in mount_alerts.of(faults, node=NODE, at=_T0):
        yield _event(alert)


def _of_configuration() -> Iterator[vocabulary.AlertChanged]:
    refused = refused_configuration.RefusedConfiguration(wait_s=0.0)
    event = vocabulary.ConfigurationRefused(
        node=NODE,
        at=_T0,
        plugin=_PLUGIN,
        config_hash="3f9a0c1d2b4e",
        problems=(
            "/etc/muster/devices.yaml: resources[0].cuont: unknown key; did you mean count?",
        ),
    )
    refused.apply(event, "a1b2", now=0.0, wall=0.0)
    for alert in refused.alerts(node=NODE, plugin=_PLUGIN, now=0.0, at=_T0):
        yield _event(alert)


def _watched() -> vocabulary.AlertChanged:
    subject = watched_alerts.Subject("amd.com/gpu", pods=("kube-system/amdgpu-dp-9xk2",))
    rule = steps.Rule.WATCHED_NO_ANSWER
    summary, advice = watched_alerts.texts(AlertKind.STUCK, rule, subject, node=NODE)
    items = _evidence((("agent", "its socket accepted a connection; no answer within 5 s"),))
    alert = alerts.Alert(
        kind=AlertKind.STUCK,
        summary=summary,
        advice=advice,
        evidence=items,
        starts_at=_T0,
        changed_at=_T0,
    ).naming(_PODS, len(_PODS))
    return _event(alert, watched=subject.name)


def _document(alert: vocabulary.AlertChanged) -> str:
    first = notify(alert)
    words = COMPOSER.compose(first)
    parts = {
        "lock screen": words.title,
        "later": COMPOSER.compose(notify(alert, reason=NotificationReason.REPEAT)).title,
        "resolved": COMPOSER.compose(notify(alert, reason=NotificationReason.ALL_RESOLVED)).title,
        "email": _mail(first, words),
        "slack": _shown(chat.slack_content(first, words)),
        "slack thread, resolved": chat.change_line(
            (over := notify(alert, reason=NotificationReason.ALL_RESOLVED)), COMPOSER.compose(over)
        ),
        "teams": _teams(first),
        "pagerduty": _pagerduty(first, words),
        "pagerduty, resolved": _pagerduty(over, COMPOSER.compose(over)),
        "webhook": _shown(_webhook(first, words)),
    }
    return "\n".join(f"== {name}\n{text.rstrip()}\n" for name, text in parts.items())


def _mail(notification: notifications.Notification, words: message.Message) -> str:
    encoded = mails.encode_mail(
        notification, words, sender="muster@example.com", to=("ops@example.com",)
    )
    read = email.message_from_bytes(encoded, policy=email.policy.default)
    names = ("Subject", "In-Reply-To")
    content = read.get_content().replace("\r\n", "\n")
    return "\n".join([*(f"{name}: {read[name]}" for name in names), "", content])


def _teams(notification: notifications.Notification) -> str:
    prepared = message.inert(notification)
    card = json.loads(chat.teams_card(prepared, COMPOSER.compose(prepared)))
    content = card["attachments"][0]["content"]
    lines = [block["text"] for block in content["body"]]
    actions = [f"[{each['title']}] -> {each['url']}" for each in content.get("actions", [])]
    return "\n".join([*lines, *actions])


def _pagerduty(notification: notifications.Notification, words: message.Message) -> str:
    event = json.loads(pagerduty.encode(notification, words, routing_key="(secret)"))
    if "payload" in event:
        del event["payload"]["custom_details"]["alerts"]
    return _shown(event)


def _webhook(notification: notifications.Notification, words: message.Message) -> Any:
    body = webhook.encode_body(
        notification,
        words,
        format_=receiver_settings.Format.CLOUDEVENTS,
    )
    data = json.loads(body)["data"]
    return {name: data[name] for name in ("status", "reason", "groupKey", "title", "text")}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts unchanged."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _shown(tree: object) -> str:
    return yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True, indent=2
    )


def main() -> int:
    """Write or check the files, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    made = documents()
    stale = sorted(path for path in FOLDER.glob("*.txt") if path not in made)
    stale += [
        path for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale")
    if is_check:
        return int(bool(stale))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale:
        if path in made:
            path.write_text(made[path], "utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
