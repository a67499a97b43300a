"""The alerts that the notifier raises itself: when they begin, change and end."""

import asyncio
import datetime as dt

from muster import codec, vocabulary
from muster.vocabulary import AlertState
from muster_notifier import monitor
from muster_notifier.routing import notifications

T0 = dt.datetime(2026, 1, 1, 12, 0, tzinfo=dt.UTC)


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


class World:
    """The alerts of one notifier process, and the events that it emits."""

    def __init__(self) -> None:
        self.emitted: list[vocabulary.AlertChanged] = []
        self.alerts = monitor.OwnAlerts(self._emit, instance="i", runbook_url="https://r/")

    async def _emit(self, event: codec.CloudEvent) -> None:
        assert isinstance(event.data, vocabulary.AlertChanged)
        self.emitted.append(event.data)

    def count(self, letters: int, *, seconds: float) -> None:
        subjects = [f"muster.dlq.notification.ops.{number}" for number in range(letters)]
        asyncio.run(self.alerts.count_dead_letters(subjects, at=at(seconds)))

    def story(self) -> list[tuple[AlertState, str, dt.datetime, dt.datetime | None]]:
        return [(a.state, a.evidence[0].observed, a.starts_at, a.ends_at) for a in self.emitted]


def test_an_own_alert_is_emitted_when_it_changes_and_its_end_once_with_its_start() -> None:
    world = World()
    for letters, seconds in ((0, 0), (2, 10), (2, 20), (3, 30), (0, 130), (0, 140), (1, 150)):
        world.count(letters, seconds=seconds)
    assert world.story() == [
        (AlertState.RESOLVED, "no dead letters", at(0), at(0)),
        (AlertState.FIRING, "2 dead letters", at(10), None),
        (AlertState.FIRING, "3 dead letters", at(10), None),
        (AlertState.RESOLVED, "no dead letters", at(10), at(130)),
        (AlertState.FIRING, "1 dead letter", at(150), None),
    ]


def test_dead_letters_about_the_alert_are_named_but_do_not_keep_it_firing() -> None:
    world = World()
    about = "muster.dlq.notification.ops.about-dead.1"
    for subjects in (["muster.dlq.notification.ops.0123.1", about], [about]):
        asyncio.run(world.alerts.count_dead_letters(subjects, at=at(0)))
    assert world.story() == [
        (AlertState.FIRING, "1 dead letter, and 1 about this alert", at(0), None),
        (AlertState.RESOLVED, "no dead letters", at(0), at(0)),
    ]


def test_the_start_of_an_own_alert_survives_a_restart() -> None:
    before, after, late = World(), World(), World()
    before.count(2, seconds=10)
    (fires,) = before.alerts.firing
    sent = notifications.create(
        after="",
        receiver="ops",
        group="g",
        labels={"kind": "dead_letters"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[fires],
        resolved=[],
        send_resolved=True,
        at=at(40),
    )
    stored = notifications.encode_entry(notifications.entry_of(sent, attempts=1))
    for world in (after, late):
        world.alerts.restore([notifications.decode_entry(stored)])
    after.count(2, seconds=60)
    after.count(0, seconds=130)
    late.count(0, seconds=130)
    end = (AlertState.RESOLVED, "no dead letters", at(10), at(130))
    assert after.story() == [(AlertState.FIRING, "2 dead letters", at(10), None), end]
    assert late.story() == [end]
    assert after.alerts.firing == ()
