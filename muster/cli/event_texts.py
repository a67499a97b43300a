"""Pure: describes events as text, the same in every command and in the console."""

from collections.abc import Sequence
from typing import Final

from muster import codec, vocabulary, wording
from muster.cli import texts

PERIODIC: Final = (vocabulary.InventoryReported, vocabulary.WatchdogTicked)
"""Events that are repeated periodically, even without a change."""
TEST_GROUP: Final = '{}:{kind="test",at='
"""How the group of a test message begins."""
_LISTED_MAX: Final = 5
_LINE_MAX: Final = 400


def change_text(event: codec.CloudEvent) -> str:
    """Return an event as one line, without its time and node."""
    match event.data:
        case vocabulary.VerdictChanged() as change:
            before = f"{change.previous} -> " if change.previous else ""
            why = "; ".join(f"{item.source}: {item.observed}" for item in change.evidence)
            name = change.watched or change.plugin
            text = f"verdict {name}: {before}{change.verdict} ({change.rule}) {why}"
        case vocabulary.AlertChanged() as change:
            text = f"alert {change.state} {change.severity} {change.kind}: {change.summary}"
        case vocabulary.RemediationDecided() as change:
            text = f"restart {change.outcome} {change.pod}: {change.reason}"
        case vocabulary.PluginObserved(watched=watched) as change:
            what = "removed from the node" if change.gone else watched.finding
            text = f"{event.type} {watched.name}: {what}"
            text += f": {watched.text}" if watched.text else ""
        case vocabulary.FuseMounted(mount=mount):
            text = f"{event.type} {mount_text(mount, has_state=False)}"
        case vocabulary.FuseMountChanged(mount=mount) as change:
            text = f"{event.type} {change.condition} {'begins' if change.holds else 'ends'}: "
            text += f"{change.text}; {mount_text(mount, has_state=False)}"
        case _:
            text = _report_text(event)
    text = texts.plain(text.rstrip())
    return text if len(text) <= _LINE_MAX else f"{text[: _LINE_MAX - 3]}..."


def mount_text(mount: vocabulary.FuseMount, *, has_state: bool = True) -> str:
    """Return a mount as text; with `has_state`, its conditions are included."""
    place = f" on {mount.mount_point}" if mount.mount_point else ""
    state = f": {', '.join(mount.conditions) or 'works'}" if has_state else ""
    program = " ".join(filter(None, (mount.subtype, mount.source))) or "FUSE"
    user = f"user {mount.user_id}, connection {mount.connection}"
    return texts.plain(f"{mount.pod}: {program}{place}{state} ({user})")


def _report_text(event: codec.CloudEvent) -> str:
    """Return the text of an event for which `change_text` has no case."""
    match event.data:
        case vocabulary.DeviceAdded(device=device):
            reason = f" {device.reason}" if device.reason else ""
            text = f"{event.type} {device.resource} {device.id}: {device.health}{reason}"
        case vocabulary.DeviceHealthChanged() as change:
            text = f"{change.resource} is {change.health}: {change.reason} ({change.device_id})"
            text += f"; used by {', '.join(change.pods)}" if change.pods else ""
        case vocabulary.PluginRegistered() as change:
            text = f"{event.type} {change.resource}, reason: {change.reason}"
        case vocabulary.AllocationObserved(pod=pod) as change:
            ids = ", ".join(change.device_ids)
            text = f"{event.type} {change.resource} for {pod or 'an unknown pod'}: {ids}"
        case vocabulary.LabelEvent(labels=labels) as change:
            values = ", ".join(f"{name}={value}" for name, value in labels.items())
            text = f"{event.type} {values or 'none'}: {change.reason}"
        case vocabulary.NotificationEvent() as change:
            counted = f"{len(change.firing)} firing, {len(change.resolved)} resolved"
            about = f"{counted} ({change.reason})"
            about = "test message" if change.group.startswith(TEST_GROUP) else about
            end = getattr(change, "error", "") or getattr(change, "answer", "")
            text = f"{event.type} {change.receiver}: {about} {end}"
        case vocabulary.OperatorActed() as acted:
            what = f"{acted.actor}: {acted.act} {acted.target} {acted.outcome}"
            more = "; ".join(filter(None, (acted.about, acted.reason)))
            text = f"{event.type} {what}{': ' if more else ''}{more}"
        case _:
            text = f"{event.type} {said(event)}"
    return text


def said(event: codec.CloudEvent) -> str:
    """Return the text of an event for which `_report_text` has no case."""
    match event.data:
        case vocabulary.PluginEvent() as reported:
            text = _of_plugin(reported) or _fields(event)
        case vocabulary.ReceiversConfigured() as configured:
            names = [f"{name} ({kind})" for name, kind in configured.receivers.items()]
            refused = f"; unusable: {_list(configured.refused)}" if configured.refused else ""
            text = f"people are notified through {_list(names) or 'nothing'}{refused}"
        case vocabulary.NodeLimited() as limited:
            sent = f"{limited.messages} messages and {limited.bytes} bytes in {limited.seconds:g} s"
            text = f"refused for {limited.refused_s:g} s after {sent}: {limited.reason}"
        case vocabulary.WatchdogTicked(holder=holder):
            text = f"{holder} leads"
        case _:
            text = _fields(event)
    return text


def _of_plugin(event: vocabulary.PluginEvent) -> str:
    """Return the content of a plugin's event as text; empty for types without a text here."""
    match event:
        case vocabulary.PluginStarted() as started:
            serves = f" and serves {_list(started.resources)}" if started.resources else ""
            text = f"{event.plugin} {started.version} runs{serves} (instance {started.instance})"
        case vocabulary.PluginStopping(reason=reason, expected_return_s=back_s):
            back = f"expected back within {back_s:g} s" if back_s else "not expected back"
            text = f"{event.plugin} stops ({reason}), {back}"
        case vocabulary.PluginDeregistered(resource=resource, reason=reason, detail=detail):
            text = f"the kubelet no longer lists {resource} ({reason}){_after(detail)}"
        case vocabulary.DeviceRemoved() as removed:
            replicas = f" with {removed.count} replicas" if removed.count > 1 else ""
            text = f"{removed.resource} {removed.device_id}{replicas}{_after(removed.reason)}"
        case vocabulary.DeviceConditionChanged() as change:
            now = change.condition if change.holds else f"no longer {change.condition}"
            text = f"{change.resource} is {now}{_after(change.reason)} ({change.device_id})"
        case vocabulary.ExpectationChanged(resource=resource, short=short):
            text = f"{resource}: {short or 'as many devices as expected again'}"
        case vocabulary.ProblemChanged(problem=problem, holds=holds):
            text = problem if holds else f"resolved: {problem}"
        case _:
            text = _of_configuration(event)
    return text


def _of_configuration(event: vocabulary.PluginEvent) -> str:
    match event:
        case vocabulary.ConfigurationApplied() as applied:
            changes = (
                ("adds", applied.added),
                ("removes", applied.removed),
                ("registers again", applied.registered_again),
                ("takes effect at the next start:", applied.restart),
            )
            parts = [f"{what} {_list(names)}" for what, names in changes if names]
            text = f"a new configuration {', '.join(parts) or 'changes no resource'}"
        case vocabulary.ConfigurationRefused(problems=problems):
            text = f"the previous configuration stays active: {'; '.join(problems)}"
        case vocabulary.InventoryReported(devices=devices, resources=resources):
            counted = wording.counted(sum(device.count for device in devices), "device")
            text = f"{counted} of {_list(resources) or 'no resource'}"
        case vocabulary.FuseRefused(pod=pod, reason=reason, text=text):
            text = f"{pod}: {text} ({reason})"
        case vocabulary.FuseAborted(pod=pod, count=count, reason=reason):
            text = f"{pod}: {wording.counted(count, 'connection')} ended: {reason}"
        case _:
            text = ""
    return text


def _fields(event: codec.CloudEvent) -> str:
    return str(event).split(" ", 2)[2].removeprefix(event.type).strip()


def _after(text: str) -> str:
    return f": {text}" if text else ""


def _list(names: Sequence[str]) -> str:
    return wording.listed(names, _LISTED_MAX)
