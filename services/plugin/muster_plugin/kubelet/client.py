"""Adapter: the kubelet's Registration service, and its plugin watcher, which needs no call."""

import asyncio
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from muster.pb import rpc
from muster_plugin.kubelet import protobuf, server, socket_directory

# The kubelet dials us back within our Register, for up to 10 s (pluginmanager, dial with block).
_REGISTER_TIMEOUT_S: Final = 12.0
_WATCHER_TIMEOUT_S: Final = 10.0
_UNREACHABLE: Final = ("failed to connect to all addresses", "Socket closed")
"""gRPC's error texts when nobody listens on a socket, or the listener is gone (grpc 1.7x)."""


class Refused(Exception):
    """The kubelet refused the registration, with gRPC's code and details, or was `unreachable`."""

    def __init__(self, code: str, details: str, *, unreachable: bool = False) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.unreachable = unreachable


async def register(kubelet: Path, resource: str, socket: str, *, pre_start: bool) -> str:
    """Register at the kubelet's socket; return that socket's identity. Raises Refused."""
    identity = socket_directory.identity(kubelet)
    if not identity:
        raise Refused(
            "UNAVAILABLE", f"{socket_directory.KUBELET_SOCKET} is missing", unreachable=True
        )
    request = protobuf.register_request(resource, socket, pre_start=pre_start)
    # A fresh channel with its own pool: after a refused dial, gRPC's shared pool waits for 1 s.
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=server.OWN_POOL) as channel:
        try:
            await rpc.RegistrationClient(channel).register(request, timeout=_REGISTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            unreachable = any(text in details for text in _UNREACHABLE)
            raise Refused(error.code().name, details, unreachable=unreachable) from None
    return identity


async def wait_for_plugin_watcher(endpoint: server.Endpoint) -> str:
    """Wait until the kubelet's plugin watcher has registered our socket. Raises Refused.

    A new kubelet finds the socket by itself, so no kubelet.sock identifies this registration.
    """
    try:
        async with asyncio.timeout(_WATCHER_TIMEOUT_S):
            error = await endpoint.registration_status()
    except TimeoutError:
        text = f"no plugin watcher read {endpoint.path.parent}"
        raise Refused("UNAVAILABLE", f"{text} for {_WATCHER_TIMEOUT_S:g} s") from None
    if error:
        raise Refused("UNKNOWN", error)
    return ""
