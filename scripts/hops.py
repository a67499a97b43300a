"""Adapter for the profiler: counts the health modules that a heartbeat and an event pass through.

    python scripts/hops.py

`sys.setprofile` counts the modules of muster_health in which a function is entered, from the
detector's `receive` to its return. For a batch of heartbeats of healthy plugins, a module counts if
it is entered for each heartbeat; modules that are entered once per batch are printed separately.
The event is a device that becomes Unhealthy, counted until its effects and its next deadline. The
modules that publish its alert are printed separately, and so are the modules of `model`, which are
data that the others exchange.
"""

import collections
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from types import FrameType
from typing import Final

from muster import vocabulary
from muster.vocabulary import Health
from muster_health.fleet import detector
from muster_health.model import config, signals

HEARTBEAT_MAX: Final = 5
EVENT_MAX: Final = 8
_BATCH: Final = 100
_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
_GPU: Final = "nvidia.com/gpu"
_ROOT: Final = "muster_health."
_PUBLISH: Final = "_publish_now"
"""The detector's method that publishes changes of a plugin."""


def heartbeat() -> tuple[list[str], list[str]]:
    """Return the modules that each heartbeat passes through, and those entered once per batch."""
    watched = _detector()
    counted, _ = _entered(lambda: watched.receive(_heartbeats(3), 15.0))
    each = sorted(module for module, times in counted.items() if times >= _BATCH)
    return each, sorted(counted.keys() - set(each))


def event() -> tuple[list[str], list[str]]:
    """Return the modules that an event passes through, and the modules that publish its alert."""
    watched = _detector()
    turned = vocabulary.DeviceHealthChanged(
        node="node-0",
        at=_AT,
        plugin="device-plugin",
        resource=_GPU,
        device_id="GPU-0",
        health=Health.UNHEALTHY,
        reason="XID 79",
    )
    reported = signals.FromPlugin(event=turned, instance="one", sequence=1, position=1)
    outs: list[signals.Output] = []
    counted, published = _entered(lambda: outs.extend(watched.receive(reported, 16.0)))
    assert any(isinstance(out, signals.Publish) for out in outs), "no alert was opened"
    data = {module for module in counted if module.startswith("model.")}
    return sorted(counted.keys() - data), sorted(published.keys() - data)


def _detector() -> detector.Detector:
    """Return a detector that has published verdicts on healthy plugins."""
    made = detector.Detector(config.Detection(), runbook_url="", at_zero=_AT)
    made.receive(signals.BusBack(at=_AT), 0.0)
    for turn in (1, 2):
        made.receive(_heartbeats(turn), 5.0 * turn)
        while (due := made.next_deadline()) is not None and due <= 5.0 * turn + 4.0:
            made.tick(max(due, 5.0 * turn))
    return made


def _heartbeats(turn: int) -> signals.HeartbeatsArrived:
    resource = vocabulary.ResourceBeat(
        name=_GPU, streams=1, probe_ok=True, probe_age_s=1.0, devices=8, healthy=8
    )
    return signals.HeartbeatsArrived(
        heartbeats=[
            vocabulary.Heartbeat(
                node=f"node-{number}",
                plugin="device-plugin",
                instance="one",
                seq=turn,
                interval_s=5.0,
                uptime_s=5.0 * turn,
                wall=_AT.timestamp() + 5.0 * turn,
                resources=(resource,),
            )
            for number in range(_BATCH)
        ]
    )


def _entered(act: Callable[[], object]) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many times `act` enters each module, and how many times while publishing."""
    counted: collections.Counter[str] = collections.Counter()
    publishing: collections.Counter[str] = collections.Counter()
    publishers: list[FrameType] = []

    def count(frame: FrameType, what: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(_ROOT):
            return
        if what == "call":
            if frame.f_code.co_name == _PUBLISH and not publishers:
                publishers.append(frame)
            (publishing if publishers else counted)[module.removeprefix(_ROOT)] += 1
        elif what == "return" and publishers and frame is publishers[0]:
            publishers.clear()

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return dict(counted), dict(publishing)


def main() -> int:
    """Print both counts; return 1 if one exceeds its limit."""
    each, batch = heartbeat()
    visited, published = event()
    print(f"heartbeat: {len(each)} modules, at most {HEARTBEAT_MAX}: {', '.join(each)}")
    print(f"    once for the batch: {', '.join(batch)}")
    print(f"event: {len(visited)} modules, at most {EVENT_MAX}: {', '.join(visited)}")
    print(f"    to publish its alert: {', '.join(published)}")
    return int(len(each) > HEARTBEAT_MAX or len(visited) > EVENT_MAX)


if __name__ == "__main__":
    sys.exit(main())
