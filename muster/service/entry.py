"""Adapter for the command line of a service: reads its settings, serves, returns the exit code.

Exit codes: 0 for an orderly stop, 1 for a bug or a broken invariant (with traceback), 2 for invalid
settings or arguments, or if the service cannot start (one line for each problem on stderr).
"""

import argparse
import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

import muster
from muster import escaping, vocabulary
from muster.service import logs, runtime, settings

_HELP_WIDTH: Final = 80

Settings = TypeVar("Settings", bound=msgspec.Struct)


CannotStart = runtime.CannotStart


@dataclass(frozen=True, slots=True)
class Source(Generic[Settings]):
    """The source of the settings; `read` reloads them and may raise BadSettings."""

    file: Path | None
    read: Callable[[], Settings]


def main(
    service: str,
    shape: type[Settings],
    serve: Callable[[Settings], Coroutine[object, object, None]],
    argv: Sequence[str] | None = None,
) -> int:
    """Read the settings of `service` and run `serve`; return the exit code.

    With `--check`, the settings are only printed. `serve` may raise CannotStart.
    """
    return run(service, shape, lambda current, _: serve(current), argv=argv)


def run(
    service: str,
    shape: type[Settings],
    serve: Callable[[Settings, Source[Settings]], Coroutine[object, object, None]],
    *,
    formats: Mapping[str, settings.Foreign] | None = None,
    resolve: Callable[[Settings], object] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Run a service as `main` does; it may also reload its settings or read other `formats`.

    `resolve` returns the output of `--check` if that depends on more than the settings; it may
    raise CannotStart.
    """
    prefix = f"MUSTER_{service.upper().replace('-', '_')}"
    chosen = _parser(service, prefix, formats or {}).parse_args(argv)
    foreign = (formats or {}).get(chosen.config_format)

    def read() -> Settings:
        return settings.load(
            shape, prefix=prefix, file=chosen.config, environment=os.environ, foreign=foreign
        )

    try:
        if not chosen.check:
            # reading other formats logs warnings
            logs.configure(service)
        current = read()
        if chosen.check:
            return _print(service, escaping.yaml_of(resolve(current) if resolve else current))
        asyncio.run(serve(current, Source(chosen.config, read)))
    except settings.BadSettings as error:
        for problem in error.problems:
            complain(f"muster-{service}", problem)
        return 2
    except CannotStart as error:
        complain(f"muster-{service}", str(error))
        return 2
    return 0


def node_name(configured: str) -> str:
    """Return the node name from the settings, NODE_NAME or the host name. Raises CannotStart."""
    source = "settings" if configured else "NODE_NAME"
    name = configured or os.environ.get("NODE_NAME", "")
    if not name:
        source, name = "the host's name", socket.gethostname().lower()
    try:
        return msgspec.convert(name, vocabulary.NodeName)
    except msgspec.ValidationError:
        raise CannotStart(
            f"node: {name!r} (from {source}) is not a Kubernetes node name; "
            "set `node` in the settings or NODE_NAME in the environment"
        ) from None


def show(line: str) -> None:
    """Print a line to standard output."""
    sys.stdout.write(escaping.plain(line) + "\n")
    sys.stdout.flush()


def complain(program: str, problem: str) -> None:
    """Print a line about a problem of a program to standard error."""
    sys.stderr.write(escaping.plain(f"{program}: {problem}") + "\n")


def _print(service: str, text: str) -> int:
    """Print to standard output; return the exit code. A closed pipe is not an error."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
    except OSError as error:
        # otherwise the rest of the buffer would be written again at exit, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0
        complain(f"muster-{service}", f"standard output: {error.strerror}")
        return 1
    return 0


def _parser(service: str, prefix: str, formats: Collection[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"muster-{service}",
        # without a width argparse imports shutil, and with it every compression module
        formatter_class=functools.partial(argparse.HelpFormatter, width=_HELP_WIDTH),
        epilog=f"Every setting can also come from the environment: bus.url is {prefix}__BUS__URL.",
    )
    parser.set_defaults(config_format="")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, as YAML")
    if formats:
        parser.add_argument(
            "--config-format",
            choices=["muster", *formats],
            default="muster",
            help="format of FILE; if it is not muster's, all other settings come from the "
            "environment",
        )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the effective settings, or why the service cannot start",
    )
    parser.add_argument("--version", action="version", version=f"muster {muster.__version__}")
    return parser
