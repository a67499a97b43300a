"""Replaying a recording under its own policy raises the alerts that were published."""

from collections.abc import Iterable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import vocabulary
from muster_health.model import config, signals
from muster_health.replay import player, recording
from tests.worlds import detector_fleet

NODES = ("a", "b", "c")


class Recorded(detector_fleet.Service):
    """A health process whose inputs are recorded, as `recorder` does."""

    world: "Night"

    def __init__(self, world: "Night", leader: int | None) -> None:
        self.has_begun = False
        self.slot = world.free_slot()
        super().__init__(world, leader)

    def feed(self, event: signals.Input) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.write(
                recording.Header(
                    at_zero=detector_fleet.ZERO + timedelta(seconds=self.zero),
                    sees=False,
                    leads=False,
                    has_cluster=self.world.has_cluster,
                    detection=detector_fleet.SETTINGS,
                    bounds=config.Bounds(),
                )
            )
        if not self.crashed:
            self.write(event)
        super().feed(event)

    def do(self, outs: Iterable[signals.Output]) -> None:
        outputs = list(outs)
        for output in outputs:
            match output:
                case signals.Probe() | signals.AskCluster():
                    self.write(output)
                case signals.Publish(event=vocabulary.AlertChanged() as alert):
                    self.write(recording.PublishedAlert(alert=alert))
                case signals.Noted(note=signals.Note.STALLED, seconds=seconds):
                    self.write(signals.ClockStalled(seconds=seconds))
                case _:
                    pass
        super().do(outputs)

    def write(self, entry: recording.Entry) -> None:
        self.world.lines[self.slot].append((self.clock, entry))


class Night(detector_fleet.World):
    """A world with several health services; after a crash, the next one continues the recording."""

    def __init__(self, *nodes: str, has_cluster: bool = True, services: int = 1) -> None:
        self.lines: list[list[tuple[float, recording.Entry]]] = [[] for _ in range(services)]
        super().__init__(*nodes, has_cluster=has_cluster, services=services)

    def free_slot(self) -> int:
        used = {service.slot for service in self.services if isinstance(service, Recorded)}
        return min(set(range(len(self.lines))) - used)

    def start(self, *, leads: bool) -> None:
        self.boots += 1
        self._revision += leads
        self.services.append(Recorded(self, self._revision if leads else None))


def differences(night: Night) -> list[str]:
    """Return alerts that were published and not replayed, and the reverse."""
    problems: list[str] = []
    for lines in night.lines:
        recorded = recording.read(lines)
        missing, additional = recording.differences(recorded, player.play(recorded).episodes)
        problems += [f"not replayed: {e.alert.node} {e.alert.kind}" for e in missing]
        problems += [f"not published: {e.alert.node} {e.alert.kind}" for e in additional]
    return problems


def running(*, has_cluster: bool = True, services: int = 1) -> Night:
    night = Night(*NODES, has_cluster=has_cluster, services=services)
    night.run(20.0)
    return night


STEPS = ("kill", "freeze", "cut", "mend", "part", "stop", "down", "crash", "outage", "lead", "drop")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(STEPS), st.sampled_from(NODES), st.sampled_from((0.7, 6.0, 25.0, 70.0))
        ),
        max_size=14,
    ),
    has_cluster=st.booleans(),
    services=st.integers(1, 2),
)
def test_replaying_any_night_raises_what_was_published(
    steps: list[tuple[str, str, float]],
    has_cluster: bool,  # noqa: FBT001  # a property's argument
    services: int,
) -> None:
    night = running(has_cluster=has_cluster, services=services)
    for step, node, seconds in steps:
        match step:
            case "crash":
                night.crash(seconds)
            case "outage":
                night.outage(seconds)
            case "lead":
                night.lose_lead()
                night.lead_again()
            case "drop":
                night.crash_after(int(seconds))
            case _:
                getattr(night, step)(node)
        night.run(seconds)
    night.run(200.0)
    assert differences(night) == []


@pytest.mark.parametrize("away_s", [0.0, 5.0, 60.0, 1000.0])
def test_a_restart_of_health_does_not_count_as_silence(away_s: float) -> None:
    night = running()
    night.kill("a")
    night.run(40.0)
    for _ in range(4):
        night.crash(away_s)
        night.run(60.0)
    assert differences(night) == []
    published = recording.read(night.lines[0]).published
    assert [(episode.alert.node, episode.alert.kind) for episode in published] == [
        ("a", vocabulary.AlertKind.PLUGIN_DOWN)
    ]
