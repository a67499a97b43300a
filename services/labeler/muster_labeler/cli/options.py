"""Adapter for the command line: the options and the cluster that the labeler's commands share."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import yaml
from cyclopts import Parameter

from muster.cli import output
from muster_labeler.check import label_plan
from muster_labeler.naming import accelerators

if TYPE_CHECKING:
    # at run time, the commands import this module only when they are called
    from muster.kubernetes import api as kubernetes_api

Flag = output.Flag

_DURATION: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(ms|s|m)?")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0}
_ATTEMPTS: Final = 4
_KUBECONFIG: Final = "~/.kube/config"
_FILE_BYTES_MAX: Final = 1024 * 1024
_UNREADABLE: Final = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    # other errors of PyYAML's constructors: `!!int ''`, `!!timestamp x`
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)


class UsageError(Exception):
    """The command cannot run with these options; the message gives the reason."""


def _seconds(_: object, tokens: Sequence[Any]) -> float:
    return seconds(tokens[0].value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which cluster to use, and how to read it.

    Parameters
    ----------
    context
        Context of the kubeconfig; by default its current one.
    kubeconfig
        By default $KUBECONFIG, else ~/.kube/config, else the cluster in which the command runs.
    timeout
        The time limit for reading everything: `20s`, `500ms`, `2m`.
    aliases
        Reviewed names: a YAML file with lines of `product: name`.
    muster_namespace
        The namespace of muster, if installed: muster's agents are the best source about GPUs.

    """

    context: str | None = None
    kubeconfig: str | None = None
    timeout: Annotated[
        float,
        Parameter(converter=_seconds, metavar="DURATION", show_default="{:g}s".format),
    ] = 20.0
    aliases: Path | None = None
    muster_namespace: str = "muster"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Which nodes to write, and how.

    Parameters
    ----------
    node
        Only this node; can be repeated.
    yes
        Do not ask for confirmation.
    rate
        Write at most this many nodes a second.
    json
        Print one JSON object.

    """

    node: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = ()
    yes: Flag = False
    rate: float = 100.0
    json: output.Json = False


Cluster = Annotated[ClusterOptions, Parameter(name="*")]
Write = Annotated[WriteOptions, Parameter(name="*")]
Label = Annotated[label_plan.Allowed, Parameter(name="*", negative="", show_default=False)]
CLUSTER: Final = ClusterOptions()
WRITE: Final = WriteOptions()
LABEL: Final = label_plan.Allowed()


async def connect(options: ClusterOptions) -> "kubernetes_api.Api":
    """Return the API of the chosen cluster. Raises api.NoCluster."""
    from muster.kubernetes import api as kubernetes_api  # noqa: PLC0415  # a command imports what it needs when it is called

    return await kubernetes_api.find(
        kubeconfig=kubeconfig(options.kubeconfig, os.environ),
        context=options.context,
        attempts=_ATTEMPTS,
        timeout_s=options.timeout,
    )


def kubeconfig(named: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the kubeconfig path that kubectl would use; None for the in-cluster configuration."""
    chosen = named or environment.get("KUBECONFIG")
    if chosen:
        return chosen
    default = Path(_KUBECONFIG).expanduser()
    if default.exists() or "KUBERNETES_SERVICE_HOST" not in environment:
        return str(default)
    return None


def seconds(text: str) -> float:
    """Return `20s`, `500ms`, `2m` or a number of seconds as seconds. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    value = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if value <= 0:
        raise ValueError(f"{text!r} is not a duration such as 20s")
    return value


def aliases(file: Path | None) -> dict[str, str]:
    """Return the reviewed names by product, from a YAML file if there is one. Raises UsageError."""
    if file is None:
        return {}
    try:
        with file.open("rb") as opened:
            names = yaml.safe_load(opened.read(_FILE_BYTES_MAX).decode())
    except (OSError, *_UNREADABLE) as error:
        raise UsageError(f"{file}: {' '.join(str(error).split())}") from None
    if names is None:
        return {}
    if not isinstance(names, dict):
        raise UsageError(f"{file}: not a mapping of products to names")
    for product, name in names.items():
        if not (isinstance(product, str) and isinstance(name, str) and accelerators.is_name(name)):
            raise UsageError(
                f"{file}: {name!r}, the name of {product!r}, is not an accelerator name"
            )
    return names
