"""Adapter: probes sockets with one connection and one call each.

A plugin receives the call for its options, which the kubelet also makes when the plugin registers;
a registration socket receives the call for its info. The connection is closed properly, and no
answer is read beyond a limit.
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
from muster_plugin.kubelet import unary_call, unary_client
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
    """The result of a probe; raised to end the probe early."""

    def __init__(
        self, answer: _Answer, detail: str = "", *, driver: observation.Driver | None = None
    ) -> None:
        super().__init__(detail)
        self.answer = answer
        self.detail = detail[:_DETAIL_MAX]
        self.driver = driver


class Prober:
    """Probes sockets below `root`, a few at a time; `on_result` receives each result.

    `on_problem` receives the reason if this process cannot probe a socket.
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
        """The last connections to drivers' endpoints; some may hang."""
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
            with self._connect(self._root / file.path, file.identity) as connection:
                process = self._watch.peer(connection, file.path)
                result = await self._ask(connection, file)
        except _Result as failed:
            result = failed
            if failed.answer is _Answer.SILENT and self._watch.is_waiting(file.path):
                result = _Result(_Answer.SILENT, f"{failed.detail}; {_WAITS}")
        except OSError as error:
            self._on_problem(f"cannot probe {file.path}: {error}")
            result = _Result(_Answer.INCONCLUSIVE)
        return observation.Probed(
            path=file.path,
            identity=file.identity,
            answer=result.answer,
            detail=result.detail,
            process=process,
            driver=result.driver,
        )

    async def _ask(self, connection: socket.socket, file: observation.SocketFile) -> _Result:
        """Make the call; return the result of a valid answer. Raises _Result for anything else."""
        if file.directory is observation.Directory.REGISTRY:
            answer = await _call(connection, _INFO, self._timeout_s)
            if answer.status is not None:
                raise _Result(_Answer.WRONG, f"{answer.problem} (gRPC status {answer.status})")
            driver = _driver(answer.message, file)
            await self._check_endpoint(driver)
            return _Result(_Answer.ANSWERED, driver=driver)
        answer = await _call(connection, _OPTIONS, self._timeout_s)
        if answer.status is None:
            _decode(dp.DevicePluginOptions, answer.message)
        # a gRPC error is an answer, too: the server works, but may not support the call
        return _Result(_Answer.ANSWERED)

    def _connect(self, path: Path, identity: str) -> socket.socket:
        """Return a connection to the socket with this identity. Raises _Result."""
        try:
            connection = _connection(path, identity)
        except OSError as error:
            raise self._failure(path, error) from None
        if connection is None:
            raise _Result(_Answer.INCONCLUSIVE)
        return connection

    def _failure(self, path: Path, error: OSError) -> _Result:
        """Translate a connection error to the result of the probe."""
        if error.errno == errno.ECONNREFUSED:
            return _Result(_Answer.REFUSED)
        if error.errno == errno.EAGAIN:
            return _Result(_Answer.SILENT, "its backlog of connections is full")
        if error.errno == errno.EPROTOTYPE:
            return _Result(_Answer.WRONG, "it is not a stream socket")
        if error.errno != errno.ENOENT:
            self._on_problem(f"cannot connect to {path}: {error.strerror}")
        return _Result(_Answer.INCONCLUSIVE)

    def _endpoint(self, endpoint: str) -> Path | None:
        path = Path(os.path.normpath(endpoint))
        return path if path.is_relative_to(self._root / _ENDPOINTS) else None

    async def _check_endpoint(self, driver: observation.Driver) -> None:
        """Check a driver's endpoint. Raises _Result if it is missing or refuses connections.

        Only endpoints in the kubelet's directory for drivers are checked: elsewhere this process
        sees its own files, not the node's. File systems are mounted there, so the call may hang.
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
            answer = await call.run(
                functools.partial(_endpoint_answer, path), timeout_s=_ENDPOINT_TIMEOUT_S
            )
        except TimeoutError:
            self._on_problem(f"the file system of {path} does not answer")
            return
        if answer is _Answer.REFUSED:
            raise _Result(answer, f"connections to its endpoint {path} are refused", driver=driver)
        if answer is _Answer.MISSING:
            raise _Result(answer, f"its endpoint {path} does not exist", driver=driver)


def _connection(path: Path, identity: str = "") -> socket.socket | None:
    """Return a connection to the socket at `path`, or None if it is not the expected file.

    The file is opened first, so that the check and the connection use the same file. Raises
    OSError.
    """
    held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        if not stat.S_ISSOCK(status.st_mode) or (identity and identity_of(status) != identity):
            return None
        return unary_client.connected(Path(f"/proc/self/fd/{held}"))
    finally:
        os.close(held)


def _endpoint_answer(path: Path) -> observation.Answer:
    """Return the outcome of connecting to `path`; INCONCLUSIVE if it proves nothing."""
    if not path.parent.is_dir():
        return _Answer.INCONCLUSIVE
    try:
        connection = _connection(path)
    except ConnectionRefusedError:
        return _Answer.REFUSED
    except FileNotFoundError:
        return _Answer.MISSING
    except (OSError, ValueError):
        return _Answer.INCONCLUSIVE
    if connection is None:
        return _Answer.INCONCLUSIVE
    connection.close()
    return _Answer.ANSWERED


def identity_of(status: os.stat_result) -> str:
    """Return the identity of a socket's file; an inode number alone may be reused."""
    return f"{status.st_ino}.{status.st_ctime_ns}"


async def _call(connection: socket.socket, method: str, timeout_s: float) -> unary_call.Outcome:
    """Call a method without arguments; return its answer or error. Raises _Result."""
    try:
        outcome = await unary_client.call(connection, method, timeout_s=timeout_s)
    except unary_client.Late:
        raise _Result(_Answer.INCONCLUSIVE) from None
    except OSError as error:
        raise _Result(_Answer.WRONG, f"it broke the connection: {error.strerror}") from None
    if outcome is None:
        name = method.rpartition("/")[2]
        raise _Result(_Answer.SILENT, f"no answer to {name} within {timeout_s:g} s")
    if outcome.problem and outcome.status is None:
        raise _Result(_Answer.WRONG, outcome.problem)
    return outcome


def _driver(answer: bytes, file: observation.SocketFile) -> observation.Driver:
    """Decode a registration socket's answer to GetInfo. Raises _Result."""
    info = _decode(pr.PluginInfo, answer)
    kind = _KINDS.get(info.type)
    is_resource = kind is vocabulary.WatchedKind.DEVICE_PLUGIN
    names = naming.RESOURCE if is_resource else _DRIVER
    if kind is None or len(info.name) > _NAME_MAX or not names.fullmatch(info.name):
        raise _Result(_Answer.WRONG, f"its type is {info.type!r} and its name {info.name!r}")
    is_own = info.endpoint in {"", file.path} or info.endpoint.endswith(f"/{file.path}")
    return observation.Driver(kind=kind, name=info.name, endpoint="" if is_own else info.endpoint)


def _decode(kind: type[_Message], answer: bytes) -> _Message:
    try:
        return kind.FromString(answer)
    except message.DecodeError:
        raise _Result(_Answer.WRONG, "its answer cannot be decoded") from None
