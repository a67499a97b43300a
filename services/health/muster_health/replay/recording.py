"""Pure: defines and reads recordings of the detector's inputs, queries and alerts.

Heartbeats are stored nowhere else, and without them another policy could not be replayed. Each line
is `{"t": seconds on the writer's clock, "k": kind, "v": entry}`. A header contains the current
policy; each file and each process begins with a header.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import msgspec

from muster import codec, vocabulary
from muster.vocabulary import facts
from muster_health.fleet import fleet_alerts
from muster_health.model import alerts, config, limits, signals, snapshot

VERSION: Final = 1
_CLOCK_MAX_S: Final = 1e10
_SAME_ALERT: Final = timedelta(seconds=60)
_RESOLVED_SLACK: Final = timedelta(seconds=5)
"""How long after a period an alert may be resolved and still count as within the period."""
_ANY_KIND: Final = frozenset(vocabulary.AlertKind)
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Which process recorded, under which policy; `at_zero` is UTC at second 0 of its clock.

    `begins` means that the process has just started; otherwise it continues in a new file. `sees`
    means that it was connected to NATS at that time, `leads` that it was the leader.
    """

    v: int = VERSION
    at_zero: datetime
    begins: bool = True
    sees: bool
    leads: bool = True
    has_cluster: bool
    detection: config.Detection
    bounds: config.Bounds

    def __post_init__(self) -> None:
        """Refuse a time that could not be converted to other time zones."""
        facts.check_time("at_zero", self.at_zero)


class PublishedAlert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was published; a replay under the same policy must raise it, too."""

    alert: vocabulary.AlertChanged


class _Reported(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    event: msgspec.Raw
    instance: str
    sequence: int
    position: int


class _Line(msgspec.Struct, frozen=True):
    t: Annotated[float, msgspec.Meta(ge=-_CLOCK_MAX_S, le=_CLOCK_MAX_S)]
    k: str
    v: msgspec.Raw


Entry = Header | PublishedAlert | signals.Probe | signals.AskCluster | signals.Input
_KINDS: Final[Mapping[str, type[Entry]]] = {
    "Header": Header,
    "Told": PublishedAlert,
    "Probe": signals.Probe,
    "AskCluster": signals.AskCluster,
    "Beat": signals.HeartbeatArrived,
    "ProbeAnswered": signals.ProbeAnswered,
    "ProbeFailed": signals.ProbeFailed,
    "ProbeInconclusive": signals.ProbeInconclusive,
    "BusLost": signals.BusLost,
    "BusBack": signals.BusBack,
    "Restored": signals.Restored,
    "Connected": signals.Connected,
    "Disconnected": signals.Disconnected,
    "ServerEvent": signals.ServerEvent,
    "ClusterAnswered": signals.ClusterAnswered,
    "ClusterObserved": signals.ClusterObserved,
    "ExpectedNodes": signals.ExpectedNodes,
    "NodeOffers": signals.NodeOffers,
    "NodesListed": signals.NodesListed,
    "Leadership": signals.Leadership,
    "ClockStalled": signals.ClockStalled,
    "NodeNoisy": limits.NodeNoisy,
    "StreamsChecked": signals.StreamsChecked,
    "Remediated": signals.Remediated,
}
"""The names of entries in a recording; they do not depend on the names of classes."""
_REPORT: Final = "FromPlugin"
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_LINE: Final = msgspec.json.Decoder(_Line)
_REPORTED: Final = msgspec.json.Decoder(_Reported)
_DECODERS: Final = {name: msgspec.json.Decoder(kind) for name, kind in _KINDS.items()}
_EVENTS: Final = {event.TYPE: msgspec.json.Decoder(event) for event in vocabulary.EVENTS}


class UnreadableRecording(ValueError):
    """A line or the whole file is not a valid recording; the message gives the reason."""


def key_of(state: snapshot.Snapshot) -> str:
    """Return the key under which a state is saved."""
    if state.node == vocabulary.FLEET:
        return fleet_alerts.KEY
    return snapshot.key_of(state.node, state.plugin)


def encode(t: float, entry: Entry) -> Iterator[bytes]:
    """Yield the lines for an entry at time `t`; each of several heartbeats has its own line."""
    match entry:
        case signals.HeartbeatsArrived(heartbeats=heartbeats):
            for heartbeat in heartbeats:
                beat = signals.HeartbeatArrived(heartbeat=heartbeat)
                yield _encoded(t, _NAMES[signals.HeartbeatArrived], beat)
        case signals.FromPlugin():
            reported = _Reported(
                type=entry.event.TYPE,
                event=msgspec.Raw(msgspec.json.encode(entry.event)),
                instance=entry.instance,
                sequence=entry.sequence,
                position=entry.position,
            )
            yield _encoded(t, _REPORT, reported)
        case _:
            yield _encoded(t, _NAMES[type(entry)], entry)


def decode(line: bytes) -> tuple[float, Entry]:
    """Return the time and the entry of a line. Raises UnreadableRecording."""
    try:
        fields = _LINE.decode(line)
        if fields.k == _REPORT:
            return fields.t, _report(_REPORTED.decode(fields.v))
        entry = _DECODERS[fields.k].decode(fields.v)
    except codec.UNREADABLE as error:
        raise UnreadableRecording(str(error)) from None
    except KeyError as error:
        raise UnreadableRecording(f"unknown kind {error}") from None
    if isinstance(entry, Header) and entry.v != VERSION:
        raise UnreadableRecording(f"the recording has version {entry.v}, expected {VERSION}")
    return fields.t, entry


def _report(reported: _Reported) -> signals.FromPlugin:
    return signals.FromPlugin(
        event=_EVENTS[reported.type].decode(reported.event),
        instance=reported.instance,
        sequence=reported.sequence,
        position=reported.position,
    )


def _encoded(t: float, kind: str, value: object) -> bytes:
    line = _Line(round(t, 6), kind, msgspec.Raw(msgspec.json.encode(value)))
    return msgspec.json.encode(line) + b"\n"


# a recording as a whole


@dataclass(slots=True, kw_only=True)
class Episode:
    """One alert, from its first publication to its end."""

    alert: vocabulary.AlertChanged
    fired_at: datetime
    resolved_at: datetime | None = None
    kinds: frozenset[vocabulary.AlertKind] = frozenset()
    """All kinds that the alert has had."""

    def __post_init__(self) -> None:
        """Add the alert's first kind to `kinds`."""
        self.kinds |= {self.alert.kind}

    @property
    def subject(self) -> tuple[str, str, str]:
        """The node, the plugin and the resource of the alert."""
        return self.alert.node, self.alert.plugin, self.alert.resource


class EpisodeTracker:
    """Builds episodes from alerts, in the order of their publication."""

    def __init__(self, zero: datetime) -> None:
        self.all: list[Episode] = []
        self._zero = zero
        self._open: dict[str, Episode] = {}

    def add(self, alert: vocabulary.AlertChanged, at: float) -> None:
        """Add an alert that fires, changes or is resolved."""
        when = self._zero + timedelta(seconds=at)
        episode = self._open.get(alert.fingerprint)
        if (
            episode is not None
            and alert.change == 0
            and alert.starts_at != episode.alert.starts_at
            and when - episode.fired_at > _SAME_ALERT
        ):
            # another leader published the end of the previous alert; but soon after its beginning,
            # this is a repetition, because a leader ended before it had saved the alert
            episode.resolved_at, episode = when, None
        if alert.state is vocabulary.AlertState.RESOLVED:
            if episode is not None:
                episode.resolved_at = when
                del self._open[alert.fingerprint]
        elif episode is None and alert.change:
            pass  # the alert began before the recording, or another process published it
        elif episode is None:
            self._open[alert.fingerprint] = Episode(alert=alert, fired_at=when)
            self.all.append(self._open[alert.fingerprint])
        else:
            # the subject of an alert may change while it fires
            episode.alert = alert
            episode.kinds |= {alert.kind}


@dataclass(kw_only=True)
class Recording:
    """A recording in memory: entries by time, in seconds after `zero`."""

    zero: datetime
    entries: list[tuple[float, Entry]]

    @property
    def begin(self) -> datetime:
        """The time of the first entry."""
        return self._utc(self.entries[0][0])

    @property
    def end(self) -> datetime:
        """The time of the last entry."""
        return self._utc(self.entries[-1][0])

    @property
    def published(self) -> list[Episode]:
        """The alerts that were published."""
        tracker = EpisodeTracker(self.zero)
        for at, entry in self.entries:
            if isinstance(entry, PublishedAlert):
                tracker.add(entry.alert, at)
        return tracker.all

    @property
    def restored(self) -> list[Episode]:
        """The alerts in saved state, as episodes without duration; any process may have sent them.

        The kind of these alerts may have changed after they began.
        """
        return [
            Episode(
                alert=alert,
                fired_at=alert.starts_at,
                resolved_at=alert.starts_at,
                kinds=_ANY_KIND,
            )
            for _, entry in self.entries
            if isinstance(entry, signals.Restored)
            for alert in _firing(entry)
        ]

    @property
    def times_not_leading(self) -> list[tuple[datetime, datetime]]:
        """The periods in which the recording process did not lead, so that it published nothing."""
        times: list[tuple[datetime, datetime]] = []
        since: float | None = None
        for at, entry in self.entries:
            match entry:
                case Header(leads=False) | signals.Leadership(revision=None):
                    since = at if since is None else since
                case signals.Leadership():
                    if since is not None:
                        times.append((self._utc(since), self._utc(at)))
                    since = None
                case _:
                    pass
        if since is not None:
            times.append((self._utc(since), _NEVER))
        return times

    def _utc(self, at: float) -> datetime:
        return self.zero + timedelta(seconds=at)


def read(lines: Iterable[tuple[float, Entry]]) -> Recording:
    """Return a recording with one clock. Raises UnreadableRecording if the header is missing.

    Each process has its own clock; UTC relates these clocks to each other.
    """
    first: Header | None = None
    offset_s = 0.0
    entries: list[tuple[float, Entry]] = []
    for t, entry in lines:
        if isinstance(entry, Header) and (first is None or entry.begins):
            first = first or entry
            offset_s = (entry.at_zero - first.at_zero).total_seconds()
        if first is None:
            raise UnreadableRecording("it does not begin with a header")
        # time must not run backwards, even if a wall clock was set back
        at = max(t + offset_s, entries[-1][0] if entries else t + offset_s)
        entries.append((at, entry))
    if first is None:
        raise UnreadableRecording("it is empty")
    return Recording(zero=first.at_zero, entries=entries)


def match(
    ours: Sequence[Episode], theirs: Sequence[Episode]
) -> tuple[list[tuple[Episode, Episode]], list[Episode], list[Episode]]:
    """Return matching pairs (close in time), and the unmatched alerts of both sides."""
    unmatched = list(theirs)
    both: list[tuple[Episode, Episode]] = []
    only_ours: list[Episode] = []
    for episode in ours:
        candidates = [candidate for candidate in unmatched if _is_same(episode, candidate)]
        if not candidates:
            only_ours.append(episode)
            continue
        best = min(candidates, key=lambda candidate: abs(candidate.fired_at - episode.fired_at))
        unmatched.remove(best)
        both.append((episode, best))
    return both, only_ours, unmatched


def differences(
    recorded: Recording, replayed: Sequence[Episode]
) -> tuple[list[Episode], list[Episode]]:
    """Return the alerts that were published but not replayed, and the reverse.

    The reverse leaves out alerts that another leader had published and saved, and alerts that began
    and ended while the recording process was not the leader.
    """
    _, missing, additional = match(recorded.published, replayed)
    times = recorded.times_not_leading
    additional = [
        episode for episode in additional if not any(_is_within(episode, time) for time in times)
    ]
    _, additional, _ = match(additional, recorded.restored)
    return missing, additional


def _is_within(episode: Episode, time: tuple[datetime, datetime]) -> bool:
    begin, end = time
    resolved_at = episode.resolved_at or _NEVER
    return begin <= episode.fired_at and resolved_at - _RESOLVED_SLACK <= end


def _is_same(ours: Episode, theirs: Episode) -> bool:
    if ours.subject != theirs.subject or not ours.kinds & theirs.kinds:
        return False
    first, last = sorted((ours, theirs), key=lambda episode: episode.fired_at)
    overlap = first.resolved_at is None or last.fired_at <= first.resolved_at
    return overlap or last.fired_at - first.fired_at <= _SAME_ALERT


def _firing(restored: signals.Restored) -> Iterator[vocabulary.AlertChanged]:
    state = restored.state
    for alert in state.firing:
        yield alerts.changed(
            alert, node=state.node, plugin=state.plugin, runbook_url="", leader=state.leader
        )
