"""Adapter for the health service: `muster status` and `muster why` read its state."""

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import client, codec, matching, vocabulary
from muster.cli import events, output, status, texts, why
from muster.fleet import health_client, health_state, writing
from muster.local import running

status_command = cyclopts.App(name="status")
why_command = cyclopts.App(name="why")

Health = Annotated[
    str | None,
    Parameter(
        env_var="MUSTER_HEALTH_URL",
        help="Address of the health service, `http://host:port`; by default, that of `muster up` "
        "on this machine. Of several addresses, separated by commas, the leader's is used.",
    ),
]

_SILENCES_S: Final = 5.0
_NO_HEALTH: Final = (
    f"no health service runs on this machine as part of `muster up`; {texts.NAME_CLUSTER}, "
    "or the address of a health service with --health or MUSTER_HEALTH_URL"
)


@status_command.default
def show_status(
    *,
    all: output.Flag = False,  # noqa: A002  # the option's name
    json: output.Json = False,
    health: Health = None,
    url: events.Url = None,
) -> int:
    """Show the fleet as the health service sees it: verdicts, alerts, plugins with problems.

    Parameters
    ----------
    all
        Show all plugins and alerts; by default, at most 200 alerts and 200 plugins with problems.

    """
    try:
        source, nats_url, state = fetch(health)
    except ConnectionError as error:
        return output.fail("status", str(error), code=1)
    except ValueError as error:
        return output.fail("status", str(error))
    _name_chosen("status", health, nats_url)
    now = datetime.now(UTC)
    silences = _silences("status", state.alerts, url or nats_url, now)
    if json:
        output.print_json(status.summary(state, source=source, everything=all, silences=silences))
    else:
        output.show(*status.lines(state, source=source, everything=all, now=now, silences=silences))
    return 0


@why_command.default
def show_node(
    node: str,
    plugin: str | None = None,
    /,
    *,
    since: str = "1d",
    json: output.Json = False,
    health: Health = None,
    url: events.Url = None,
) -> int:
    """Show a node's verdicts, evidence, devices, alerts, pods and latest changes.

    If health or NATS does not answer, only the data of the other is shown, and the exit code is 1.

    Parameters
    ----------
    node
        The node's name.
    plugin
        Show only this plugin, or the plugin of this resource or driver: `nvidia.com/gpu`.
    since
        The start of the changes to show: `15m`, `2h` or `7d` ago, or a time.

    """
    source, state, now, events, problems = None, None, None, None, list[str]()
    try:
        try:
            source, nats_url, state = fetch(health)
            now = datetime.now(UTC)
            _name_chosen("why", health, nats_url)
            url = url or nats_url
        except ConnectionError as error:
            problems.append(str(error))
        try:
            events = _past_events(node, since=since, url=url)
        except ConnectionError as error:
            problems.append(str(error))
    except ValueError as error:
        return output.fail("why", str(error))
    view = why.NodeView(
        node=node,
        source=source,
        state=state,
        events=events,
        since=since,
        now=now,
        only=plugin,
    )
    if events is not None and now is not None:
        fire = [*view.alerts, *(alert for each in view.plugins for alert in each.alerts)]
        view = msgspec.structs.replace(view, silences=_silences("why", fire, url, now))
    for problem in problems:
        output.warn("why", problem)
    unknown = why.unknown_name(view)
    if unknown:
        return output.fail("why", unknown)
    if json:
        output.print_json(why.report(view))
    else:
        output.show(*why.lines(view))
    return 1 if problems else 0


def _name_chosen(command: str, address: str | None, nats_url: str | None) -> None:
    """If no address was given and several stacks of `muster up` run, print which one is used."""
    if not address:
        events.name_chosen(command, nats_url)


def fetch(address: str | None) -> tuple[str, str | None, health_state.State]:
    """Return the health service's address, NATS's address if it is known, and health's state.

    Of several given addresses, the leader's is returned, or the first that answers if none leads.
    NATS's address is known if health belongs to a `muster up` of this user. Raises ConnectionError
    if nothing answers, and ValueError for an invalid address.
    """
    here = running_here()
    parts = address.split(",") if address else []
    named = [(url, dict(here).get(url)) for url in map(health_client.check_address, parts)]
    problem = _NO_HEALTH
    other: tuple[str, str | None, health_state.State] | None = None
    for url, nats_url in named or here:
        try:
            state = health_client.read_state(url)
        except ConnectionError as error:
            problem = f"health does not answer: {error}"
        except health_client.UnreadableState as error:
            problem = str(error)
        else:
            if state.service.revision is not None or not named:
                return url, nats_url, state
            other = other or (url, nats_url, state)
    if other is None:
        raise ConnectionError(problem)
    return other


def _past_events(node: str, *, since: str, url: str | None) -> list[codec.CloudEvent]:
    vocabulary.node_token(node)
    past = client.events(node=node, since=texts.since(since), url=url, follow=False)

    async def read() -> list[codec.CloudEvent]:
        return [event async for event in past]

    with events.outages_hidden() as reasons:
        try:
            return asyncio.run(read())
        except ConnectionError as error:
            raise ConnectionError(": ".join((str(error), *reasons))) from None


def _silences(
    command: str, firing: Sequence[health_state.Alert], url: str | None, now: datetime
) -> status.Silences:
    """Return the silences of these alerts; none, with a line on stderr, if NATS does not answer."""
    if not firing or url is None:
        return {}

    async def read() -> dict[str, matching.Silence]:
        async with (
            asyncio.timeout(_SILENCES_S),
            events.connect(command, url, owner=False) as connected,
        ):
            return (await writing.read_silences(connected.link))[0]

    with events.outages_hidden():
        try:
            silences = asyncio.run(read())
        except (TimeoutError, ConnectionError, ValueError) as error:
            reason = str(error) or f"NATS has not answered for {_SILENCES_S:g} s"
            output.warn(command, f"which alerts are silenced is unknown: {reason}")
            return {}
    labels = {alert.fingerprint: alert.labels for alert in firing}
    return matching.silenced(labels, silences.values(), now)


def addresses(address: str | None) -> tuple[list[str], str | None]:
    """Return health's addresses, and NATS's address if it is known, without reading the state.

    Raises ConnectionError if no address is given and no health service of `muster up` answers, and
    ValueError for an invalid address.
    """
    if address:
        return [health_client.check_address(part) for part in address.split(",")], None
    here = running_here()
    for url, nats_url in here:
        with contextlib.suppress(ConnectionError):
            # health may be restarting
            health_client.read(f"{url}/state?nodes=1", 1)
            return [url], nats_url
    raise ConnectionError(
        "the health service of `muster up` does not answer" if here else _NO_HEALTH
    )


def running_here(service: str = "health") -> list[tuple[str, str | None]]:
    """Return the addresses of a service and of NATS for each `muster up` of this user.

    The newest comes first.
    """
    return [
        (program.http, stack.nats_url)
        for stack in running.here()
        if (program := stack.program(service)) is not None and program.http
    ]
