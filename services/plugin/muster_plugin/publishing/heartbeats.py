"""Pure: From what the plugin knows about itself to its heartbeat."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.kubelet import resource_status

_DIGITS: Final = 2
_NEVER: Final = -1.0
_TEXTS_MAX: Final = (300, 100, 30, 10)
"""So long may a text be, if there is room, and never empty; the whole text is in the event."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the process lives."""

    node: str
    plugin: str
    instance: str
    boot: str
    version: str
    config_hash: str
    interval_s: float
    started_at: float


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the process at the moment of a beat; `kubelet` is its kubelet.sock."""

    seq: int
    phase: vocabulary.Phase
    kubelet: str
    checked_at: Mapping[str, float]
    lag_s: float
    reconnects: int
    problems: tuple[str, ...] = ()


def heartbeat(
    who: Identity,
    vitals: Vitals,
    resources: Iterable[resource_status.ResourceState],
    *,
    now: float,
    wall: float,
    bytes_max: int,
) -> vocabulary.Heartbeat:
    """Make a beat: `now` in the monotonic seconds of all the times given, `wall` for people.

    One of more than `bytes_max` bytes would be believed by nobody, so that many long texts are cut:
    the numbers tell whether all is well, and the events tell all of why not.
    """
    known = [*resources]
    for text_max in _TEXTS_MAX:
        beat = _heartbeat(who, vitals, known, now=now, wall=wall, text_max=text_max)
        if len(msgspec.json.encode(beat)) <= bytes_max:
            break
    return beat


def first_beat_s(node: str, interval_s: float) -> float:
    """Return when, after the start, a node beats first: spreads a fleet over the interval."""
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return share * interval_s


def _heartbeat(
    who: Identity,
    vitals: Vitals,
    resources: Iterable[resource_status.ResourceState],
    *,
    now: float,
    wall: float,
    text_max: int,
) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node=who.node,
        plugin=who.plugin,
        instance=who.instance,
        boot=who.boot,
        version=who.version,
        config_hash=who.config_hash,
        seq=vitals.seq,
        interval_s=who.interval_s,
        uptime_s=_age(who.started_at, now),
        wall=round(wall, _DIGITS),
        phase=vitals.phase,
        kubelet_socket=vitals.kubelet,
        resources=tuple(_resource(state, now, text_max) for state in resources),
        checkers={name: _age(at, now) for name, at in vitals.checked_at.items()},
        loop_lag_ms=round(vitals.lag_s * 1000, _DIGITS),
        reconnects=vitals.reconnects,
        problems=tuple(problem[:text_max] for problem in vitals.problems),
    )


def _resource(
    state: resource_status.ResourceState, now: float, text_max: int
) -> vocabulary.ResourceBeat:
    probe = state.probe
    return vocabulary.ResourceBeat(
        name=state.name,
        registered_age_s=_age(state.registered_at, now),
        streams=state.streams,
        last_send_age_s=_age(state.sent_at, now),
        registrations=state.registrations,
        probe_ok=probe is not None and probe.ok,
        probe_ms=round(probe.seconds * 1000, _DIGITS) if probe else 0.0,
        probe_age_s=_age(probe.at if probe else None, now),
        devices=state.devices,
        healthy=state.healthy,
        allocated=state.allocated,
        problem=state.problem[:text_max],
        short=state.short[:text_max],
        apart=state.apart[:text_max],
        degraded=state.conditions.get(vocabulary.Condition.DEGRADED, 0),
        away=state.away,
        unmonitored=state.conditions.get(vocabulary.Condition.UNMONITORED, 0),
    )


def _age(at: float | None, now: float) -> float:
    return _NEVER if at is None else round(max(0.0, now - at), _DIGITS)
