"""Adapter: the command line: what the commands for clusters have in common."""

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from muster_labeler import inventory, reports

if TYPE_CHECKING:
    from muster.kubernetes import api as kubernetes_api

_AGE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_ATTEMPTS: Final = 4
_DEFAULT: Final = "~/.kube/config"


class Mistake(Exception):
    """What was asked for cannot be; the text says why."""


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Let a command be told which cluster."""
    parser.add_argument("--context", help="context of the kubeconfig (default: its current one)")
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="default: $KUBECONFIG, else ~/.kube/config, else the cluster this runs in",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=20.0,
        metavar="20s",
        help="how long reading may take in all (default: 20s)",
    )
    parser.add_argument(
        "--aliases",
        type=pathlib.Path,
        metavar="FILE",
        help="reviewed names: YAML lines of `product: name`",
    )
    parser.add_argument(
        "--muster-namespace",
        default=inventory.NAMESPACE,
        metavar="NAME",
        help="where muster is installed, if it is; its agents know most (default: muster)",
    )


async def api(chosen: argparse.Namespace) -> "kubernetes_api.Api":
    """Return the cluster that was chosen. Raises api.NoCluster."""
    from muster.kubernetes import api as kubernetes_api  # noqa: PLC0415  # naming alone needs no cluster

    return await kubernetes_api.find(
        kubeconfig=kubeconfig(chosen, os.environ),
        context=chosen.context,
        attempts=_ATTEMPTS,
        timeout_s=chosen.timeout,
    )


def kubeconfig(chosen: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """Return the kubeconfig that was named, as kubectl would find it; None is in a pod."""
    found: str | None = chosen.kubeconfig or environment.get("KUBECONFIG")
    if found:
        return found
    default = pathlib.Path(_DEFAULT).expanduser()
    if default.exists() or "KUBERNETES_SERVICE_HOST" not in environment:
        return str(default)
    return None


def seconds(text: str) -> float:
    """Read `20s`, `500ms`, `2m` or a number of seconds."""
    found = _AGE.fullmatch(text)
    value = float(found[1]) * _UNITS[found[2] or "s"] if found else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 20s")
    return value


def mistake(command: str, text: str) -> int:
    """Tell a person what cannot be; return the exit code for it."""
    tell(command, text)
    return 2


def tell(command: str, text: str) -> None:
    """Tell a person something beside the command's own output."""
    sys.stderr.write(f"muster {command}: {reports.plain(text)}\n")


def progress() -> Callable[[str], None]:
    """Return what tells how far we have come: to people, on one line; to files nothing."""
    if not sys.stderr.isatty():
        return lambda _: None

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if text else "\r\x1b[K")
        sys.stderr.flush()

    return show
