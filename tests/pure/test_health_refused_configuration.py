"""A changed configuration that a plugin refused is an alert if nobody corrects it in time."""

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster import vocabulary
from muster.vocabulary import AlertKind, AlertState, Severity, Verdict
from muster_health.alerting import refused_configuration
from muster_health.model import config, snapshot
from tests.worlds.detector_fleet import ZERO, World, running

WAIT_S: Final = config.Detection().configuration_s
FIRING: Final = (AlertKind.CONFIGURATION_REFUSED, AlertState.FIRING)
RESOLVED: Final = (AlertKind.CONFIGURATION_REFUSED, AlertState.RESOLVED)
PROBLEM: Final = "devices.yaml: resources[0].cuont: unknown key; did you mean count?"


def refused(*problems: str) -> World:
    """Return a world in which a plugin with the configuration `one` has refused another."""
    world = World("a")
    world.plugins["a"].configuration = "one"
    world.run(10.0)
    world.refuse("a", *(problems or (PROBLEM,)))
    return world


def alerts(world: World) -> list[vocabulary.AlertChanged]:
    return [e for e in world.published.values() if isinstance(e, vocabulary.AlertChanged)]


def test_a_refused_configuration_is_an_alert_after_five_minutes_with_the_reasons() -> None:
    world = refused(PROBLEM, "devices.yaml: resources[1].name: required but missing")
    world.run(WAIT_S - 5.0)
    assert world.story("a") == []
    world.run(10.0)
    (alert,) = alerts(world)
    assert (alert.kind, alert.severity) == (AlertKind.CONFIGURATION_REFUSED, Severity.WARNING)
    assert alert.summary == f"p on a refused its new configuration: {PROBLEM}"
    assert [(each.source, each.observed) for each in alert.evidence] == [
        ("plugin", PROBLEM),
        ("plugin", "devices.yaml: resources[1].name: required but missing"),
        ("plugin", "the active configuration is still one"),
    ]
    assert alert.runbook.endswith("configuration_refused.html")
    assert world.verdicts("a") == [Verdict.HEALTHY]


def test_what_is_corrected_in_time_is_no_alert() -> None:
    world = refused()
    world.run(WAIT_S - 20.0)
    world.apply("a", "two")
    world.run(WAIT_S)
    assert world.story("a") == []


@pytest.mark.parametrize("configuration", ["one", "two"])
def test_the_next_configuration_that_is_applied_resolves_the_alert(configuration: str) -> None:
    world = refused()
    world.run(WAIT_S + 5.0)
    world.apply("a", configuration)
    world.run(10.0)
    assert world.story("a") == [FIRING, RESOLVED]
    text = "a configuration that it accepts is active"
    assert [each.observed for each in alerts(world)[-1].evidence] == [text]


def test_a_heartbeat_with_another_configuration_resolves_it_if_the_event_is_lost() -> None:
    world = refused()
    world.run(WAIT_S + 5.0)
    world.apply("a", "two", is_heard=False)
    world.run(10.0)
    assert world.story("a") == [FIRING, RESOLVED]


def test_a_process_that_started_since_has_accepted_its_configuration() -> None:
    world = refused()
    world.run(WAIT_S + 5.0)
    world.replace("a", 2)
    world.run(60.0)
    assert world.story("a") == [FIRING, RESOLVED]
    text = "the plugin has restarted, with a configuration that it accepts"
    assert [each.observed for each in alerts(world)[-1].evidence] == [text]


def test_another_wrong_file_changes_the_text_and_does_not_begin_the_wait_again() -> None:
    world = refused()
    world.run(WAIT_S - 10.0)
    world.refuse("a", "devices.yaml: empty")
    world.run(20.0)
    world.refuse("a", "devices.yaml: not YAML")
    world.run(20.0)
    assert [alert.summary.partition(": ")[2] for alert in alerts(world)] == [
        "devices.yaml: empty",
        "devices.yaml: not YAML",
    ]


def test_a_new_health_neither_forgets_nor_repeats_it_and_does_not_begin_the_wait_again() -> None:
    world = refused()
    world.run(WAIT_S - 20.0)
    world.crash(3.0)
    world.run(30.0)
    assert world.story("a") == [FIRING]
    world.crash(3.0)
    world.run(WAIT_S + 30.0)
    assert world.story("a") == [FIRING]
    world.apply("a", "one")
    world.run(20.0)
    assert world.story("a") == [FIRING, RESOLVED]


def test_a_plugin_without_a_reason_is_reported_too() -> None:
    world = running("a")
    world.refuse("a")
    world.run(WAIT_S + 10.0)
    assert alerts(world)[-1].summary == "p on a refused its new configuration: no reason given"


def test_an_alert_of_which_all_saved_state_is_lost_ends_with_the_next_applied_configuration() -> (
    None
):
    world = refused()
    world.run(WAIT_S + 5.0)
    (published,) = alerts(world)
    (saved,) = snapshot.of_alerts([published])
    assert saved.refused is not None
    machine = refused_configuration.RefusedConfiguration(WAIT_S)
    machine.restore(saved.refused, since=-WAIT_S)
    assert not machine.observe(heartbeat("another", "two"), now=100.0)
    (again,) = machine.alerts(node="a", plugin="p", now=100.0, at=ZERO)
    assert again.summary == published.summary
    machine.apply(event(vocabulary.ConfigurationApplied), "another", 101.0, 101.0)
    assert machine.known is None


STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["refuse", "apply", "beat", "other", "new", "old"]), st.floats(0, 200)
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 29))
def test_after_any_events_it_fires_exactly_if_it_was_refused_for_the_whole_wait(
    steps: list[tuple[str, float]], saved_at: int
) -> None:
    machine = refused_configuration.RefusedConfiguration(WAIT_S)
    now, since, last = 0.0, None, 0.0
    for number, (step, seconds) in enumerate(steps):
        now += seconds
        match step:
            case "refuse":
                since, last = now if since is None else since, now
                machine.apply(event(vocabulary.ConfigurationRefused), "i", now, now)
            case "apply":
                since = None
                machine.apply(event(vocabulary.ConfigurationApplied), "i", now, now)
            case "beat":
                assert not machine.observe(heartbeat("i", "one"), now)
            case "other" | "new":
                is_over = since is not None and now >= last + 10.0
                since = None if is_over else since
                sent = heartbeat("i", "two") if step == "other" else heartbeat("j", "one")
                assert machine.observe(sent, now) is is_over
            case "old":
                assert not machine.observe(heartbeat("i", ""), now)
        if number == saved_at:
            again = refused_configuration.RefusedConfiguration(WAIT_S)
            if machine.known is not None:
                again.restore(machine.known, machine.known.since)
                last = machine.known.since
            machine = again
        is_due = since is not None and now >= since + WAIT_S
        waits = since is not None and not is_due
        assert (machine.is_overdue(now), machine.due(now)) == (
            is_due,
            since + WAIT_S if waits and since is not None else None,
        )
        alert = [*machine.alerts(node="a", plugin="p", now=now, at=ZERO)]
        assert [each.kind for each in alert] == [AlertKind.CONFIGURATION_REFUSED] * is_due


def event(
    kind: type[vocabulary.ConfigurationRefused | vocabulary.ConfigurationApplied],
) -> vocabulary.Event:
    about = {"node": "a", "at": ZERO, "plugin": "p", "config_hash": "one"}
    if kind is vocabulary.ConfigurationApplied:
        return vocabulary.ConfigurationApplied(**about)  # type: ignore[arg-type]  # keywords
    return vocabulary.ConfigurationRefused(**about, problems=(PROBLEM,))  # type: ignore[arg-type]


def heartbeat(instance: str, configuration: str) -> vocabulary.Heartbeat:
    return vocabulary.Heartbeat(
        node="a",
        plugin="p",
        instance=instance,
        seq=1,
        interval_s=1.0,
        config_hash=configuration,
        resources=(),
    )
