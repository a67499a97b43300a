"""Adapter: the kubelet that is to list a resource: we register, or its plugin watcher finds us."""

import asyncio
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from muster.pb import rpc
from muster_plugin.kubelet import protobuf, server, socket_directory

# The kubelet dials us back within our Register, for up to 10 s (pluginmanager, dial with block).
_REGISTER_TIMEOUT_S: Final = 12.0
_FIND_TIMEOUT_S: Final = 10.0
_NOT_THERE: Final = ("failed to connect to all addresses", "Socket closed")
"""What gRPC says where nobody listens on a socket, or whoever did is gone (grpc 1.7x)."""


class Refused(Exception):
    """The kubelet did not take us: gRPC's code, and its words; or it was not there (`away`)."""

    def __init__(self, code: str, details: str, *, away: bool = False) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details
        self.away = away


async def register(kubelet: Path, resource: str, socket: str, *, pre_start: bool) -> str:
    """Register at the kubelet's socket; return which one that was. Raises Refused."""
    identity = socket_directory.identity(kubelet)
    if not identity:
        raise Refused("UNAVAILABLE", f"{socket_directory.KUBELET_SOCKET} is missing", away=True)
    request = protobuf.register_request(resource, socket, pre_start=pre_start)
    # A fresh channel with its own pool: after a refused dial, gRPC's own would wait for 1 s.
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=server.OWN_POOL) as channel:
        try:
            await rpc.RegistrationClient(channel).register(request, timeout=_REGISTER_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            away = any(text in details for text in _NOT_THERE)
            raise Refused(error.code().name, details, away=away) from None
    return identity


async def be_found(ours: server.Endpoint) -> str:
    """Wait for the kubelet's plugin watcher, which looks for sockets by itself. Raises Refused.

    A new kubelet takes us by itself, so this one's kubelet.sock would prove nothing.
    """
    try:
        async with asyncio.timeout(_FIND_TIMEOUT_S):
            error = await ours.noticed()
    except TimeoutError:
        text = f"no plugin watcher looked into {ours.path.parent}"
        raise Refused("UNAVAILABLE", f"{text} for {_FIND_TIMEOUT_S:g} s") from None
    if error:
        raise Refused("UNKNOWN", error)
    return ""
