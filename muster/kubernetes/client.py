"""Adapter for the Kubernetes client library: finds a cluster and its credentials."""

import asyncio
import contextlib
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import yaml

from muster.service import lazy

# without the library's synchronous modules, which take 0.17 s and 11 MiB
lazy.make("kubernetes")
lazy.make("kubernetes.aio")
from kubernetes.aio.client import ApiClient, ApiException, Configuration  # noqa: E402
from kubernetes.aio.config import (  # noqa: E402
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

__all__ = ["Configuration", "NoCluster", "Where", "where"]

KNOWN: Final = "37"
"""The version of the library whose errors and log lines this module relies on."""

_INVALID: Final = (
    ConfigException,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
)
_LIBRARY: Final = "kubernetes.aio.config.kube_config"
_BYTES_MAX: Final = 16 * 1024 * 1024
_MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
_CLOSE_S: Final = 1.0
"""How long closing a WebSocket may take; a kubelet need not answer the close frame."""


class NoCluster(Exception):
    """These settings give no usable API address or credentials.

    The message names the source of the settings and the error.
    """


@dataclass(frozen=True, slots=True)
class Where:
    """How to reach an API; `context` names the kubeconfig's context, if one is used."""

    configuration: Configuration
    context: str | None = None
    lost: type[Exception] = ApiException
    """The errors that the library raises when it cannot send a request."""

    def open(self) -> ApiClient:
        """Return the library's client, to be closed by the caller."""
        return ApiClient(self.configuration)


async def where(*, kubeconfig: str | None, context: str | None, timeout_s: float) -> Where:
    """Return how to reach the API of a kubeconfig, or of the cluster of this process.

    If several files are named, the existing ones are used, with their first `current-context`, as
    in kubectl. A program that provides credentials may take up to `timeout_s`. Raises NoCluster.
    """
    configuration = Configuration()
    named = kubeconfig or "the cluster this runs in"
    try:
        if kubeconfig is None:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return Where(configuration)
        files = await asyncio.to_thread(_files, kubeconfig.split(os.pathsep))
        context = context or next((name for _, name in files if name), None)
        with _captured_errors() as errors:
            async with asyncio.timeout(timeout_s):
                await load_kube_config(  # type: ignore[no-untyped-call]  # as the library has it
                    config_file=os.pathsep.join(file for file, _ in files),
                    context=context,
                    client_configuration=configuration,
                    persist_config=False,
                )
    except TimeoutError:
        raise NoCluster(f"kubernetes: {named}: no credentials within {timeout_s:g} s") from None
    except OSError as error:
        raise NoCluster(f"kubernetes: {named}: {error.strerror or error}") from None
    except (*_INVALID, yaml.YAMLError) as error:
        raise NoCluster(f"kubernetes: {named}: {' '.join(str(error).split())}") from None
    if errors:
        # the library would continue without credentials
        raise NoCluster(f"kubernetes: {named}: {' '.join(errors[0].split())}")
    return Where(configuration, context)


async def websocket(
    api: ApiClient, path: str, query: Mapping[str, str], protocol: str
) -> aiohttp.ClientWebSocketResponse:
    """Open a WebSocket with the settings of `api`, including its proxy. Raises aiohttp's errors."""
    _, url, headers, *_ = await api.param_serialize(
        method="GET",
        resource_path=path,
        query_params=list(query.items()),
        auth_settings=["BearerToken"],
    )
    rest = api.rest_client
    if rest.pool_manager is None:
        # like kubernetes.aio.stream, which however ignores the proxy and the server's name
        rest.pool_manager = rest._create_pool_manager()  # noqa: SLF001
    server_name = rest.configuration.tls_server_name
    socket: aiohttp.ClientWebSocketResponse = await rest.pool_manager.ws_connect(
        url,
        headers=headers,
        protocols=(protocol,),
        proxy=rest.proxy,
        proxy_headers=rest.proxy_headers,
        max_msg_size=_MESSAGE_BYTES_MAX,
        timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        **({"server_hostname": server_name} if server_name else {}),
    )
    return socket


@contextlib.contextmanager
def _captured_errors() -> Iterator[list[str]]:
    """Collect the credential errors that the library only logs."""
    errors: list[str] = []

    class Capture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    capture, logger = Capture(logging.ERROR), logging.getLogger(_LIBRARY)
    logger.addHandler(capture)
    try:
        yield errors
    finally:
        logger.removeHandler(capture)


def _files(paths: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return the kubeconfig files that exist, each with its current context. Raises OSError.

    The library prints a warning for a missing file, and uses the last current context, not the
    first.
    """
    named = [os.path.expanduser(path) for path in paths if path]  # noqa: PTH111  # joined again
    files = [(path, _context(path)) for path in named if len(named) == 1 or os.path.exists(path)]  # noqa: PTH110  # as above
    if not files:
        raise FileNotFoundError(2, "none of these files exists")
    return files


def _context(path: str) -> str | None:
    with pathlib.Path(path).open("rb") as opened:
        tree = yaml.safe_load(opened.read(_BYTES_MAX))
    if not isinstance(tree, dict):
        raise ValueError("not a kubeconfig")  # noqa: TRY004  # the user's mistake, not ours
    context = tree.get("current-context")
    return context if isinstance(context, str) and context else None
