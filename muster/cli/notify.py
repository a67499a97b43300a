"""Adapter: people: `muster silence` and `muster dlq`."""

import re
import sys
from datetime import timedelta
from typing import Annotated

import cyclopts
from cyclopts import Parameter

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_LONGEST = timedelta(days=366)
_Url = Annotated[str | None, Parameter(env_var="NATS_URL")]

silence = cyclopts.App(name="silence", help="Have nothing told of some alerts for a while.")
dlq = cyclopts.App(name="dlq", help="Look at what could not be delivered, and send it again.")


def register(app: cyclopts.App) -> None:
    """Add the commands."""
    app.command(silence)
    app.command(dlq)


@silence.command(name="add")
def silence_add(
    *matchers: str,
    duration: str = "1h",
    comment: str,
    author: str | None = None,
    url: _Url = None,
) -> int:
    """Silence what meets every matcher, from now on; prints the silence's id.

    Parameters
    ----------
    matchers
        As Alertmanager writes them: `node=node-a`, `'kind=~"stuck|missing"'`.
    duration
        For how long: `90s`, `15m`, `1h30m`, `7d`; a year at most.
    comment
        Why.
    author
        Who; by default whoever is logged in.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import silence as command  # noqa: PLC0415  # a command pays for its own imports

    lasts = _age(duration)
    if lasts is None:
        print(
            f"muster silence: --duration: {duration!r} is none such as 2h or 1h30m, up to a year",
            file=sys.stderr,
        )
        return 2
    return command.add(matchers, duration=lasts, comment=comment, author=author, url=url)


@silence.command(name="list")
def silence_list(
    *,
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002  # the option's name
    json: Annotated[bool, Parameter(negative="")] = False,
    url: _Url = None,
) -> int:
    """Print the silences that last.

    Parameters
    ----------
    all
        Those that are over as well.
    json
        Print each as a JSON object.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import silence as command  # noqa: PLC0415  # a command pays for its own imports

    return command.show(everything=all, as_json=json, url=url)


@silence.command(name="expire")
def silence_expire(
    silence_id: str,
    *,
    url: _Url = None,
) -> int:
    """End a silence now.

    Parameters
    ----------
    silence_id
        Its id.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import silence as command  # noqa: PLC0415  # a command pays for its own imports

    return command.expire(silence_id, url=url)


@dlq.command(name="list")
def dlq_list(
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    url: _Url = None,
) -> int:
    """Print the dead letters.

    Parameters
    ----------
    json
        Print each as a JSON object.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import dlq as command  # noqa: PLC0415  # a command pays for its own imports

    return command.show_all(as_json=json, url=url)


@dlq.command(name="show")
def dlq_show(
    letter_id: str,
    *,
    url: _Url = None,
) -> int:
    """Print one dead letter whole.

    Parameters
    ----------
    letter_id
        Its id.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import dlq as command  # noqa: PLC0415  # a command pays for its own imports

    return command.show(letter_id, url=url)


@dlq.command(name="replay")
def dlq_replay(
    letter_id: str,
    *,
    url: _Url = None,
) -> int:
    """Put dead letters back into the outbox.

    Parameters
    ----------
    letter_id
        The id of one, the name of a receiver for all of its, or `all`.
    url
        Where NATS is; by default this machine.

    """
    from muster.cli import dlq as command  # noqa: PLC0415  # a command pays for its own imports

    return command.replay(letter_id, url=url)


def _age(text: str) -> timedelta | None:
    if not re.fullmatch(r"(\d{1,5}[smhdw])+", text):
        return None
    parts = re.findall(r"(\d+)([smhdw])", text)
    found = timedelta(seconds=sum(int(count) * _UNITS[unit] for count, unit in parts))
    return found if timedelta(0) < found <= _LONGEST else None
