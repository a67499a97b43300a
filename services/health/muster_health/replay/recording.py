"""Pure: A recording: all that the detector took in and asked, line by line, to be judged anew.

Beats are stored nowhere else, and without them nobody can tell what another policy would have made
of a night. Each line is `{"t": seconds of the receiver's clock, "k": kind, "v": input}`. A header
says which policy was in force; there is one at the start of each file and of each process.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from muster import vocabulary
from muster_health.fleet import fleet_alerts
from muster_health.model import alerts, config, signals, snapshot

VERSION: Final = 1


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Who recorded, under which policy. `at_zero` is UTC at second 0 of its clock.

    `begins` is that a process began; else it goes on in another file. `sees` tells whether it had
    NATS, and `leads` whether it led: a file may begin in the middle.
    """

    v: int = VERSION
    at_zero: datetime
    begins: bool = True
    sees: bool
    leads: bool = True
    has_cluster: bool
    detection: config.Detection
    bounds: config.Bounds


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that was told: the recording can be held to it."""

    alert: vocabulary.AlertChanged


class _Reported(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    event: msgspec.Raw
    instance: str
    sequence: int
    position: int


class _Line(msgspec.Struct, frozen=True):
    t: float
    k: str
    v: msgspec.Raw


Entry = Header | Told | signals.Probe | signals.AskCluster | signals.Input
_SIMPLE: Final[tuple[type[Entry], ...]] = (
    Header,
    Told,
    signals.Probe,
    signals.AskCluster,
    signals.Beat,
    signals.ProbeAnswered,
    signals.ProbeFailed,
    signals.ProbeInconclusive,
    signals.BusLost,
    signals.BusBack,
    signals.Restored,
    signals.Connected,
    signals.Disconnected,
    signals.ServerEvent,
    signals.ClusterAnswered,
    signals.ExpectedNodes,
    signals.NodeOffers,
    signals.Leadership,
    signals.ClockStalled,
    signals.Remediated,
)
_LINE: Final = msgspec.json.Decoder(_Line)
_REPORTED: Final = msgspec.json.Decoder(_Reported)
_DECODERS: Final = {kind.__name__: msgspec.json.Decoder(kind) for kind in _SIMPLE}
_EVENTS: Final = {event.TYPE: msgspec.json.Decoder(event) for event in vocabulary.EVENTS}


class NotARecording(ValueError):
    """A line that says nothing; the text says why."""


def key_of(state: snapshot.Snapshot) -> str:
    """Return what a state is remembered under."""
    if state.node == vocabulary.FLEET:
        return fleet_alerts.KEY
    return snapshot.key_of(state.node, state.plugin)


def encode(t: float, entry: Entry) -> Iterator[bytes]:
    """Give the lines for what was taken in at `t`; many beats at once are a line each."""
    match entry:
        case signals.Beats(heartbeats=beats):
            for beat in beats:
                yield _encoded(t, "Beat", signals.Beat(heartbeat=beat))
        case signals.FromPlugin():
            reported = _Reported(
                type=entry.event.TYPE,
                event=msgspec.Raw(msgspec.json.encode(entry.event)),
                instance=entry.instance,
                sequence=entry.sequence,
                position=entry.position,
            )
            yield _encoded(t, "FromPlugin", reported)
        case _:
            yield _encoded(t, type(entry).__name__, entry)


def decode(line: bytes) -> tuple[float, Entry]:
    """Return when a line was written, and what it says. Raises NotARecording."""
    try:
        found = _LINE.decode(line)
        if found.k == "FromPlugin":
            return found.t, _reported(_REPORTED.decode(found.v))
        entry = _DECODERS[found.k].decode(found.v)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotARecording(str(error)) from None
    except KeyError as error:
        raise NotARecording(f"nothing known is called {error}") from None
    if isinstance(entry, Header) and entry.v != VERSION:
        raise NotARecording(f"recorded as v{entry.v}, and this is v{VERSION}")
    return found.t, entry


def _reported(found: _Reported) -> signals.FromPlugin:
    return signals.FromPlugin(
        event=_EVENTS[found.type].decode(found.event),
        instance=found.instance,
        sequence=found.sequence,
        position=found.position,
    )


def _encoded(t: float, kind: str, value: object) -> bytes:
    return (
        msgspec.json.encode(_Line(round(t, 6), kind, msgspec.Raw(msgspec.json.encode(value))))
        + b"\n"
    )


_NEAR: Final = timedelta(seconds=60)
_SLACK: Final = timedelta(seconds=5)
_ANY: Final = frozenset(vocabulary.AlertKind)
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(slots=True, kw_only=True)
class Episode:
    """One alert from its first telling to its end."""

    alert: vocabulary.AlertChanged
    fired_at: datetime
    resolved_at: datetime | None = None
    kinds: frozenset[vocabulary.AlertKind] = frozenset()
    """All that it was called."""

    def __post_init__(self) -> None:
        """Begin with the first name."""
        self.kinds |= {self.alert.kind}

    @property
    def subject(self) -> tuple[str, str, str]:
        """What it is about."""
        return self.alert.node, self.alert.plugin, self.alert.resource


class Episodes:
    """Alerts as they are told, one after another, become episodes."""

    def __init__(self, zero: datetime) -> None:
        self.all: list[Episode] = []
        self._zero = zero
        self._open: dict[str, Episode] = {}

    def take(self, alert: vocabulary.AlertChanged, at: float) -> None:
        """Take that an alert fires, changes or is resolved."""
        when = self._zero + timedelta(seconds=at)
        known = self._open.get(alert.fingerprint)
        if (
            known is not None
            and alert.change == 0
            and alert.starts_at != known.alert.starts_at
            and when - known.fired_at > _NEAR
        ):
            # another one told its end; what is told anew soon was dropped when a lead ended
            known.resolved_at, known = when, None
        if alert.state is vocabulary.AlertState.RESOLVED:
            if known is not None:
                known.resolved_at = when
                del self._open[alert.fingerprint]
        elif known is None and alert.change:
            pass  # told before the recording begins, or by another
        elif known is None:
            self._open[alert.fingerprint] = Episode(alert=alert, fired_at=when)
            self.all.append(self._open[alert.fingerprint])
        else:
            # what it is about may change while it fires
            known.alert = alert
            known.kinds |= {alert.kind}


@dataclass(kw_only=True)
class Tape:
    """A recording, read: entries by virtual time, in seconds from `zero`."""

    zero: datetime
    entries: list[tuple[float, Entry]]

    @property
    def told(self) -> list[Episode]:
        """The alerts that were told then."""
        found = Episodes(self.zero)
        for at, entry in self.entries:
            if isinstance(entry, Told):
                found.take(entry.alert, at)
        return found.all

    @property
    def inherited(self) -> list[Episode]:
        """The alerts that were remembered, each at its begin, by whatever name.

        Another may have told them.
        """
        return [
            Episode(
                alert=alert,
                fired_at=alert.starts_at,
                resolved_at=alert.starts_at,
                kinds=_ANY,
            )
            for _, entry in self.entries
            if isinstance(entry, signals.Restored)
            for alert in _firing(entry)
        ]

    @property
    def idle(self) -> list[tuple[datetime, datetime]]:
        """When whoever recorded did not lead, and so told nobody."""
        found: list[tuple[datetime, datetime]] = []
        since: float | None = None
        for at, entry in self.entries:
            match entry:
                case Header(leads=False) | signals.Leadership(revision=None):
                    since = at if since is None else since
                case signals.Leadership():
                    if since is not None:
                        found.append((self._utc(since), self._utc(at)))
                    since = None
                case _:
                    pass
        if since is not None:
            found.append((self._utc(since), _NEVER))
        return found

    def _utc(self, at: float) -> datetime:
        return self.zero + timedelta(seconds=at)


def tape(lines: Iterable[tuple[float, Entry]]) -> Tape:
    """Return a recording on one clock. Raises NotARecording where it does not begin with a header.

    Each process counted by a clock of its own; UTC holds them together.
    """
    first: Header | None = None
    offset_s = 0.0
    entries: list[tuple[float, Entry]] = []
    for t, entry in lines:
        if isinstance(entry, Header) and (first is None or entry.begins):
            first = first or entry
            offset_s = (entry.at_zero - first.at_zero).total_seconds()
        if first is None:
            raise NotARecording("it does not begin with a header")
        # a wall clock that was set back must not turn time round
        at = max(t + offset_s, entries[-1][0] if entries else t + offset_s)
        entries.append((at, entry))
    if first is None:
        raise NotARecording("it is empty")
    return Tape(zero=first.at_zero, entries=entries)


def matched(
    one: Sequence[Episode], other: Sequence[Episode]
) -> tuple[list[tuple[Episode, Episode]], list[Episode], list[Episode]]:
    """Return the alerts of both that are about the same at about the same time, and the others."""
    left = list(other)
    both: list[tuple[Episode, Episode]] = []
    alone: list[Episode] = []
    for episode in one:
        near = [found for found in left if _same(episode, found)]
        if not near:
            alone.append(episode)
            continue
        best = min(near, key=lambda found: abs(found.fired_at - episode.fired_at))
        left.remove(best)
        both.append((episode, best))
    return both, alone, left


def held_against(recorded: Tape, raised: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """Return what was told and is not among what was raised, and what was raised and not told.

    Whoever recorded tells only what another told where it remembers that; of what was raised and
    over while it did not lead, it knows nothing.
    """
    _, missed, more = matched(recorded.told, raised)
    idle = recorded.idle
    more = [one for one in more if not any(_is_within(one, gap) for gap in idle)]
    _, more, _ = matched(more, recorded.inherited)
    return missed, more


def _is_within(one: Episode, gap: tuple[datetime, datetime]) -> bool:
    begin, end = gap
    # two that watch the same do not see it end at the same moment
    return begin <= one.fired_at and (one.resolved_at or _NEVER) - _SLACK <= end


def _same(one: Episode, other: Episode) -> bool:
    if one.subject != other.subject or not one.kinds & other.kinds:
        return False
    first, last = sorted((one, other), key=lambda episode: episode.fired_at)
    overlap = first.resolved_at is None or last.fired_at <= first.resolved_at
    return overlap or last.fired_at - first.fired_at <= _NEAR


def _firing(known: signals.Restored) -> Iterator[vocabulary.AlertChanged]:
    state = known.state
    for alert in state.firing:
        yield alerts.changed(
            alert, node=state.node, plugin=state.plugin, runbook_url="", leader=state.leader
        )
