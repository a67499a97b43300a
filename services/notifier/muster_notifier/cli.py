"""Adapter: the commands `muster notify`: test a receiver, explain routing, import settings.

Exit codes: 0 it worked, 1 the receiver did not take it, 2 the input cannot be used.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from muster import codec, matchers, silences, vocabulary
from muster.nats import buckets, bus, consumers, streams
from muster.service import settings
from muster_notifier.config import files, schema
from muster_notifier.delivery import dead_letters
from muster_notifier.receivers import endpoint, factory, message, result
from muster_notifier.routing import muting, notifications, routes

_BUS_S: Final = 5.0


def explain(
    settings: schema.Settings,
    given: Mapping[str, str],
    muted_by: muting.Muting,
    *,
    at: datetime,
) -> list[str]:
    """Return the lines."""
    lines = [f"alert      {routes.format_labels(given)}"]
    for name in sorted(given):
        why = silences.doubt(matchers.Matcher(name, matchers.Operator.EQUAL, given[name]))
        lines += [f"note       {why}"] if why else []
    muted = muted_by.muted_by(given, at)
    for route in schema.route_tree(settings).find(given):
        lines.append(f"route      {route.key}")
        lines.append(
            f"  group    {routes.format_labels(routes.select_labels(given, route.group_by))}"
        )
        timing = route.timing
        lines.append(
            f"  times    first after {timing.group_wait_s:g} s, changes every "
            f"{timing.group_interval_s:g} s, reminders every {timing.repeat_interval_s:g} s"
        )
        lines.append(f"  told     {', '.join(route.receivers) or 'nobody'}")
        by_time = muted_by.route_muted_by(route, at)
        if by_time is not None:
            lines.append(f"  quiet    {by_time.cause}: {by_time.by}")
    if settings.owners.receivers:
        group = routes.format_labels(routes.select_labels(given, settings.owners.group_by))
        who = ", ".join(settings.owners.receivers)
        lines.append(f"owners     of its pods may name {who}; group {group}")
    lines.append(f"quiet      {muted.cause}: {muted.by}" if muted else "quiet      no: it is told")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    chosen = _parser().parse_args(argv)
    try:
        if chosen.command == "import":
            return _import(chosen.file)
        found = files.read(chosen.config, written_for=chosen.config_format, environment=os.environ)
        if chosen.command == "test":
            return asyncio.run(_test(found, chosen.receiver))
        return asyncio.run(_explain(found, chosen.labels, offline=chosen.offline))
    except settings.BadSettings as error:
        for problem in error.problems:
            _tell(problem)
    except (factory.Unusable, ValueError) as error:
        _tell(str(error))
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster notify", description="Test receivers, explain routes, import settings."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "send a marked test message to a receiver; print what was sent and answered"
    test = commands.add_parser("test", help=text, description=text)
    test.add_argument("receiver", help="its name in the settings")
    text = "print which routes, groups, inhibitions and silences an alert would meet"
    explain = commands.add_parser("explain", help=text, description=text)
    explain.add_argument("--labels", required=True, help="such as kind=stuck,node=node-a")
    explain.add_argument(
        "--offline", action="store_true", help="ask no NATS: no silences, no alerts"
    )
    for command in (test, explain):
        command.add_argument("--config", type=Path, required=True, metavar="FILE")
        command.add_argument(
            "--config-format", choices=["muster", *files.FORMATS], default="muster"
        )
    text = "print an Alertmanager's configuration as muster's; what is left out goes to stderr"
    command = commands.add_parser("import", help=text, description=text)
    command.add_argument("file", type=Path)
    return parser


def _import(file: Path) -> int:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise settings.BadSettings([f"{file}: {error.strerror}"]) from None
    found, left_out = files.translate(text, str(file))
    settings.validate(schema.Settings, found, source=str(file))
    sys.stdout.buffer.write(msgspec.yaml.encode(found))
    for line in left_out:
        _tell(line)
    return 0


async def _test(found: schema.Settings, name: str) -> int:
    receivers = {receiver.name: receiver for receiver in found.receivers}
    if name not in receivers:
        raise ValueError(f"no receiver is called {name}; there are: {', '.join(receivers)}")
    sender = factory.make(receivers[name], found)
    for problem in sender.problems:
        _tell(f"template: {problem}")
    told = _example(name, at=datetime.now(UTC))
    asked: list[str] = []
    endpoint.RECORDED.set(asked)
    answer = await sender.send(told, {})
    _show(answer, asked or [message.compose(told, receivers[name].templates).text], sender)
    if answer.kind is not result.Kind.TAKEN:
        return 1
    if receivers[name].pagerduty is not None or receivers[name].alertmanager is not None:
        # a test must leave nothing open
        ended = dead_letters.as_of_now(told, fires=frozenset(), notified=())
        assert ended is not None, "an example fires"
        asked.clear()
        _show(await sender.send(ended, answer.data), asked, sender)
    return 0


def _show(answer: result.Result, asked: list[str], sender: factory.Sender) -> None:
    print("sent:", *map(sender.mask, asked), sep="\n")  # noqa: T201  # a command prints
    retry = f"; asks us to wait {answer.retry_after_s:g} s" if answer.retry_after_s else ""
    known = "" if answer.kind is result.Kind.TAKEN else f" ({answer.outcome})"
    print(f"answered: {answer.kind}{known}: {answer.detail}{retry}")  # noqa: T201  # a command prints


def _example(receiver: str, *, at: datetime) -> notifications.Notification:
    alert = vocabulary.AlertChanged(
        node="node-example",
        at=at,
        plugin="device-plugin",
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.INFO,
        state=vocabulary.AlertState.FIRING,
        fingerprint="0" * 16,
        summary="this is a test by muster notify test",
        starts_at=at,
        evidence=(vocabulary.Evidence(source="muster", observed="somebody asked for a test"),),
    )
    found = notifications.create(
        after=at.isoformat(),
        receiver=receiver,
        group='{}:{kind="test"}',
        labels={"kind": "test"},
        reason=vocabulary.NotificationReason.FIRST,
        firing=[alert],
        resolved=[],
        send_resolved=True,
        at=at,
    )
    return msgspec.structs.replace(found, is_test=True)


async def _explain(found: schema.Settings, text: str, *, offline: bool) -> int:
    given = _labels(text)
    muted_by = schema.initial_muting(found)
    if not offline:
        try:
            async with asyncio.timeout(_BUS_S):
                await _learn(found, muted_by)
        except TimeoutError:
            _tell(f"NATS at {found.bus.url} is away: no silences, no alerts that inhibit")
    for line in explain(found, given, muted_by, at=datetime.now(UTC)):
        print(line)  # noqa: T201  # a command prints
    return 0


def _labels(text: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for one in matchers.parse(text):
        if one.operator is not matchers.Operator.EQUAL:
            raise ValueError(f"--labels: {one}: only name=value")
        given[one.name] = one.value
    # an alert has both, and they are the same
    both = given.get("kind") or given.get("alertname")
    return given | ({"kind": both, "alertname": both} if both else {})


async def _learn(found: schema.Settings, muted_by: muting.Muting) -> None:
    """Take the silences, the planned work and the alerts of now."""
    async with bus.Bus(found.bus.url, producer="clients/notify", name="notify") as connected:
        async for change in buckets.follow(connected.link, streams.SILENCES):
            if change is None:
                break
            key, value = change
            if not value:
                continue
            try:
                muted_by.observe_silence(muting.SilenceChanged(key, silences.decode(value)))
            except silences.MalformedSilence as error:
                _tell(f"silence {key} cannot be read: {error}")
        newest: dict[str, codec.CloudEvent] = {}
        for event in await consumers.newest(connected.link, streams.ALERTS, "muster.alert.>"):
            assert isinstance(event.data, vocabulary.AlertChanged), "the filter says so"
            newest[event.data.fingerprint] = event
        for event in newest.values():
            assert isinstance(event.data, vocabulary.AlertChanged), "as above"
            muted_by.observe_alert(event.data, routes.labels_of(event.data))
        for event in await consumers.newest(
            connected.link, streams.ALERTS, "muster.verdict.*.*.verdict.changed"
        ):
            assert isinstance(event.data, vocabulary.VerdictChanged), "the filter says so"
            muted_by.observe_verdict(event.data)


def _tell(problem: str) -> None:
    sys.stderr.write(f"muster notify: {problem}\n")


if __name__ == "__main__":
    sys.exit(main())
