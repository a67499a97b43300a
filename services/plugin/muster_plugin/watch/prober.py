"""Adapter: probes sockets: one connection each, one call, and what came of it.

A plugin is asked for its options, as the kubelet does when it registers; a socket in the registry
is asked what it is. The connection is closed in order, and nothing is read beyond a limit.
"""

import asyncio
import errno
import functools
import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from google.protobuf import message

from muster import blocking, vocabulary
from muster.pb import deviceplugin_pb2 as dp
from muster.pb import pluginregistration_pb2 as pr
from muster_plugin.kubelet import unary_client
from muster_plugin.watch import naming, observation, processes, sockets

TIMEOUT_S: Final = 4.0
_NAME_MAX: Final = 253
_DRIVER: Final = re.compile(r"[A-Za-z0-9](?:[-.A-Za-z0-9]*[A-Za-z0-9])?")
_ENDPOINTS: Final = "plugins"
_ENDPOINT_TIMEOUT_S: Final = 1.0
_HANGING_MAX: Final = 8
_DETAIL_MAX: Final = 300
_WAITS: Final = "its process waits for a driver or a disk (state D)"
_OPTIONS: Final = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
_INFO: Final = "/pluginregistration.Registration/GetInfo"
_KINDS: Final = {
    "DevicePlugin": vocabulary.WatchedKind.DEVICE_PLUGIN,
    "DRAPlugin": vocabulary.WatchedKind.DRA_DRIVER,
    "CSIPlugin": vocabulary.WatchedKind.CSI_DRIVER,
}
_Answer = observation.Answer
_Message = TypeVar("_Message", bound=message.Message)


class _Result(Exception):
    """What came of a probe; raised where it ends early."""

    def __init__(
        self, answer: _Answer, detail: str = "", *, driver: observation.Driver | None = None
    ) -> None:
        super().__init__(detail)
        self.answer = answer
        self.detail = detail[:_DETAIL_MAX]
        self.driver = driver


class Prober:
    """Probes sockets below `root`, a few at a time; `on_result` gets each result.

    `on_problem` gets why a socket may not be connected to.
    """

    def __init__(
        self,
        root: Path,
        watch: processes.ProcessWatch,
        *,
        on_result: Callable[[observation.Probed], None],
        on_problem: Callable[[str], None],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.counts = dict.fromkeys(_Answer, 0)
        self._root = root
        self._timeout_s = timeout_s
        self._watch = watch
        self._on_result = on_result
        self._on_problem = on_problem
        self._calls: dict[Path, blocking.Serial] = {}
        """The connections to endpoints, of which some may hang."""
        self._free = asyncio.Semaphore(sockets.AT_ONCE_MAX)

    async def probe(self, file: observation.SocketFile) -> None:
        """Probe one socket."""
        async with self._free:
            probed = await self._probed(file)
        self.counts[probed.answer] += 1
        self._on_result(probed)

    async def _probed(self, file: observation.SocketFile) -> observation.Probed:
        process: observation.Process | None = None
        try:
            with self._connected(self._root / file.path, file.identity) as connection:
                process = self._watch.peer(connection, file.path)
                result = await self._asked(connection, file)
        except _Result as failed:
            result = failed
            if failed.answer is _Answer.SILENT and self._watch.is_waiting(file.path):
                result = _Result(_Answer.SILENT, f"{failed.detail}; {_WAITS}")
        except OSError as error:
            self._on_problem(f"{file.path}: cannot be probed: {error}")
            result = _Result(_Answer.INCONCLUSIVE)
        return observation.Probed(
            path=file.path,
            identity=file.identity,
            answer=result.answer,
            detail=result.detail,
            process=process,
            driver=result.driver,
        )

    async def _asked(self, connection: socket.socket, file: observation.SocketFile) -> _Result:
        """Return the answer of a socket that is served. Raises _Result for another one."""
        if file.directory is observation.Directory.REGISTRY:
            driver = _driver(await _called(connection, _INFO, self._timeout_s), file)
            await self._connect_to(driver)
            return _Result(_Answer.ANSWERED, driver=driver)
        answer = await _called(connection, _OPTIONS, self._timeout_s)
        _decoded(dp.DevicePluginOptions, answer)
        return _Result(_Answer.ANSWERED)

    def _connected(self, path: Path, identity: str) -> socket.socket:
        """Return a connection to the socket that has this identity. Raises _Result."""
        try:
            connection = _connection(path, identity)
        except OSError as error:
            raise self._refusal(path, error) from None
        if connection is None:
            raise _Result(_Answer.INCONCLUSIVE)
        return connection

    def _refusal(self, path: Path, error: OSError) -> _Result:
        if error.errno == errno.ECONNREFUSED:
            return _Result(_Answer.REFUSED)
        if error.errno == errno.EAGAIN:
            return _Result(_Answer.SILENT, "nobody accepts them any more: its queue is full")
        if error.errno == errno.EPROTOTYPE:
            return _Result(_Answer.WRONG, "it is no stream socket")
        if error.errno != errno.ENOENT:
            self._on_problem(f"{path}: cannot be connected to: {error.strerror}")
        return _Result(_Answer.INCONCLUSIVE)

    def _endpoint(self, endpoint: str) -> Path | None:
        path = Path(os.path.normpath(endpoint))
        return path if path.is_relative_to(self._root / _ENDPOINTS) else None

    async def _connect_to(self, driver: observation.Driver) -> None:
        """Connect to the endpoint of a driver, and no more. Raises _Result.

        Only endpoints in the kubelet's directory for them are looked at: elsewhere this process
        sees its own files, not the node's. As file systems are mounted there, the call may hang.
        """
        path = self._endpoint(driver.endpoint)
        if path is None:
            return
        hanging = {each: call for each, call in self._calls.items() if call.is_busy}
        if path in hanging or len(hanging) >= _HANGING_MAX:
            return
        call = blocking.Serial()
        self._calls = {**hanging, path: call}
        try:
            is_refused = await call.run(
                functools.partial(_is_refused, path), timeout_s=_ENDPOINT_TIMEOUT_S
            )
        except TimeoutError:
            self._on_problem(f"{path}: the file system does not answer")
            return
        if is_refused:
            text = f"connections to its endpoint {path} are refused"
            raise _Result(_Answer.REFUSED, text, driver=driver)


def _connection(path: Path, identity: str = "") -> socket.socket | None:
    """Return a connection to the socket at `path`, or None if that is another file.

    The file is held meanwhile, so that no other can take its place. Raises OSError.
    """
    held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if not stat.S_ISSOCK(status.st_mode) or (identity and identity_of(status) != identity):
            return None
        return unary_client.connected(Path(f"/proc/self/fd/{held}"))
    finally:
        os.close(held)


def _is_refused(path: Path) -> bool:
    """Return whether nobody can be reached at `path`, in a directory that can be seen."""
    if not path.parent.is_dir():
        return False
    try:
        connection = _connection(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError):
        return False
    if connection is not None:
        connection.close()
    return False


def identity_of(status: os.stat_result) -> str:
    """Return what identifies a socket's file; the inode's number alone may be used again."""
    return f"{status.st_ino}.{status.st_ctime_ns}"


async def _called(connection: socket.socket, method: str, timeout_s: float) -> bytes:
    """Call a method without arguments; return its answer. Raises _Result."""
    try:
        outcome = await unary_client.call(connection, method, timeout_s=timeout_s)
    except unary_client.Late:
        raise _Result(_Answer.INCONCLUSIVE) from None
    except OSError as error:
        raise _Result(_Answer.WRONG, f"it cuts the connection: {error.strerror}") from None
    if outcome is None:
        name = method.rpartition("/")[2]
        raise _Result(_Answer.SILENT, f"{name} was not answered within {timeout_s:g} s")
    if outcome.problem:
        raise _Result(_Answer.WRONG, outcome.problem)
    return outcome.message


def _driver(answer: bytes, file: observation.SocketFile) -> observation.Driver:
    """Return what a socket in the registry is. Raises _Result."""
    info = _decoded(pr.PluginInfo, answer)
    kind = _KINDS.get(info.type)
    is_resource = kind is vocabulary.WatchedKind.DEVICE_PLUGIN
    names = naming.RESOURCE if is_resource else _DRIVER
    if kind is None or len(info.name) > _NAME_MAX or not names.fullmatch(info.name):
        raise _Result(_Answer.WRONG, f"it says that it is {info.type!r} {info.name!r}")
    is_own = info.endpoint in {"", file.path} or info.endpoint.endswith(f"/{file.path}")
    return observation.Driver(kind=kind, name=info.name, endpoint="" if is_own else info.endpoint)


def _decoded(kind: type[_Message], answer: bytes) -> _Message:
    try:
        return kind.FromString(answer)
    except message.DecodeError:
        raise _Result(_Answer.WRONG, "its answer is no message of the protocol") from None
