"""Adapter: the health service: `muster status` and `muster why` read its state."""

import asyncio
import contextlib
import http.client
import os
import re
import tempfile
import urllib.parse
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import cyclopts
import orjson
import yaml
from cyclopts import Parameter

from muster import client, codec, vocabulary
from muster.cli import events, output, status, texts, why

status_command = cyclopts.App(name="status")
why_command = cyclopts.App(name="why")

Health = Annotated[
    str | None,
    Parameter(
        env_var="MUSTER_HEALTH_URL",
        help="Address of the health service, `http://host:port`; by default, that of `muster up` "
        "on this machine. Of several, separated by commas, the one that leads is asked.",
    ),
]

_TIMEOUT_S: Final = 5.0
_STATE_BYTES_MAX: Final = 512 * 1024 * 1024
"""The size limit of a state; a fleet of 100,000 nodes needs only a fraction of it."""
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
) -> int:
    """Show the fleet as the health service sees it: verdicts, alerts, plugins with problems.

    Parameters
    ----------
    all
        Show every plugin and alert, not only the first 200 alerts and plugins with problems.

    """
    try:
        source, _, state = fetch(health)
    except ConnectionError as error:
        return output.fail("status", str(error), code=1)
    except ValueError as error:
        return output.fail("status", str(error))
    if json:
        output.print_json(status.summary(state, source=source, everything=all))
    else:
        output.show(*status.lines(state, source=source, everything=all))
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
    """Show a node's verdicts, evidence, devices, alerts, pods and last changes.

    If health or NATS does not answer, only the data of the other is shown, and the exit code is 1.

    Parameters
    ----------
    node
        The node's name.
    plugin
        Show only this plugin, or the plugin of this resource or driver: `nvidia.com/gpu`.
    since
        Show changes since then: `15m`, `2h` or `7d` ago, or a time.

    """
    source, state, now, events, problems = None, None, None, None, list[str]()
    try:
        try:
            source, nats_url, state = fetch(health)
            now = datetime.now(UTC)
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


def fetch(address: str | None) -> tuple[str, str | None, status.State]:
    """Return the health service's address, NATS's address if it is known, and health's state.

    Raises ConnectionError if nothing answers, and ValueError for an invalid address.
    """
    named = [(_checked(part), None) for part in address.split(",")] if address else []
    problem = _NO_HEALTH
    other: tuple[str, str | None, status.State] | None = None
    for url, nats_url in named or running_here():
        try:
            state = status.decode(read(f"{url}/state"))
        except ConnectionError as error:
            problem = f"health does not answer: {error}"
        except ValueError as error:
            problem = f"{url}/state cannot be read by this version: {error}"
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


def _checked(address: str) -> str:
    """Return the address of a health service. Raises ValueError if it is not valid."""
    url = address.rstrip("/").removesuffix("/state")
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not re.fullmatch(r"[!-~]+", url):
        raise ValueError(
            f"{address!r} is not the address of a health service, such as http://127.0.0.1:8080"
        )
    return url


def running_here(service: str = "health") -> list[tuple[str, str | None]]:
    """Return the addresses of a service and NATS in each `muster up` of this user, newest first."""
    places = []
    for log in Path(tempfile.gettempdir()).glob(f"muster-*/{service}.log"):
        # `muster up` removes its files when it ends; other users' directories are not used
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            if log.stat().st_uid != os.getuid():
                continue
            with log.open("rb") as lines:
                listening = next((line for line in lines if b'"event":"listening"' in line), b"")
            # the file is written once, when the service starts
            settings = log.with_name(f"{service}.yaml")
            place = (
                str(orjson.loads(listening)["http"]),
                str(yaml.safe_load(settings.read_text("utf-8"))["bus"]["url"]),
            )
            places.append((settings.stat().st_mtime, place))
    return [place for _, place in sorted(places, reverse=True)]


def read(url: str, bytes_max: int = _STATE_BYTES_MAX) -> bytes:
    """Return the first bytes of an answer. Raises ConnectionError."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(bytes_max)
            return body
    except urllib.request.HTTPError as error:
        error.close()
        raise ConnectionError(f"{url}: HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectionError(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None
