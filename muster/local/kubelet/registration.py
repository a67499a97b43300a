"""Adapter: kubelet.sock: answers Register, after the plugin was dialled and asked its options."""

import os
import pathlib
from collections.abc import Awaitable, Callable

import grpc

from muster.local.kubelet import plugins, rules
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import rpc


class Registration:
    """The registration service of one life; `connect(resource, socket)` dials and asks."""

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        accepts: Callable[[], bool],
        connect: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._accepts = accepts
        self._connect = connect

    async def register(
        self, request: dp.RegisterRequest, context: rpc.Context[dp.RegisterRequest, dp.Empty]
    ) -> dp.Empty:
        """Take the plugin in. The caller's deadline counts for the dial and the options too."""
        if not self._accepts():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "registrations are switched off")
        refusal = rules.refusal(request.version, request.resource_name)
        if refusal is not None:
            await context.abort(grpc.StatusCode.UNKNOWN, refusal)
        try:
            await self._connect(request.resource_name, self._path(request.endpoint))
        except plugins.NotConnected as error:
            await context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return dp.Empty()

    def _path(self, endpoint: str) -> str:
        # Go's filepath.Join: an absolute endpoint stays below the directory, `..` is resolved.
        return os.path.normpath(f"{self._directory}/{endpoint}")
