"""Adapter: the Kubernetes client library: where a cluster is and who we are there; no more of it.

The library's packages import everything that they have: OAuth, urllib3, a second client, 11 MiB
that no request here needs. Measured with kubernetes 37 and CPython 3.11.
"""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import yaml


def _hollow(packages: Iterable[str]) -> list[str]:
    """Have packages of which only modules are needed without what their `__init__` would load."""
    made = []
    for name in packages:
        package = name.rpartition(".")[0]
        where = sys.modules[package].__path__ if package else None
        spec = importlib.machinery.PathFinder.find_spec(name, where)
        if name in sys.modules or spec is None:
            continue
        sys.modules[name] = importlib.util.module_from_spec(spec)
        made.append(name)
    return made


_MADE: Final = _hollow(("kubernetes", "kubernetes.aio", "kubernetes.aio.utils"))

from kubernetes.aio.client import (  # noqa: E402  # after what they would load
    ApiClient,
    ApiException,
    Configuration,
)
from kubernetes.aio.config import (  # noqa: E402  # the same
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

for _name in _MADE:
    # others may import for themselves what these did not
    del sys.modules[_name]

__all__ = ["ApiClient", "ApiException", "Configuration", "NoCluster", "Where", "where"]

_WRONG: Final = (ConfigException, ValueError, TypeError, KeyError, AttributeError, RecursionError)
_LIBRARY: Final = "kubernetes.aio.config.kube_config"
_BYTES_MAX: Final = 16 * 1024 * 1024


class NoCluster(Exception):
    """The settings lead to no Kubernetes API; the text says what was tried."""


@dataclass(frozen=True, slots=True)
class Where:
    """How to reach an API; `context` is the one of the kubeconfig, if it was one."""

    configuration: Configuration
    context: str | None = None


async def where(*, kubeconfig: str | None, context: str | None, timeout_s: float) -> Where:
    """Return how to reach the API of a kubeconfig, else of the cluster this runs in.

    Like kubectl: of several files those that are there, and the first `current-context` there is.
    A program that gives credentials is waited for no longer than `timeout_s`. Raises NoCluster.
    """
    found = Configuration()
    named = kubeconfig or "the cluster this runs in"
    try:
        if kubeconfig is None:
            load_incluster_config(client_configuration=found)  # type: ignore[no-untyped-call]
            return Where(found)
        files = await asyncio.to_thread(_files, kubeconfig.split(os.pathsep))
        context = context or next((name for _, name in files if name), None)
        with _complaints() as complaints:
            async with asyncio.timeout(timeout_s):
                await load_kube_config(  # type: ignore[no-untyped-call]  # as the library has it
                    config_file=os.pathsep.join(file for file, _ in files),
                    context=context,
                    client_configuration=found,
                    persist_config=False,
                )
    except TimeoutError:
        raise NoCluster(f"kubernetes: {named}: no credentials within {timeout_s:g} s") from None
    except OSError as error:
        raise NoCluster(f"kubernetes: {named}: {error.strerror or error}") from None
    except (*_WRONG, yaml.YAMLError) as error:
        raise NoCluster(f"kubernetes: {named}: {' '.join(str(error).split())}") from None
    if complaints:
        # the library would go on as nobody
        raise NoCluster(f"kubernetes: {named}: {' '.join(complaints[0].split())}")
    return Where(found, context)


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    """Give what the library only logs: that there are no credentials to be had."""
    said: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    heard, logger = Heard(logging.ERROR), logging.getLogger(_LIBRARY)
    logger.addHandler(heard)
    try:
        yield said
    finally:
        logger.removeHandler(heard)


def _files(paths: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the files that are there with the context that each names. Raises OSError.

    The library prints a warning for a missing file, and lets the last named context win.
    """
    named = [os.path.expanduser(path) for path in paths if path]  # noqa: PTH111  # joined again
    found = [(path, _context(path)) for path in named if len(named) == 1 or os.path.exists(path)]  # noqa: PTH110  # as above
    if not found:
        raise FileNotFoundError(2, "none of these files is there")
    return found


def _context(path: str) -> str | None:
    with pathlib.Path(path).open("rb") as opened:
        tree = yaml.safe_load(opened.read(_BYTES_MAX))
    if not isinstance(tree, dict):
        raise ValueError("no kubeconfig")  # noqa: TRY004  # the user's mistake, not ours
    named = tree.get("current-context")
    return named if isinstance(named, str) and named else None
