"""Door to the Kubernetes API: reads a node's labels, and applies ours by server-side apply.

Raw requests of `kubernetes.aio`: its generated models would cost more memory than everything else
here. Never forced: a label that another manager owns stays as it is, and the answer names it.
"""

import asyncio
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec
import prometheus_client
import yaml
from kubernetes.aio.client import ApiClient, ApiException, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from muster_labeler import desired

FIELD_MANAGER: Final = "muster-labeler"

_TRIES: Final = 3
_TRY_AGAIN_S: Final = 0.1
_PASSING: Final = frozenset({408, 429, 500, 502, 503, 504})
_APPLY: Final = "application/apply-patch+yaml"
_LOST: Final = (OSError, TimeoutError, aiohttp.ClientError, ApiException)

_REQUESTS = prometheus_client.Counter(
    "muster_labeler_api_requests_total", "Requests to the Kubernetes API.", ["verb", "status"]
)


class NoCluster(Exception):
    """The settings lead to no Kubernetes API; the text says what was tried."""


class _Metadata(msgspec.Struct, frozen=True):
    uid: str
    labels: dict[str, str] = {}


class _Node(msgspec.Struct, frozen=True):
    metadata: _Metadata


class _Status(msgspec.Struct, frozen=True):
    message: str = ""


class Nodes:
    """The nodes of one cluster; an async context manager."""

    def __init__(self, configuration: Configuration, *, timeout_s: float) -> None:
        self._api = ApiClient(configuration)
        self._timeout_s = timeout_s

    @classmethod
    async def find(cls, *, kubeconfig: str | None, context: str | None, timeout_s: float) -> Self:
        """Return the cluster of a kubeconfig, else the one this runs in. Raises NoCluster."""
        configuration = Configuration()
        where = kubeconfig or "the cluster this runs in"
        try:
            if kubeconfig is not None:
                # the library prints a warning for a missing file, and complains of its content
                await asyncio.to_thread(pathlib.Path(kubeconfig).read_bytes)
                await load_kube_config(  # type: ignore[no-untyped-call]  # as the library has it
                    config_file=kubeconfig, context=context, client_configuration=configuration
                )
            else:
                load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
        except OSError as error:
            raise NoCluster(f"kubernetes: {where}: {error.strerror or error}") from None
        except (ConfigException, ValueError, TypeError, yaml.YAMLError) as error:
            raise NoCluster(f"kubernetes: {where}: {' '.join(str(error).split())}") from None
        return cls(configuration, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, name: str) -> desired.Node | desired.Unknown:
        """Return a node."""
        status, body = await self._request("GET", name)
        if status != 200:  # noqa: PLR2004  # OK
            return _unknown("get", name, status, body)
        try:
            metadata = msgspec.json.decode(body, type=_Node).metadata
        except msgspec.MsgspecError as error:
            return desired.Unknown(f"get node {name}: {error}", is_passing=True)
        return desired.Node(metadata.uid, metadata.labels)

    async def apply(
        self, name: str, node: desired.Node, labels: Mapping[str, str]
    ) -> desired.Unknown | None:
        """Write labels on a node and read them back; return None if they are there.

        The node's uid goes along: a node that was deleted meanwhile is a conflict, where without it
        server-side apply would create one (apiserver endpoints/handlers/patch.go).
        """
        patch = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "uid": node.uid, "labels": dict(labels)},
        }
        status, body = await self._request("PATCH", name, patch)
        if status not in {200, 201}:
            return _unknown("label", name, status, body)
        now = await self.get(name)
        if isinstance(now, desired.Unknown):
            return now
        missing = labels.items() - now.labels.items()
        if missing:
            read = ", ".join(f"{key}={now.labels.get(key)!r}" for key, _ in sorted(missing))
            text = f"label node {name}: written, then read back {read}"
            return desired.Unknown(text, is_passing=False)
        return None

    async def _request(
        self, method: str, name: str, patch: object | None = None
    ) -> tuple[int, bytes]:
        """Ask until there is an answer that says something; status 0 is none at all."""
        status, body = 0, b""
        for attempt in range(_TRIES):
            await asyncio.sleep(attempt * _TRY_AGAIN_S)
            try:
                status, body = await self._ask(method, name, patch)
            except _LOST as error:
                status, body = 0, (str(error) or type(error).__name__).encode()
            _REQUESTS.labels(method.lower(), str(status) if status else "no_answer").inc()
            if status and status not in _PASSING:
                break
        return status, body

    async def _ask(self, method: str, name: str, patch: object | None) -> tuple[int, bytes]:
        headers = {"Accept": "application/json"}
        query = []
        if patch is not None:
            headers["Content-Type"] = _APPLY
            query = [("fieldManager", FIELD_MANAGER), ("force", "false")]
        request = await self._api.param_serialize(
            method=method,
            resource_path="/api/v1/nodes/{name}",
            path_params={"name": name},
            query_params=query,
            header_params=headers,
            body=patch,
            auth_settings=["BearerToken"],
        )
        response = await self._api.call_api(*request, _request_timeout=self._timeout_s)
        return response.status, await response.read()  # type: ignore[no-untyped-call]


def _unknown(verb: str, name: str, status: int, body: bytes) -> desired.Unknown:
    """Say what the API did not do, in its own words: a conflict names the other manager."""
    if not status:
        return desired.Unknown(f"{verb} node {name}: {body.decode()[:500]}", is_passing=True)
    try:
        message = msgspec.json.decode(body, type=_Status).message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = ""
    text = f"{verb} node {name}: HTTP {status} {' '.join(message.split())[:1000]}".strip()
    return desired.Unknown(text, is_passing=status in _PASSING)
