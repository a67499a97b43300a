"""Pure: A recording: all that the detector took in and asked, line by line, to be judged anew.

Beats are stored nowhere else, and without them nobody can tell what another policy would have made
of a night. Each line is `{"t": seconds of the receiver's clock, "k": kind, "v": input}`. A header
says which policy was in force; there is one at the start of each file and of each process.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

import msgspec

from muster import vocabulary
from muster_health.fleet import fleet_alerts
from muster_health.model import config, signals, snapshot
from muster_health.plugin import tracked_plugin

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
    return tracked_plugin.key_of(state.node, state.plugin)


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
