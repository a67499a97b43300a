"""Adapter: finds the commands of `muster`, including those that services register as entry points.

An entry point in the group `muster.commands` is named after its command, and refers to a
`cyclopts.App` with that name. A command's module is imported when the command is called, not when
commands are listed.
"""

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Annotated, Final, NamedTuple

import cyclopts
from cyclopts import Parameter

import muster
from muster import commands
from muster.cli import output

OPTIONS: Final = ("--context", "--namespace")
"""The options of `muster` itself, which may precede a command; each takes a value."""
_GROUP: Final = "muster.commands"


class Command(NamedTuple):
    """A command's help text and the extras that it needs.

    `target` is `module:attribute` of its App; empty if a service registers the command.
    """

    summary: str
    extras: tuple[str, ...] = ()
    target: str = ""


_UP_EXTRAS: Final = ("plugin", "labeler", "notifier", "local")
COMMANDS: Final = {
    "auth": Command(
        "Create and change the keys and credentials for the bus.", ("auth",), "muster.cli.auth:app"
    ),
    "break": Command(
        "Cause a fault in the running `muster up`; without a fault, list the faults.",
        _UP_EXTRAS,
        "muster.cli.breaking:break_app",
    ),
    "check": Command(
        "Report what is wrong with a cluster's GPUs, fuse and autoscalers.", ("labeler",)
    ),
    "config": Command("Check, show and import the device configuration."),
    "console": Command(
        "Show the fleet in a browser: nodes, evidence, alerts, live events.", ("console",)
    ),
    "demo": Command(
        "Run one scenario with faults, verdicts, notifications, recovery and timings, and exit.",
        _UP_EXTRAS,
        "muster.cli.demo:app",
    ),
    "dlq": Command(
        "List and show dead letters, and replay undelivered notifications.",
        (),
        "muster.cli.dlq:dead_letters_app",
    ),
    "doctor": Command(
        "Check whether muster itself works: pods, bus, streams, leaders, versions, receivers.",
        (),
        "muster.cli.doctor:app",
    ),
    "events": Command(
        "Print the events on the bus, one line each, until Ctrl-C.",
        (),
        "muster.cli.events:app",
    ),
    "gpu-name": Command("Show which accelerator name a GPU product gets, and why."),
    "label-gpus": Command("Show how GPU nodes would be labelled, or label them.", ("labeler",)),
    "mend": Command(
        "Undo the faults that `muster break` caused: all, or only those that are named.",
        _UP_EXTRAS,
        "muster.cli.breaking:mend_app",
    ),
    "notify": Command(
        "Add and test receivers, explain routes, import an Alertmanager's settings.", ("notifier",)
    ),
    "replay": Command("Show which alerts another policy would have raised."),
    "silence": Command(
        "Suppress the notifications for some alerts for a limited time.",
        (),
        "muster.cli.silence:silence_app",
    ),
    "status": Command(
        "Show the fleet as the health service sees it: verdicts, alerts, plugins with problems.",
        (),
        "muster.cli.health:status_command",
    ),
    "top": Command(
        "Show the fleet, live: nodes by urgency, why each is in its state, alerts, events.",
        (),
        "muster.cli.top:app",
    ),
    "uninstall": Command(
        "Remove muster from a cluster, including everything that it wrote to nodes.", ("labeler",)
    ),
    "unlabel-gpus": Command("Remove the labels that muster wrote.", ("labeler",)),
    "up": Command(
        "Run all of muster on this machine until Ctrl-C: NATS, services, simulated nodes.",
        _UP_EXTRAS,
        "muster.cli.up:app",
    ),
    "why": Command(
        "Show a node's verdicts, evidence, devices, alerts, pods and latest changes.",
        (),
        "muster.cli.health:why_command",
    ),
}


def add(app: cyclopts.App, arguments: Sequence[str] = ()) -> None:
    """Add every command to `app`, which is about to be called with `arguments`."""
    called = command_of(arguments)
    for name, target in sorted(targets().items()):
        command = COMMANDS.get(name, Command(""))
        if name != called:
            app.command(target, name=name, help=command.summary)
        elif problem := missing(name):
            app.command(_failing(name, problem), name=name, help_flags=[], version_flags=[])
        else:
            # the command prints its own help
            app.command(target, name=name)


def missing(name: str) -> str | None:
    """Return a message if an extra that the command needs is not installed; otherwise None."""
    return commands.missing(*COMMANDS.get(name, Command("")).extras)


def command_of(arguments: Sequence[str]) -> str | None:
    """Return the called command, which may follow options of `muster` itself; None if none is."""
    words = iter(arguments)
    for word in words:
        if word in OPTIONS:
            next(words, None)  # the option's value
        elif not word.startswith("-"):
            return word
    return None


def call(name: str, *arguments: str) -> int:
    """Run a command in this process; return its exit code."""
    app = cyclopts.App(
        name="muster",
        version=f"muster {muster.__version__}",
        print_error=False,
        exit_on_error=False,
        result_action="return_int_as_exit_code_else_zero",
    )
    add(app, [name])
    return int(app([name, *arguments]) or 0)


def targets() -> dict[str, str]:
    """Return the `module:attribute` of every command, by command name."""
    own = {name: command.target for name, command in COMMANDS.items() if command.target}
    return own | {point.name: point.value for point in metadata.entry_points(group=_GROUP)}


def _failing(name: str, problem: str) -> Callable[..., int]:
    def command(*_: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
        return output.fail(name, problem, code=1)

    return command
