"""Adapter: the commands that services register, by entry points of the group `muster.commands`.

The name of an entry point is that of the command, its value a `cyclopts.App` of the same name. A
service's module is imported when its command is called, and not to list the commands.
"""

import functools
import importlib
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

import muster
from muster import commands
from muster.cli import output

_GROUP: Final = "muster.commands"
_COMMANDS: Final = {
    "check": ("Say what is wrong with a cluster's GPUs, fuse and autoscalers.", "labeler"),
    "config": ("Check, show and import the configuration of the devices.", None),
    "gpu-name": ("Say what a GPU's product would be called, and why.", None),
    "label-gpus": ("Show how GPU nodes would be labelled, or label them.", "labeler"),
    "notify": ("Test receivers, explain routes, import an Alertmanager's settings.", None),
    "replay": ("Show which alerts another policy would have raised.", None),
    "unlabel-gpus": ("Remove the labels that are ours.", "labeler"),
}
"""What `muster --help` says of each command, and the extra that the command needs."""


def add(app: cyclopts.App, arguments: Sequence[str] = ()) -> None:
    """Add the services' commands to `app`, which is about to be called with `arguments`."""
    called = next((text for text in arguments if not text.startswith("-")), None)
    for name, target in sorted(_registered().items()):
        summary, extra = _COMMANDS.get(name, ("", None))
        problem = commands.missing(extra) if extra else None
        if problem is not None:
            absent = _passing_on(functools.partial(_fail, name, problem))
            app.command(absent, name=name, help=summary, help_flags=[], version_flags=[])
        elif target.endswith(":main"):
            run = _passing_on(functools.partial(_run, name, target))
            app.command(run, name=name, help=summary, help_flags=[], version_flags=[])
        else:
            # the summary would replace the command's own help
            app.command(target, name=name, help=None if name == called else summary)


def call(name: str, *arguments: str) -> int:
    """Run a service's command in this process; return its exit code."""
    app = cyclopts.App(
        name="muster",
        print_error=False,
        exit_on_error=False,
        result_action="return_int_as_exit_code_else_zero",
    )
    add(app, [name])
    return int(app([name, *arguments]) or 0)


def _registered() -> dict[str, str]:
    """Return `module:attribute` by name."""
    # what an environment was made from may be older than the tree it runs
    file = Path(muster.__file__).parents[1] / "pyproject.toml"
    if file.exists():
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        return dict(project["entry-points"][_GROUP])
    return {point.name: point.value for point in metadata.entry_points(group=_GROUP)}


def _passing_on(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    def command(
        *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    ) -> int:
        return run(arguments)

    return command


def _run(name: str, target: str, arguments: Sequence[str]) -> int:
    module, _, function = target.partition(":")
    given = (name, *arguments) if module.startswith("muster_labeler") else arguments
    return int(getattr(importlib.import_module(module), function)(given or ("--help",)))


def _fail(name: str, problem: str, _: Sequence[str]) -> int:
    return output.fail(name, problem, code=1)
