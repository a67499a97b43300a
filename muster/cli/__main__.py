"""Adapter: people: the command `muster`; each sub-command is imported when it is called."""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

import muster
from muster import commands
from muster.cli import auth, notify, output, services

if TYPE_CHECKING:
    from muster import codec

app = cyclopts.App(
    name="muster",
    help="The Kubernetes device plugin suite that never fails silently.",
    version=f"muster {muster.__version__}",
    print_error=False,
    exit_on_error=False,
    result_action="return_int_as_exit_code_else_zero",
)
app.register_install_completion_command()
auth.register(app)
notify.register(app)
services.add(app, sys.argv[1:])

_Health = Annotated[str | None, Parameter(env_var="MUSTER_HEALTH_URL")]

_AGE_MAX_S = 366 * 86_400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@app.command
def up(*, plain: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Run the whole of muster on this machine until Ctrl-C: NATS, services, simulated nodes.

    Parameters
    ----------
    plain
        Print one line an event instead of a live view.

    """
    from muster.cli import up as cli_up  # noqa: PLC0415  # a command pays for its own imports

    return _stack_missing("up") or cli_up.run(plain=plain)


@app.command
def demo(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Play one story and exit: faults, verdicts, notifications, recovery, with measured times.

    Parameters
    ----------
    json
        Print one JSON object with an entry a step instead of the timeline.

    """
    from muster.cli import demo as cli_demo  # noqa: PLC0415  # a command pays for its own imports

    return _stack_missing("demo") or cli_demo.run(as_json=json)


@app.command
def events(
    type: Annotated[str, Parameter(name=["--type", "-t"])] = "*",  # noqa: A002  # the option's name
    *,
    node: str = "*",
    since: str | None = None,
    follow: bool = True,
    json: Annotated[bool, Parameter(negative="")] = False,
    url: Annotated[str | None, Parameter(env_var="NATS_URL")] = None,
) -> int:
    """Print what happens on the bus, one line an event, until Ctrl-C.

    Parameters
    ----------
    type
        Which types, as a shell pattern: `device.*`, `alert.changed`.
    node
        Which nodes, as a shell pattern.
    since
        Start in the past: `90s`, `15m`, `2h`, `7d`, or a time such as `2026-11-21T10:00:00Z`.
    follow
        Go on with what happens from now on; `--no-follow` ends when the past is told.
    json
        Print each event as a JSON object.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import events as command  # noqa: PLC0415  # a command pays for its own imports

    try:
        start = _since(since)
    except ValueError as error:
        print(f"muster events: --since: {error}", file=sys.stderr)
        return 2
    return command.run(type, node=node, since=start, follow=follow, as_json=json, url=url)


@app.command
def status(
    *,
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002  # the option's name
    json: Annotated[bool, Parameter(negative="")] = False,
    health: _Health = None,
) -> int:
    """Show the fleet as the health service sees it: verdicts, alerts, and who is not well.

    Parameters
    ----------
    all
        Every plugin and every alert, not only who is not well, and the first 200.
    json
        Print one JSON object.
    health
        Where the health service is, `http://host:port`; by default that of `muster up` here.

    """
    from muster.cli import health as where  # noqa: PLC0415  # a command pays for its own imports
    from muster.cli import status as command  # noqa: PLC0415  # as above

    try:
        source, _, state = where.ask(health)
    except (ConnectionError, ValueError) as error:
        print(f"muster status: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    if json:
        return _print(command.summary(state, source=source, everything=all))
    return _print(command.lines(state, source=source, everything=all))


@app.command
def why(
    node: str,
    /,
    *,
    since: str = "1d",
    json: Annotated[bool, Parameter(negative="")] = False,
    health: _Health = None,
    url: Annotated[str | None, Parameter(env_var="NATS_URL")] = None,
) -> int:
    """Show what is known about a node: verdicts, evidence, devices, alerts, pods, last changes.

    Where health or NATS does not answer, what the other knows is shown, and the exit code is 1.

    Parameters
    ----------
    node
        Its name.
    since
        From when on changes are shown: `15m`, `2h`, `7d` ago, or a time.
    json
        Print one JSON object.
    health
        Where the health service is, `http://host:port`; by default that of `muster up` here.
    url
        Where NATS is; by default that of the same `muster up`, or this machine.

    """
    import asyncio  # noqa: PLC0415  # a command pays for its own imports

    from muster.cli import health as where  # noqa: PLC0415  # as above
    from muster.cli import why as command  # noqa: PLC0415  # as above

    source, state, heard, problems = None, None, None, list[str]()
    try:
        try:
            source, beside, state = where.ask(health)
            url = url or beside
        except ConnectionError as error:
            problems.append(str(error))
        try:
            heard = asyncio.run(_past(node, since=_since(since), url=url))
        except ConnectionError as error:
            problems.append(str(error))
    except ValueError as error:
        print(f"muster why: {error}", file=sys.stderr)
        return 2
    known = command.Known(node=node, source=source, state=state, heard=heard, since=since)
    for problem in problems:
        print(f"muster why: {problem}", file=sys.stderr)
    if command.stranger(known):
        print(f"muster why: {command.stranger(known)}", file=sys.stderr)
        return 2
    code = _print(command.report(known) if json else command.lines(known))
    return 1 if problems else code


async def _past(
    node: str, *, since: datetime | timedelta | None, url: str | None
) -> "list[codec.CloudEvent]":
    from muster import client, vocabulary  # noqa: PLC0415  # a command pays for its own imports

    vocabulary.node_token(node)
    told = client.events(node=node, since=since, url=url, follow=False)
    return [event async for event in told]


def _print(shown: Sequence[str] | dict[str, object]) -> int:
    """Print lines, or one JSON object."""
    if isinstance(shown, dict):
        output.print_json(shown)
    else:
        print("\n".join(shown))
    return 0


def _stack_missing(command: str) -> int:
    problem = commands.missing("plugin", "labeler", "local")
    if problem is None:
        return 0
    print(f"muster {command}: {problem}", file=sys.stderr)
    return 1


def _since(text: str | None) -> datetime | timedelta | None:
    """Read how long ago, or when; a time without a zone is UTC."""
    if text is None:
        return None
    age = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if age:
        seconds = int(age[1]) * _UNITS[age[2]]
        if seconds > _AGE_MAX_S:
            raise ValueError(f"{text!r} is more than a year ago")
        return timedelta(seconds=seconds)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither an age such as 15m nor an ISO time") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def main() -> int:
    """Run the command; return the exit code."""
    try:
        with output.guarded():
            return int(app(sys.argv[1:]) or 0)
    except cyclopts.CycloptsError as error:
        return output.fail(" ".join(error.command_chain or ()), str(error))
    except output.Unwritable as error:
        if error.is_closed:
            return 0
        return output.fail("", f"standard output: {error}", code=1)


if __name__ == "__main__":
    sys.exit(main())
