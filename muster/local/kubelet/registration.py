"""Adapter: how plugins register: through the kubelet's socket, or found by the plugin watcher."""

import asyncio
import contextlib
import os
import pathlib
import stat
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from muster.local.kubelet import plugins, rules
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster.pb import rpc

DIRECTORY = "plugins_registry"
_POLL_S = 0.2
_DIAL_TIMEOUT_S = 10.0
_INFO_TIMEOUT_S = 1.0
_NOTIFY_TIMEOUT_S = 5.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 122.0
# Differs for a socket that was made later under the same name.
_Stamp = tuple[int, int]


class Registration:
    """The registration service of one life; `connect(resource, socket)` dials the plugin."""

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
        """Register a plugin. The caller's deadline includes the dial and the options."""
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


class _Refused(Exception):
    """The error that the plugin gets in NotifyRegistrationStatus."""


class Watcher:
    """Registers the sockets in the directory, and deregisters those that leave it.

    `connect(resource, socket)` and `drop(resource)` are the kubelet's.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        connect: Callable[[str, str], Awaitable[None]],
        drop: Callable[[str], Awaitable[object]],
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._drop = drop
        self._stamps: dict[str, _Stamp] = {}
        self._resources: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                await self._reconcile(_sockets(self._directory))
                await asyncio.sleep(_POLL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _reconcile(self, stamps: dict[str, _Stamp]) -> None:
        for path, stamp in [*self._stamps.items()]:
            if stamps.get(path) != stamp:
                await self._forget(path)
        for path in stamps.keys() - self._stamps.keys():
            self._stamps[path] = stamps[path]
            self._tasks[path] = asyncio.create_task(self._register(path), name=f"register {path}")

    async def _forget(self, path: str) -> None:
        del self._stamps[path]
        task = self._tasks.pop(path)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        resource = self._resources.pop(path, None)
        if resource is not None:
            await self._drop(resource)

    async def _register(self, path: str) -> None:
        delay_s = _BACKOFF_S
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with grpc.aio.insecure_channel(
                    f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]
                ) as channel:
                    if await self._introduce(path, channel):
                        return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _BACKOFF_MAX_S)

    async def _introduce(self, path: str, channel: grpc.aio.Channel) -> bool:
        """Get the plugin's info, register it, send it the result; return whether it succeeded."""
        async with asyncio.timeout(_DIAL_TIMEOUT_S):
            await channel.channel_ready()
        stub = rpc.PluginWatcherClient(channel)
        info = await stub.get_info(pr.InfoRequest(), timeout=_INFO_TIMEOUT_S)
        try:
            await self._admit(path, info)
        except _Refused as refused:
            answer = pr.RegistrationStatus(plugin_registered=False, error=str(refused))
            await stub.notify_registration_status(answer, timeout=_NOTIFY_TIMEOUT_S)
            return False
        try:
            answer = pr.RegistrationStatus(plugin_registered=True)
            await stub.notify_registration_status(answer, timeout=_NOTIFY_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            await self._drop(self._resources.pop(path))
            raise
        return True

    async def _admit(self, path: str, info: pr.PluginInfo) -> None:
        if info.type != rules.PLUGIN_TYPE:
            raise _Refused(
                "RegisterPlugin error -- no handler registered for plugin type: "
                f"{info.type} at socket {path}"
            )
        refusal = rules.watcher_refusal(info.name, list(info.supported_versions))
        if refusal is not None:
            raise _Refused(f"RegisterPlugin error -- plugin validation failed with err: {refusal}")
        try:
            await self._connect(info.name, info.endpoint or path)
        except plugins.NotConnected as error:
            raise _Refused(
                f"RegisterPlugin error -- plugin registration failed with err: {error}"
            ) from None
        self._resources[path] = info.name


def _sockets(directory: pathlib.Path) -> dict[str, _Stamp]:
    stamps: dict[str, _Stamp] = {}
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118 (a Path per file and poll is wasted)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                if stat.S_ISSOCK(status.st_mode) and not name.startswith("."):
                    stamps[path] = (status.st_ino, status.st_mtime_ns)
    return stamps
