"""Pure: A recording, read: on one clock, with the alerts that were told then, and who led."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from muster import vocabulary
from muster_health.model import alerts, signals
from muster_health.replay import recording

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
    entries: list[tuple[float, recording.Entry]]

    @property
    def told(self) -> list[Episode]:
        """The alerts that were told then."""
        found = Episodes(self.zero)
        for at, entry in self.entries:
            if isinstance(entry, recording.Told):
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
                case recording.Header(leads=False) | signals.Leadership(revision=None):
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


def tape(lines: Iterable[tuple[float, recording.Entry]]) -> Tape:
    """Return a recording on one clock. Raises NotARecording where it does not begin with a header.

    Each process counted by a clock of its own; UTC holds them together.
    """
    first: recording.Header | None = None
    offset_s = 0.0
    entries: list[tuple[float, recording.Entry]] = []
    for t, entry in lines:
        if isinstance(entry, recording.Header) and (first is None or entry.begins):
            first = first or entry
            offset_s = (entry.at_zero - first.at_zero).total_seconds()
        if first is None:
            raise recording.NotARecording("it does not begin with a header")
        # a wall clock that was set back must not turn time round
        at = max(t + offset_s, entries[-1][0] if entries else t + offset_s)
        entries.append((at, entry))
    if first is None:
        raise recording.NotARecording("it is empty")
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
