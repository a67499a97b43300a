"""Pure: decides from observations whether muster itself works.

| check         | OK                       | WARN                             | FAIL             |
|---------------|--------------------------|----------------------------------|------------------|
| pods          | all are ready            | some are not ready; a restart in | no pod of a part |
|               |                          | the last hour                    | is ready         |
| images        | each part runs one image | a part runs several images       |                  |
| bus           | NATS answers             | an answer takes more than 0.5 s  | no answer        |
| streams       | all exist and have room  | a replica lags; one is nearly    | one is missing,  |
|               |                          | full, or removes messages early  | or full          |
| consumers     | they keep up             | many messages wait, or some were | none for alerts  |
|               |                          | redelivered                      |                  |
| dead letters  | none                     | some                             |                  |
| leaders       | each service has one     |                                  | one is missing   |
| health        | it answers without notes | its answer has notes             | no answer, or it |
|               |                          |                                  | is disconnected  |
| plugins       | all are well             | some are not well; none is known | none is well     |
| versions      | all equal this command's | some differ                      |                  |
| certificates  | all end after 30 days    | one ends within 30 days          | within 3 days    |
| receivers     | people are notified      | only the log is notified; one is | no list, or no   |
|               |                          | skipped, or has dead letters     | leading notifier |
| configuration | none was refused         | a plugin refused one             |                  |

A check without observations is `NOT CHECKED`, with the reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, TypeVar

import muster
from muster import vocabulary, wording
from muster.cli import status
from muster.cli.doctor_facts import (
    WELL,
    Broken,
    Bus,
    Check,
    Commands,
    Finding,
    Leader,
    Level,
    NotSeen,
    Observations,
    Receivers,
)
from muster.fleet import health_state
from muster.kubernetes import installation
from muster.nats import streams

Observed = TypeVar("Observed")

SLOW_S: Final = 0.5
WAITING_MAX: Final = 1_000
"""A consumer for which more messages than this are waiting counts as slow."""
SHARE_WARN: Final = 0.8
SHARE_FAIL: Final = 0.99
CERTIFICATE_WARN: Final = timedelta(days=30)
CERTIFICATE_FAIL: Final = timedelta(days=3)
NEEDED: Final = ("muster-health", "muster-notifier", "muster-plugin")
"""The parts of every installation; NATS may run outside the cluster."""

_MIB: Final = 1024 * 1024
_REFUSED: Final = "configuration_refused"
_NOBODY_LEADS: Final = {
    "health": "health_silent",
    "notifier": "notifier_cannot_deliver",
    "labeler": "labeler_waits",
}
"""The runbook for each service that can be without a leader."""


Answer = tuple[Level, str, str]


def evaluate(observed: Observations, commands: Commands, now: datetime) -> list[Finding]:
    """Return a finding for each check."""
    checks: tuple[tuple[Check, Answer], ...] = (
        (Check.PODS, _if_observed(observed.pods, lambda pods: _pods(pods, commands, now))),
        (Check.IMAGES, _if_observed(observed.pods, lambda pods: _images(pods, commands))),
        (Check.BUS, _bus(observed.bus, commands)),
        (Check.STREAMS, _if_observed(observed.stores, lambda stores: _stores(stores, commands))),
        (
            Check.CONSUMERS,
            _if_observed(observed.consumers, lambda consumers: _consumers(consumers, commands)),
        ),
        (
            Check.DEAD_LETTERS,
            _if_observed(observed.stores, lambda stores: _dead_letters(stores, commands)),
        ),
        (
            Check.LEADERS,
            _if_observed(observed.leaders, lambda leaders: _leaders(leaders, commands)),
        ),
        (Check.HEALTH, _health(observed.health, commands)),
        (Check.PLUGINS, _plugins_or_broken(observed.health, commands)),
        (
            Check.VERSIONS,
            _if_observed(observed.versions, lambda versions: _versions(versions, commands)),
        ),
        (
            Check.CERTIFICATES,
            _if_observed(observed.certificates, lambda ends: _certificates(ends, now)),
        ),
        (
            Check.RECEIVERS,
            _if_observed(
                observed.receivers,
                lambda names: _receivers(names, commands, leads=_has_notifier(observed)),
            ),
        ),
        (
            Check.CONFIGURATION,
            _if_observed(observed.refused, lambda refused: _configuration(refused, commands)),
        ),
    )
    return [Finding(check, *answer) for check, answer in checks]


def exit_code(observed: Observations, findings: Iterable[Finding]) -> int:
    """Return 1 if something fails, 2 if not everything could be checked, otherwise 0."""
    if any(finding.level is Level.FAIL for finding in findings):
        return 1
    return (
        2 if any(isinstance(part, NotSeen) and part.is_refused for part in observed.parts()) else 0
    )


def _if_observed(observed: Observed | NotSeen, judge: Callable[[Observed], Answer]) -> Answer:
    return _not_checked(observed) if isinstance(observed, NotSeen) else judge(observed)


def _not_checked(observed: NotSeen) -> Answer:
    return Level.NOT_CHECKED, observed.why, ""


def _runbook(page: str) -> str:
    return f"{muster.RUNBOOKS_URL}{page}.html"


def _steps(*steps: str) -> str:
    return "; ".join(filter(None, steps))


def _pods(pods: Sequence[installation.Pod], commands: Commands, now: datetime) -> Answer:
    running = [pod for pod in pods if not (pod.is_over or pod.is_test)]
    ready = Counter(pod.part for pod in running if pod.is_ready)
    parts = Counter(dict.fromkeys(NEEDED, 0))
    parts.update(pod.part for pod in running)
    step = commands.in_cluster(f"describe pods -l {installation.PART_OF}")
    # the others wait for NATS
    order = sorted(parts, key=lambda part: (part != installation.NATS, part))
    none = [f"{part} ({_state(part, running)})" for part in order if not ready[part]]
    if none:
        return Level.FAIL, f"no ready pod: {wording.listed(none)}", step
    unready = [f"{pod.name}: {pod.reason}" for pod in running if not pod.is_ready]
    failures = {pod.name: installation.recent_failure(pod.status, now) for pod in running}
    failed = {name: failure for name, failure in failures.items() if failure}
    if unready:
        return Level.WARN, f"not ready: {wording.listed(unready)}", step
    if failed:
        return (
            Level.WARN,
            wording.listed([f"{name}: {failure}" for name, failure in failed.items()]),
            commands.in_cluster(f"logs {next(iter(failed))} --previous --tail=50"),
        )
    restarts = sum(pod.restarts for pod in running)
    text = ", ".join(f"{part.removeprefix('muster-')} {ready[part]}" for part in sorted(parts))
    return (
        Level.OK,
        f"all {len(running)} are ready ({text}); {wording.counted(restarts, 'restart')}",
        "",
    )


def _state(part: str, pods: Iterable[installation.Pod]) -> str:
    states = [f"{pod.name} {pod.reason}" for pod in pods if pod.part == part]
    return wording.listed(states) if states else "there is no pod"


def _images(pods: Sequence[installation.Pod], commands: Commands) -> Answer:
    images: dict[str, set[str]] = {}
    for pod in pods:
        if not (pod.is_over or pod.is_test):
            images.setdefault(pod.part, set()).add(pod.image)
    several = [
        f"{part} runs {' and '.join(sorted(some))}"
        for part, some in sorted(images.items())
        if len(some) > 1
    ]
    if several:
        step = commands.in_cluster("get deployments,daemonsets,statefulsets -o wide")
        return Level.WARN, wording.listed(several), step
    return Level.OK, ", ".join(sorted({i for some in images.values() for i in some})), ""


def _bus(bus: Bus | Broken | NotSeen, commands: Commands) -> Answer:
    if isinstance(bus, NotSeen):
        return _not_checked(bus)
    if isinstance(bus, Broken):
        step = commands.in_cluster(f"get pods -l app.kubernetes.io/name={installation.NATS}")
        return Level.FAIL, bus.why, _steps(step, _runbook("nats_down"))
    text = f"{bus.server}; {bus.rights}; a round trip takes {bus.round_trip_s * 1000:.0f} ms"
    if bus.round_trip_s > SLOW_S:
        return Level.WARN, text, _runbook("nats_down")
    return Level.OK, text, ""


def _stores(stores: Mapping[str, streams.Usage | None], commands: Commands) -> Answer:
    missing = sorted(name for name, store in stores.items() if store is None)
    if missing:
        step = commands.in_cluster(f"rollout restart deployment/{installation.HEALTH}")
        return (
            Level.FAIL,
            f"{wording.listed(missing)}: missing; health creates them when it connects",
            _steps(step, _runbook("nats_down")),
        )
    there = [store for store in stores.values() if store is not None]
    full = [_share(store) for store in there if store.refuses and store.share >= SHARE_FAIL]
    if full:
        return (
            Level.FAIL,
            f"full and refusing messages: {wording.listed(full)}",
            _runbook("evictions"),
        )
    nearly = [f"{_share(s)} is nearly full" for s in there if s.refuses and s.share >= SHARE_WARN]
    early = [
        text
        for stream in streams.STREAMS
        if (store := stores.get(stream.name)) is not None and not stream.is_queue
        if (text := streams.early_eviction(stream, store.stored_bytes, store.oldest_age_s))
    ]
    away = [f"{s.name} has no current copy on {', '.join(s.away)}" for s in there if s.away]
    if away:
        return Level.WARN, wording.listed(away), _runbook("nats_down")
    if early or nearly:
        return Level.WARN, wording.listed([*early, *nearly]), _runbook("evictions")
    fullest = max(there, key=lambda store: store.share, default=None)
    text = f"; the fullest is {_share(fullest)}" if fullest else ""
    return Level.OK, f"all {len(stores)} streams and buckets exist{text}", ""


def _share(store: streams.Usage) -> str:
    size = f"{store.stored_bytes / _MIB:.1f} of {store.bytes_max / _MIB:.0f} MiB"
    return f"{store.name} with {size}"


def _consumers(consumers: Sequence[streams.Durable], commands: Commands) -> Answer:
    alerts, runbook = streams.ALERTS.name, _runbook("notifier_cannot_deliver")
    step = commands.in_cluster("logs deployment/muster-notifier --tail=50")
    if not any(consumer.stream == alerts for consumer in consumers):
        return Level.FAIL, f"{alerts} has no consumer: no notifier runs", _steps(step, runbook)
    slow = [
        f"{consumer.name} of {consumer.stream}: {wording.counted(consumer.waiting, 'message')} "
        f"waiting, {consumer.redelivered} redelivered"
        for consumer in consumers
        if consumer.waiting > WAITING_MAX or consumer.redelivered
    ]
    if slow:
        return Level.WARN, wording.listed(slow), _steps(step, runbook)
    waiting = wording.counted(sum(consumer.waiting for consumer in consumers), "message")
    count = wording.counted(len(consumers), "durable consumer")
    return Level.OK, f"{count}, {waiting} waiting", ""


def _dead_letters(stores: Mapping[str, streams.Usage | None], commands: Commands) -> Answer:
    store = stores.get(streams.DEAD_LETTERS.name)
    if store is None:
        return Level.NOT_CHECKED, f"{streams.DEAD_LETTERS.name} is missing", ""
    if store.messages:
        step = f"{commands.muster} dlq list"
        text = f"{store.messages} that could not be delivered or processed"
        return Level.WARN, text, _steps(step, _runbook("dead_letters"))
    return Level.OK, "none", ""


def _leaders(leaders: Mapping[str, Leader | None], commands: Commands) -> Answer:
    nobody = [service for service, leader in leaders.items() if leader is None]
    if nobody:
        step = commands.in_cluster(f"logs deployment/muster-{nobody[0]} --tail=50")
        page = _NOBODY_LEADS[nobody[0]]
        return Level.FAIL, f"no leader for {' or '.join(nobody)}", _steps(step, _runbook(page))
    texts = [
        f"{service}: {leader.name}{_since(leader)}"
        for service, leader in leaders.items()
        if leader is not None
    ]
    return Level.OK, "; ".join(texts), ""


def _since(leader: Leader) -> str:
    return f" since {leader.since:%Y-%m-%d %H:%M} UTC" if leader.since else ""


def _health(health: health_state.State | Broken | NotSeen, commands: Commands) -> Answer:
    if isinstance(health, NotSeen):
        return _not_checked(health)
    step = commands.in_cluster("logs deployment/muster-health --tail=50")
    if isinstance(health, Broken):
        return Level.FAIL, health.why, _steps(step, _runbook("health_silent"))
    # whom it notifies is a check of its own
    notes = [note for note in health.caveats() if note != health.service.notified]
    level = Level.FAIL if health.service.is_disconnected else Level.WARN
    if notes:
        return level, "; ".join(notes), _steps(step, _runbook("health_impaired"))
    return Level.OK, f"it answers; {wording.counted(len(health.alerts), 'alert')} firing", ""


def _plugins_or_broken(health: health_state.State | Broken | NotSeen, commands: Commands) -> Answer:
    match health:
        case NotSeen():
            return _not_checked(health)
        case Broken():
            return Level.NOT_CHECKED, "health does not answer", ""
        case _:
            return _plugins(health.plugins, commands)


def _plugins(plugins: Sequence[health_state.Plugin], commands: Commands) -> Answer:
    if not plugins:
        step = commands.in_cluster("get pods -l app.kubernetes.io/name=muster-plugin")
        return Level.WARN, "health tracks no plugin", step
    unwell = [plugin for plugin in plugins if plugin.verdict not in WELL]
    nodes = len({plugin.node for plugin in plugins})
    if not unwell:
        return Level.OK, f"{len(plugins)} on {wording.counted(nodes, 'node')}, all well", ""
    step = _steps(f"{commands.muster} status", _runbook("plugins_unwell"))
    names = [f"{each.node} {each.name} is {each.verdict or status.UNKNOWN}" for each in unwell]
    level = Level.FAIL if len(unwell) == len(plugins) else Level.WARN
    return level, f"{len(unwell)} of {len(plugins)} not well: {wording.listed(names)}", step


def _versions(versions: Mapping[str, str], commands: Commands) -> Answer:
    users = Counter(versions.values())
    if set(users) <= {muster.__version__}:
        others = wording.counted(len(versions), "other")
        return Level.OK, f"{muster.__version__}: this command and {others}", ""
    by_version = [
        f"{version or 'unknown'}: {wording.name_list(names, most=3)}"
        for version in sorted(users)
        if (names := [name for name, each in versions.items() if each == version])
    ]
    step = commands.in_cluster("get deployments,daemonsets,statefulsets -o wide")
    return Level.WARN, f"{'; '.join(by_version)}; this command: {muster.__version__}", step


def _certificates(ends: Mapping[str, datetime], now: datetime) -> Answer:
    if not ends:
        return Level.OK, "none: NATS is used without TLS", ""
    # the first to end first, because not all are shown
    by_end = sorted((end, name) for name, end in ends.items())
    texts = [f"{name} is valid until {end:%Y-%m-%d}" for end, name in by_end]
    first, _ = by_end[0]
    if first > now + CERTIFICATE_WARN:
        return Level.OK, wording.listed(texts), ""
    level = Level.FAIL if first <= now + CERTIFICATE_FAIL else Level.WARN
    return level, wording.listed(texts), _runbook("nats_down")


def _has_notifier(observed: Observations) -> bool:
    """Return whether a notifier leads; True if this is unknown."""
    leaders = observed.leaders
    return isinstance(leaders, NotSeen) or leaders.get("notifier") is not None


def _receivers(receivers: Receivers | None, commands: Commands, *, leads: bool) -> Answer:
    logs = commands.in_cluster("logs deployment/muster-notifier --tail=50")
    runbook = _runbook("notifier_cannot_deliver")
    if receivers is None:
        return Level.FAIL, "no notifier has published its receivers", _steps(logs, runbook)
    if not leads:
        return Level.FAIL, "no notifier leads, so nobody is notified", _steps(logs, runbook)
    if set(receivers.kinds.values()) <= {vocabulary.CONSOLE}:
        step = "notify setup slack" if commands.kubectl else "notify setup --help"
        return Level.WARN, vocabulary.NOBODY_NOTIFIED, f"{commands.muster} {step}"
    if receivers.left_out:
        text = f"the notifier skips: {wording.listed(receivers.left_out)}"
        return Level.WARN, text, _steps(logs, runbook)
    if receivers.dead:
        text = f"not all notifications could be delivered to {wording.listed(receivers.dead)}"
        return Level.WARN, text, _steps(f"{commands.muster} dlq list", _runbook("dead_letters"))
    named = sorted(receivers.kinds.items())
    return (
        Level.OK,
        wording.listed([f"{name} ({kind})" for name, kind in named if kind != vocabulary.CONSOLE]),
        "",
    )


def _configuration(refused: Mapping[str, str], commands: Commands) -> Answer:
    if not refused:
        return Level.OK, "no plugin has refused its configuration", ""
    texts = [f"{name}: {problem}" for name, problem in sorted(refused.items())]
    node = min(refused).partition(" ")[0]
    return (
        Level.WARN,
        wording.listed(texts),
        _steps(f"{commands.muster} why {node}", _runbook(_REFUSED)),
    )
