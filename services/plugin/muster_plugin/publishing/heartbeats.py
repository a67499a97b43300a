"""Pure: builds a heartbeat from the status of the process and of its resources."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from muster import vocabulary
from muster_plugin.kubelet import registration_model

_DIGITS: Final = 2
_NEVER: Final = -1.0
_TEXTS_MAX: Final = (300, 100, 30, 10)
"""Lengths that texts are cut to, until the heartbeat fits; the events have the whole texts."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of the process, which does not change while it runs."""

    node: str
    plugin: str
    instance: str
    boot: str
    version: str
    interval_s: float
    started_at: float


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the process at the time of a heartbeat; `kubelet` identifies its kubelet.sock."""

    seq: int
    phase: vocabulary.Phase
    kubelet: str
    checked_at: Mapping[str, float]
    lag_s: float
    reconnects: int
    config_hash: str
    problems: tuple[str, ...] = ()


def heartbeat(
    identity: Identity,
    process: ProcessStatus,
    resources: Iterable[registration_model.ResourceStatus],
    *,
    now: float,
    wall: float,
    bytes_max: int,
) -> vocabulary.Heartbeat:
    """Return a heartbeat; `now` is monotonic like all other times, `wall` is the time of day.

    Its texts are cut until it has at most `bytes_max` bytes, because consumers reject larger ones:
    the numbers show whether all is well, and the events have the full reasons.
    """
    statuses = [*resources]
    for text_max in _TEXTS_MAX:
        message = _heartbeat(identity, process, statuses, now=now, wall=wall, text_max=text_max)
        if len(msgspec.json.encode(message)) <= bytes_max:
            break
    return message


def first_heartbeat_s(node: str, interval_s: float) -> float:
    """Return the delay of a node's first heartbeat, which spreads a fleet over the interval."""
    share = int.from_bytes(hashlib.sha256(node.encode()).digest()[:4]) / 2**32
    return share * interval_s


def _heartbeat(
    identity: Identity,
    process: ProcessStatus,
    resources: Iterable[registration_model.ResourceStatus],
    *,
    now: float,
    wall: float,
    text_max: int,
) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node=identity.node,
        plugin=identity.plugin,
        instance=identity.instance,
        boot=identity.boot,
        version=identity.version,
        config_hash=process.config_hash,
        seq=process.seq,
        interval_s=identity.interval_s,
        uptime_s=_age(identity.started_at, now),
        wall=round(wall, _DIGITS),
        phase=process.phase,
        kubelet_socket=process.kubelet,
        resources=tuple(_resource(state, now, text_max) for state in resources),
        checkers={name: _age(at, now) for name, at in process.checked_at.items()},
        loop_lag_ms=round(process.lag_s * 1000, _DIGITS),
        reconnects=process.reconnects,
        problems=tuple(problem[:text_max] for problem in process.problems),
    )


def _resource(
    state: registration_model.ResourceStatus, now: float, text_max: int
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
        short=state.shortage[:text_max],
        mismatch=state.mismatch[:text_max],
        degraded=state.conditions.get(vocabulary.Condition.DEGRADED, 0),
        kubelet_away=state.waits_for_kubelet,
        unmonitored=state.conditions.get(vocabulary.Condition.UNMONITORED, 0),
    )


def _age(at: float | None, now: float) -> float:
    return _NEVER if at is None else round(max(0.0, now - at), _DIGITS)
