"""Adapter for the `muster notify` commands: test a receiver, explain routing, import settings.

Exit codes: 0 success, 1 failure or nobody is notified, 2 the input cannot be used.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import client, codec, matching, vocabulary
from muster.cli import events, output, reach
from muster.local import running as local_running
from muster.nats import bus, consumers, storage, streams
from muster.service import settings
from muster_notifier import receiver_setup, running, sample_message
from muster_notifier.config import files, schema
from muster_notifier.receivers import directory, factory, results
from muster_notifier.routing import muting, routes

_BUS_S: Final = 5.0
_NAME: Final = "notify"
_NO_SETTINGS: Final = "no `muster up` of yours is running; pass --context CONTEXT or --config FILE"

_Config = Annotated[
    Path | None,
    Parameter(
        name="--config", help="Use this settings file instead of the running notifier's settings."
    ),
]
_Context = Annotated[
    str | None, Parameter(help="The kubeconfig context of the cluster that runs the notifier.")
]
_Namespace = Annotated[str, Parameter(help="The namespace of muster in that cluster.")]
_Format = Annotated[
    Literal["muster", "alertmanager"],
    Parameter(name="--config-format", help="The format of --config: muster's or Alertmanager's."),
]

app = cyclopts.App(
    name=_NAME,
    help="Add and test receivers, explain routes, import an Alertmanager's settings.",
    version_flags=[],
)
app.command(receiver_setup.app)


@app.command(name="test")
def run_test(
    receiver: str,
    /,
    *,
    config: _Config = None,
    config_format: _Format = "muster",
    context: _Context = None,
    namespace: _Namespace = reach.NAMESPACE,
    json: output.Json = False,
) -> int:
    """Make the running notifier send a marked test message, and print the receiver's answer.

    With `--config`, this command sends the message itself, and also prints the requests.

    Parameters
    ----------
    receiver
        The receiver's name.
    json
        Print a JSON array with one object for each message of the test.

    """
    if config is None:

        def ask() -> int:
            work = _printed(running.test(receiver, at=datetime.now(UTC)), as_json=json)
            return events.run_within(_NAME, work, limit_s=running.LIMIT_S)

        return _in_cluster(ask, context, namespace)
    if context is not None:
        return output.fail(_NAME, "--config cannot be combined with --context")
    try:
        configured = _read(config, config_format)
        return asyncio.run(_printed(_test(configured, receiver), as_json=json))
    except settings.BadSettings as error:
        return output.fail(_NAME, "\n".join(error.problems))
    except (factory.Unusable, ValueError) as error:
        return output.fail(_NAME, str(error))


@app.command(name="explain")
def run_explain(
    *,
    labels: str,
    config: _Config = None,
    config_format: _Format = "muster",
    context: _Context = None,
    namespace: _Namespace = reach.NAMESPACE,
    offline: output.Flag = False,
    json: output.Json = False,
) -> int:
    """Print which routes, groups and mutes an alert would match, and who would be notified.

    The exit code is 1 if nobody is notified. With neither `--context` nor `--config`, the settings
    are those of `muster up` on this machine.

    Parameters
    ----------
    labels
        The alert's labels, such as kind=stuck,node=node-a.
    offline
        With `--config`: do not read silences and alerts from NATS.
    json
        Print one JSON object.

    """
    if config is not None and context is not None:
        return output.fail(_NAME, "--config cannot be combined with --context")
    if offline and config is None:
        return output.fail(_NAME, "--offline requires --config")
    try:
        if config is None and context is None:
            config = _settings_here()
        asked = _parse_labels(labels)
        if config is not None:
            explaining = _explain(_read(config, config_format), asked, offline=offline)
            return _shown(asyncio.run(explaining), as_json=json)
    except settings.BadSettings as error:
        return output.fail(_NAME, "\n".join(error.problems))
    except ValueError as error:
        return output.fail(_NAME, str(error))

    def explain() -> int:
        work = _explain_running(asked, context or "", namespace, as_json=json)
        return events.run_within(_NAME, work, limit_s=running.LIMIT_S)

    return _in_cluster(explain, context, namespace)


def _settings_here() -> Path:
    """Return the settings file of the notifier that `muster up` runs. Raises ValueError."""
    here = local_running.here()
    if not here:
        raise ValueError(_NO_SETTINGS)
    events.name_chosen(_NAME, here[0].nats_url)
    return Path(here[0].directory, "notifier.yaml")


def _shown(explanation: "_Explanation", *, as_json: bool) -> int:
    if as_json:
        output.print_json(explanation)
    else:
        output.show(*explanation.lines())
    return 0 if explanation.notified else 1


def _in_cluster(call: Callable[[], int], context: str | None, namespace: str) -> int:
    """Run `call`, connected to a cluster's bus if a context is given; return its exit code."""
    if context is None:
        return call()
    whole = reach.Need.WHOLE_BUS
    return reach.run_with(_NAME, whole, call, context=context, namespace=namespace)


@app.command(name="import")
def run_import(file: Path, /, *, accept_losses: output.Flag = False) -> int:
    """Print an Alertmanager configuration as muster's settings; list left-out parts on stderr.

    If somebody would no longer be notified, no settings are printed, and the exit code is 1.

    Parameters
    ----------
    file
        The Alertmanager's configuration file.
    accept_losses
        Print the settings even if somebody would no longer be notified.

    """
    try:
        tree, importer = files.translate(file.read_bytes(), str(file))
        for line in importer.left_out:
            output.warn(_NAME, line)
        if not output.may_write(_NAME, importer.losses, accepted=accept_losses):
            return 1
        settings.validate(schema.Settings, tree, source=str(file))
    except OSError as error:
        return output.fail(_NAME, f"{file}: {error.strerror}")
    except settings.BadSettings as error:
        return output.fail(_NAME, "\n".join(error.problems))
    output.print_yaml(tree)
    return 0


def _read(file: Path, config_format: str) -> schema.Settings:
    """Return the settings in a file, plus the receivers in its receivers directory, if readable."""
    configured = files.read(file, written_for=config_format, environment=os.environ)
    with contextlib.suppress(OSError):
        if place := configured.receivers_directory:
            content = directory.read(Path(place), configured)
            return schema.with_receivers(configured, content.receivers)
    return configured


async def _test(configured: schema.Settings, name: str) -> list[sample_message.Attempt]:
    receivers = {receiver.name: receiver for receiver in configured.receivers}
    sample_message.check(name, receivers)
    return await sample_message.send(receivers[name], configured)


async def _printed(
    sending: Coroutine[object, object, list[sample_message.Attempt]], *, as_json: bool
) -> int:
    try:
        attempts = await sending
    except running.Unusable as error:
        return output.fail(_NAME, str(error), code=1)
    if as_json:
        output.print_json(attempts)
    else:
        output.show(*(line for attempt in attempts for line in attempt.lines()))
    return 0 if attempts[0].kind is results.Kind.ACCEPTED else 1


class _Matched(msgspec.Struct, frozen=True):
    """One route that an alert matches."""

    route: str
    group: str
    timing: routes.Timing
    receivers: tuple[str, ...]
    logs: tuple[str, ...]
    """The receivers of the kind `console`, which only write to the notifier's log."""
    muted: muting.Muted | None

    def lines(self) -> list[str]:
        timing = self.timing
        times = (
            f"first after {timing.group_wait_s:g} s, changes every {timing.group_interval_s:g} s, "
            f"reminders every {timing.repeat_interval_s:g} s"
        )
        names = [f"{name} (log)" if name in self.logs else name for name in self.receivers]
        lines = [
            f"route      {self.route}",
            f"  group    {self.group}",
            f"  times    {times}",
            f"  notifies {', '.join(names) or 'nobody'}",
        ]
        return [*lines, f"  muted    {_muted(self.muted)}"] if self.muted else lines


class _Explanation(msgspec.Struct, frozen=True):
    """How an alert is routed. `owners` lists the receivers that its pods' owners may name.

    `notified` lists the receivers that are notified now, without those of the kind `console`.
    """

    alert: str
    notes: list[str]
    routes: list[_Matched]
    owners: tuple[str, ...]
    owners_group: str
    muted: muting.Muted | None
    notified: tuple[str, ...]
    why_nobody: str = ""

    def lines(self) -> list[str]:
        lines = [f"alert      {self.alert}", *(f"note       {note}" for note in self.notes)]
        lines += [line for route in self.routes for line in route.lines()]
        if self.owners:
            names = ", ".join(self.owners)
            lines.append(f"owners     of its pods may name {names}; group {self.owners_group}")
        if self.muted:
            lines.append(f"muted      {_muted(self.muted)}")
        nobody = f"nobody: {self.why_nobody}"
        return [*lines, f"notified   {', '.join(self.notified) or nobody}"]


def _muted(muted: muting.Muted) -> str:
    return f"{muted.cause}: {muted.by}"


async def _explain_running(
    labels: Mapping[str, str], context: str, namespace: str, *, as_json: bool
) -> int:
    """Explain how the running notifier would route these labels; return the exit code."""
    try:
        configured = await running.settings_in(context, namespace)
        mutes = schema.initial_muting(configured)
        async with running.connected() as link:
            more = await running.more_receivers(link, configured)
            await _read_bus(link, mutes)
    except running.Unusable as error:
        return output.fail(_NAME, str(error), code=1)
    except settings.BadSettings as error:
        return output.fail(_NAME, "\n".join(error.problems))
    complete = schema.with_receivers(configured, more)
    return _shown(_explained(complete, labels, mutes), as_json=as_json)


async def _explain(
    configured: schema.Settings, labels: Mapping[str, str], *, offline: bool
) -> _Explanation:
    mutes = schema.initial_muting(configured)
    if not offline:
        try:
            async with (
                asyncio.timeout(_BUS_S),
                bus.Bus(configured.bus.url, producer="clients/notify", name="notify") as connected,
            ):
                await _read_bus(connected, mutes)
        except TimeoutError:
            problem = "does not answer: silences, maintenance and other alerts are not considered"
            output.warn(_NAME, f"NATS at {client.without_password(configured.bus.url)} {problem}")
    return _explained(configured, labels, mutes)


def _explained(
    configured: schema.Settings, labels: Mapping[str, str], mutes: muting.Muting
) -> _Explanation:
    at = datetime.now(UTC)
    equal = matching.Operator.EQUAL
    # `alertname` equals `kind`
    asked = sorted(labels.keys() - {"alertname"} if "kind" in labels else labels)
    conditions = [matching.Matcher(name, equal, labels[name]) for name in asked]
    kinds = {receiver.name: receiver.way for receiver in configured.receivers}
    matched = [
        _Matched(
            route=route.key,
            group=routes.format_labels(routes.select_labels(labels, route.group_by)),
            timing=route.timing,
            receivers=route.receivers,
            logs=tuple(name for name in route.receivers if kinds[name] == vocabulary.CONSOLE),
            muted=mutes.route_muted_by(route, at),
        )
        for route in schema.route_tree(configured).find(labels)
    ]
    muted = mutes.muted_by(labels, at)
    unmuted = dict.fromkeys(name for each in matched if not each.muted for name in each.receivers)
    doubts = [doubt for doubt in map(matching.doubt, conditions) if doubt]
    people = tuple(name for name in unmuted if kinds[name] != vocabulary.CONSOLE)
    return _Explanation(
        alert=routes.format_labels(labels),
        notes=doubts,
        routes=[] if doubts else matched,
        owners=configured.owners.receivers,
        owners_group=routes.format_labels(routes.select_labels(labels, configured.owners.group_by)),
        muted=muted,
        notified=() if muted or doubts else people,
        why_nobody="no alert has these labels"
        if doubts
        else _why_nobody(matched, unmuted, is_muted=muted is not None),
    )


def _why_nobody(matched: list[_Matched], unmuted: Mapping[str, None], *, is_muted: bool) -> str:
    if is_muted or (not unmuted and any(route.muted and route.receivers for route in matched)):
        return "it is muted now"
    return "its only receiver is the notifier's log" if unmuted else "no route has a receiver"


def _parse_labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for matcher in matching.parse(text):
        if matcher.operator is not matching.Operator.EQUAL:
            raise ValueError(f"--labels: {matcher}: expected name=value")
        labels[matcher.name] = matcher.value
    # `kind` and `alertname` always have the same value
    kind = labels.get("kind") or labels.get("alertname")
    return labels | ({"kind": kind, "alertname": kind} if kind else {})


async def _read_bus(connected: bus.Bus, mutes: muting.Muting) -> None:
    """Read the current silences, maintenance and alerts from NATS into `mutes`."""
    async for change in storage.follow(connected.link, streams.SILENCES):
        if change is None:
            break
        key, value = change
        if not value:
            continue
        try:
            mutes.observe_silence(muting.SilenceChanged(key, matching.decode_silence(value)))
        except matching.MalformedSilence as error:
            output.warn(_NAME, f"silence {key} cannot be read: {error}")
    newest: dict[str, codec.CloudEvent] = {}
    for event in await consumers.newest(connected.link, streams.ALERTS, "muster.alert.>"):
        assert isinstance(event.data, vocabulary.AlertChanged), "only alerts were read"
        newest[event.data.fingerprint] = event
    for event in newest.values():
        assert isinstance(event.data, vocabulary.AlertChanged), "only alerts were read"
        mutes.observe_alert(event.data, matching.labels_of(event.data))
    for event in await consumers.newest(
        connected.link, streams.ALERTS, "muster.verdict.*.*.verdict.changed"
    ):
        assert isinstance(event.data, vocabulary.VerdictChanged), "only verdicts were read"
        mutes.observe_verdict(event.data)
