"""Door to people: the command `muster`; each sub-command is imported when it is called."""

import os
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated

import cyclopts
from cyclopts import Parameter

import muster
from muster import commands
from muster.cli import notify

app = cyclopts.App(
    name="muster",
    help="The Kubernetes device plugin suite that never fails silently.",
    version=f"muster {muster.__version__}",
)
app.register_install_completion_command()
notify.register(app)

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
    from muster.cli import up as command  # noqa: PLC0415  # a command pays for its own imports

    return _stack_missing("up") or command.run(plain=plain)


@app.command
def demo(*, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Play one story and exit: faults, verdicts, notifications, recovery, with measured times.

    Parameters
    ----------
    json
        Print one JSON object with an entry a step instead of the timeline.

    """
    from muster.cli import demo as command  # noqa: PLC0415  # a command pays for its own imports

    return _stack_missing("demo") or command.run(as_json=json)


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


@app.command(name="config", help_flags=[], version_flags=[])
def configure(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Check, show and import the configuration of the devices: `muster config --help`."""
    import subprocess  # noqa: PLC0415  # a command pays for its own imports

    # the plugin knows its configuration; the command imports no service
    program = [sys.executable, "-m", "muster_plugin.configure", *(arguments or ("--help",))]
    # FILE may be a pipe of the caller's: <(...)
    done = subprocess.run(program, check=False, close_fds=False)  # noqa: S603  # our own program
    return done.returncode


@app.command(help_flags=[], version_flags=[])
def check(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int:
    """Say what is wrong with a cluster's GPUs, fuse and autoscalers: `muster check --help`."""
    return _in_the_labeler("check", arguments)


@app.command(help_flags=[], version_flags=[])
def label_gpus(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int:
    """Show how GPU nodes would be labelled, or label them: `muster label-gpus --help`."""
    return _in_the_labeler("label-gpus", arguments)


@app.command(help_flags=[], version_flags=[])
def unlabel_gpus(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
) -> int:
    """Remove the labels that are ours: `muster unlabel-gpus --help`."""
    return _in_the_labeler("unlabel-gpus", arguments)


@app.command(help_flags=[], version_flags=[])
def gpu_name(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int:
    """Say what a GPU's product would be called, and why: `muster gpu-name --help`."""
    return _in_the_labeler("gpu-name", arguments)


def _in_the_labeler(command: str, arguments: tuple[str, ...]) -> int:
    """Become the labeler's own command: terminal, signals and exit code are then its own."""
    problem = None if command == "gpu-name" else commands.missing("labeler")
    if problem is not None:
        print(f"muster {command}: {problem}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    return os.execv(  # noqa: S606  # our own program, without a shell
        sys.executable, [sys.executable, "-m", "muster_labeler.command", command, *arguments]
    )


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
    return int(app(result_action="return_int_as_exit_code_else_zero") or 0)


if __name__ == "__main__":
    sys.exit(main())
