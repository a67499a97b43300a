"""Pure: the saved state of one plugin, and its encoding.

The state is stored when a verdict or an alert changes: first with the pending change, and again
without it after the change is published. After a crash in between, the change is published again
under the same event id; it is never lost. The encoded names are in the bucket and must not change,
because another version may read them.
"""

import enum
import functools
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster.vocabulary import facts
from muster_health.model import alerts

VERSION: Final = 2
REMEDIES_MAX: Final = 8
"""How many restarts of a plugin are stored; with more, the wait on its node no longer doubles."""
_BYTES_MAX: Final = 900_000
"""A limit below the bucket's 1,000,000 bytes; NATS refuses larger values."""
_WHY_SHORT: Final = 60
_IDS_EACH: Final = 64
_INTERVAL_S: Final = 5.0
"""The interval assumed until the first heartbeat declares one."""


class State(enum.StrEnum):
    """The state of a plugin's state machine; the package `plugin` has the table of states.

    The values are those in the bucket.
    """

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"
    FAILING = "ill"
    MAINTENANCE = "maintenance"
    RECOVERING = "recovering"

    @property
    def shown(self) -> str:
        """The state as people see it."""
        return self.name.lower()


class KnownFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Devices with the same fault, or one FUSE mount of the pod `resource`, as saved."""

    kind: vocabulary.AlertKind
    resource: str
    why: str
    ids: tuple[str, ...]


class KnownRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refused configuration, as saved; `since` is a Unix timestamp in seconds.

    `instance` and `config_hash` are empty if it was restored from its published alert alone.
    """

    since: float
    instance: str
    config_hash: str
    """The hash of the configuration that is still in force."""
    problems: tuple[str, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The saved state of one plugin. Suspicions are not saved; after a restart they arise again.

    Only the fleet's snapshot (`node` is `vocabulary.FLEET`) has a `position`: the last position in
    the stream of events that has been processed. `leader` is the revision of the leader that wrote
    the snapshot.
    """

    # a default value would not be written, and a later version would read its own default instead
    v: int = msgspec.field(default_factory=lambda: VERSION)
    node: vocabulary.NodeName
    plugin: vocabulary.PluginName
    state: State
    interval_s: float
    verdict: vocabulary.Verdict | None = None
    since: datetime | None = None
    rule: str = ""
    evidence: tuple[vocabulary.Evidence, ...] = ()
    resources: tuple[str, ...] = ()
    accused: tuple[str, ...] = ()
    """The resources that the verdict is about."""
    instance: str = ""
    seq: int = -1
    leaving: str = ""
    return_s: float = 0.0
    falls: int = 0
    flapping: bool = False
    order: tuple[tuple[str, int], ...] = ()
    """The sequence number of each instance's last event, the newest instance last."""
    bad: tuple[KnownFault, ...] = ()
    """Devices and FUSE mounts with faults."""
    had: tuple[tuple[str, int], ...] = ()
    """The expected number of devices by resource, under the configuration `configuration`."""
    configuration: str = ""
    refused: KnownRefusal | None = None
    """The configuration that the plugin refused, until another one is in force."""
    firing: tuple[alerts.Alert, ...] = ()
    unpublished_verdict: vocabulary.VerdictChanged | None = msgspec.field(
        name="untold_verdict", default=None
    )
    unpublished_alerts: tuple[alerts.Alert, ...] = msgspec.field(name="untold_alerts", default=())
    remedied: datetime | None = None
    """The start of the verdict for which a restart was last decided or refused."""
    remedies: tuple[datetime, ...] = ()
    """The times of the latest restarts of the pod by health; they count towards the limits."""
    position: int = 0
    leader: int = 0
    watched: vocabulary.Watched | None = None
    """The agent's last observation; None for a plugin that muster runs."""
    agent: str = ""
    """The plugin that observes a watched plugin."""


def key_of(node: str, plugin: str) -> str:
    """Return the key under which a plugin's state is saved."""
    return f"{vocabulary.node_token(node)}.{plugin}"


def of_alerts(published: Iterable[vocabulary.AlertChanged]) -> list[Snapshot]:
    """Rebuild states from published alerts (oldest first), for a start without saved state.

    The verdicts are unknown, but alerts that still fire must be resolved once the plugin is
    healthy.
    """
    newest = {event.fingerprint: event for event in published}
    plugins: dict[tuple[str, str, str], list[alerts.Alert]] = {}
    for event in newest.values():
        if event.state is vocabulary.AlertState.FIRING:
            is_noisy = event.kind is vocabulary.AlertKind.NOISY_NODE
            owner = vocabulary.FLEET if is_noisy else event.node
            key = owner, event.plugin, event.watched
            plugins.setdefault(key, []).append(alerts.of_event(event))
    return [
        Snapshot(
            node=node,
            plugin=plugin,
            state=State.UNKNOWN,
            interval_s=_INTERVAL_S,
            firing=tuple(firing),
            bad=tuple(_bad(alert) for alert in firing if alert.kind in alerts.OF_DEVICES),
            refused=next(map(_refused, filter(_is_refusal, firing)), None),
            watched=vocabulary.Watched(name=watched) if watched else None,
        )
        for (node, plugin, watched), firing in plugins.items()
    ]


def _bad(alert: alerts.Alert) -> KnownFault:
    why = alert.evidence[0].observed.partition(": ")[2] if alert.evidence else ""
    return KnownFault(alert.kind, alert.resource, why, alert.devices)


def _is_refusal(alert: alerts.Alert) -> bool:
    return alert.kind is vocabulary.AlertKind.CONFIGURATION_REFUSED


def _refused(alert: alerts.Alert) -> KnownRefusal:
    problems = tuple(entry.observed for entry in alert.evidence)
    return KnownRefusal(
        since=alert.starts_at.timestamp(), instance="", config_hash="", problems=problems[:-1]
    )


_Verdict = tuple[str, tuple[vocabulary.Evidence, ...], tuple[str, ...], tuple[str, ...]]
_DECODER = msgspec.json.Decoder(Snapshot)


def encode(stored: Snapshot) -> bytes:
    """Return the state as JSON, no larger than NATS accepts.

    If there are thousands of devices with long reasons, the reasons are cut. If that is not enough,
    the last devices are left out: the next inventory lists them again.
    """
    value = msgspec.json.encode(stored)
    if len(value) <= _BYTES_MAX:
        return value
    bad = _shorter(stored.bad)
    value = msgspec.json.encode(msgspec.structs.replace(stored, bad=bad))
    while len(value) > _BYTES_MAX and bad:
        bad = bad[: len(bad) // 2]
        value = msgspec.json.encode(msgspec.structs.replace(stored, bad=bad))
    return value


def _shorter(bad: Iterable[KnownFault]) -> tuple[KnownFault, ...]:
    alike: dict[tuple[vocabulary.AlertKind, str, str], list[str]] = {}
    for fault in bad:
        alike.setdefault((fault.kind, fault.resource, fault.why[:_WHY_SHORT]), []).extend(fault.ids)
    return tuple(
        KnownFault(*group, tuple(ids[at : at + _IDS_EACH]))
        for group, ids in alike.items()
        for at in range(0, len(ids), _IDS_EACH)
    )


def decode(value: bytes) -> Snapshot:
    """Return the saved state. Raises ValueError if it cannot be used, or is of another version.

    The state is also rejected if one of its alerts cannot be published again: such an alert would
    end this process after every restart.
    """
    try:
        stored = _DECODER.decode(value)
    except codec.UNREADABLE as error:
        raise ValueError(str(error)) from None
    if stored.v != VERSION:
        raise ValueError(f"the state has version {stored.v}, expected {VERSION}")
    watched = stored.watched
    if watched is not None and vocabulary.watched_plugin(watched.name) != stored.plugin:
        raise ValueError(f"{stored.plugin} is not the plugin of {watched.name}")
    for alert in (*stored.firing, *stored.unpublished_alerts):
        if not alert.evidence:
            raise ValueError("an alert has no evidence")
        alerts.changed(alert, node=stored.node, plugin=stored.plugin, runbook_url="", leader=0)
    for time in (stored.since, stored.remedied, *stored.remedies):
        if time is not None:
            facts.check_time("state", time)
    return _sharing(stored)


def _sharing(stored: Snapshot) -> Snapshot:
    """Let plugins with equal verdicts, as nearly all are, share one copy: 0.6 KiB each."""
    rule, evidence, resources, accused = _shared(
        (stored.rule, stored.evidence, stored.resources, stored.accused)
    )
    return msgspec.structs.replace(
        stored, rule=rule, evidence=evidence, resources=resources, accused=accused
    )


@functools.lru_cache(maxsize=1024)
def _shared(verdict: _Verdict) -> _Verdict:
    return verdict
