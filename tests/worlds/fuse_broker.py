"""A broker that runs in a thread beside the test, with the real mounter and the real kernel."""

import asyncio
import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from muster_fuse import config
from muster_fuse.broker import observations, service
from muster_fuse.kernel import mounter, mounter_client
from muster_fuse.request import caller
from tests.worlds import fuse_daemon, fuse_pods

SOCKET = "/run/muster-fuse/broker.sock"
"""The path of the broker's socket in a container."""
HOME = "/mnt/home"
WAIT_S = 30.0
Result = TypeVar("Result")


class Running:
    """A broker and its observations."""

    def __init__(
        self,
        directory: Path,
        settings: config.Limits,
        *,
        command: tuple[str, ...],
        deadline_s: float,
    ) -> None:
        self.directory = directory
        self.observed: list[observations.Observation] = []
        self._settings = settings
        self._command = command
        self._deadline_s = deadline_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stack = contextlib.AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._thread.start()
        self.mounter, self.broker = self.call(self._start())

    def call(self, work: Coroutine[object, object, Result]) -> Result:
        """Run a coroutine in the broker's thread; return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the broker receive nothing within the block."""
        resumed = threading.Event()
        self._loop.call_soon_threadsafe(resumed.wait)
        try:
            yield
        finally:
            resumed.set()

    def stop(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def socket_of(self, uid: str) -> Path:
        """Return the path of a pod's socket on this machine."""
        return self.directory / f"pod-{uid}" / "broker.sock"

    @contextlib.contextmanager
    def pod(self, *, user_namespace: bool = False) -> Iterator[fuse_pods.Container]:
        """Run a pod that the broker serves."""
        uid = os.urandom(4).hex() + "-1b7a-4e53-9c55-6f0d2a1b3c4d"
        self.open(uid)
        binds = {"/run/muster-fuse": self.socket_of(uid).parent}
        with fuse_pods.container(pod_uid=uid, user_namespace=user_namespace, binds=binds) as pod:
            yield pod

    def open(self, uid: str) -> None:
        """Serve a pod."""
        self.socket_of(uid).parent.mkdir(exist_ok=True)
        pod = caller.Pod(uid=uid, namespace="default", name=f"pod-{uid[:4]}")
        self.call(self.broker.open(pod, self.socket_of(uid)))

    def seen(self, kind: type[Result], wanted: Callable[[Result], bool] = bool) -> Result:
        """Wait for an observation of this kind that `wanted` accepts; return it."""
        return until(lambda: next((o for o in self.of(kind) if wanted(o)), None), self.observed)

    def of(self, kind: type[Result]) -> list[Result]:
        """Return the observations of a kind."""
        return [observed for observed in self.observed if isinstance(observed, kind)]

    def restart(self) -> None:
        """Replace the broker by a new one, and forget the observations."""
        self.call(self._stop())
        self.observed.clear()
        self.mounter, self.broker = self.call(self._start())

    def stop_watching(self) -> None:
        """Make the broker stop watching its mounts."""
        self.call(self._stop_watching())

    async def _start(self) -> tuple[mounter_client.Mounter, service.Broker]:
        mounter = await self._stack.enter_async_context(
            mounter_client.Mounter(self._command, deadline_s=self._deadline_s)
        )
        broker = service.Broker(
            self._settings,
            mounter,
            observe=self.observed.append,
            records=self.directory / "records",
        )
        self._watching = asyncio.create_task(broker.watch())
        return mounter, broker

    async def _stop_watching(self) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _stop(self) -> None:
        await self._stop_watching()
        await self.broker.stop()
        await self._stack.aclose()
        await asyncio.sleep(0)


@contextlib.contextmanager
def running(
    directory: Path | None = None,
    *,
    command: tuple[str, ...] = mounter_client.COMMAND,
    deadline_s: float = mounter.DEADLINE_S,
    **limits: object,
) -> Iterator[Running]:
    """Run a broker; at the end, check that it has left no descriptor and no mount."""
    settings = config.Limits(**{"watch_s": 0.1, **limits})  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        if directory is None:
            # a path in tmp_path is too long for a socket
            made = tempfile.TemporaryDirectory(prefix="muster-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(made))
        before, mounted = descriptors(), fuse_mounts("self")
        broker = Running(directory, settings, command=command, deadline_s=deadline_s)
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()
        until(lambda: descriptors().items() <= before.items(), lambda: (before, descriptors()))
        # another test may mount something meanwhile, but that does not stay
        until(lambda: set(fuse_mounts("self")) <= set(mounted), lambda: fuse_mounts("self"))


@contextlib.contextmanager
def daemon(
    pod: fuse_pods.Container, *arguments: str, directory: str = HOME, uid: int = fuse_pods.USER
) -> Iterator[subprocess.Popen[str]]:
    """Run `fuse_daemon` in a pod, which mounts through the broker; kill it at the block's end."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = pod.start(*fuse_pods.DAEMON, SOCKET, directory, *arguments, uid=uid, **pipes)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def mounted(process: subprocess.Popen[str]) -> None:
    """Wait until a daemon has mounted."""
    assert process.stdout is not None
    if process.stdout.readline() != "mounted\n":
        raise AssertionError(process.communicate(timeout=WAIT_S))


def refused(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the errno and the text with which the broker has refused a daemon."""
    _, text = process.communicate(timeout=WAIT_S)
    return process.returncode, text.strip()


def program(
    pod: fuse_pods.Container,
    script: str,
    *arguments: str,
    uid: int = fuse_pods.USER,
    pass_fds: tuple[int, ...] = (),
) -> subprocess.Popen[str]:
    """Start a script in a pod.

    It can use what `fuse_daemon` defines, and `broker()`, `asked()` and `point()`.
    """
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = (*fuse_pods.PROGRAM, "-c", _PRELUDE + script, *arguments)
    return pod.start(*command, uid=uid, pass_fds=pass_fds, **pipes)


def said(process: subprocess.Popen[str]) -> str:
    """Wait until a program ends, which must succeed; return what it printed."""
    output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, errors) == (0, ""), (output, errors)
    return output.strip()


def unmounted(
    pod: fuse_pods.Container, path: str = HOME, *, uid: int = fuse_pods.USER, lazy: bool = False
) -> str:
    """Ask the broker from a pod to unmount; return its refusal, or an empty text."""
    return said(program(pod, _UNMOUNT, path, str(int(lazy)), uid=uid))


_PRELUDE: Final = (
    Path(fuse_daemon.__file__).read_text("utf-8").partition("def main")[0]
    + f"""
def broker():
    return connected({SOCKET!r})


def asked(packet, *descriptors, over=None):
    over = over or broker()
    socket.send_fds(over, [packet], descriptors)
    answer, _, _, _ = socket.recv_fds(over, 4096, 4)
    code = _PACKET.unpack_from(answer)[4]
    return f"{{errno.errorcode.get(code, code)}}: {{answer[16:].decode()}}" if code else "done"


def point(path):
    return os.open(path, os.O_PATH | os.O_NOFOLLOW)


"""
)
UNWRITTEN: Final = """
import struct
device = mount(broker(), "/mnt/home")
if os.fork() == 0:
    # with a cache for writing (flag 65536 of the answer to INIT), and no answer to a WRITE
    while True:
        try:
            request = os.read(device, 1 << 18)
        except OSError:
            os._exit(0)
        _, opcode, unique, node, *_ = struct.unpack_from("IIQQ", request)
        operation = _OPCODES.get(opcode, "")
        if operation in _UNANSWERED or opcode == 16:
            continue
        if operation == "INIT":
            (ahead,) = struct.unpack_from("I", request[48:])
            versions, rest = (7, 31, ahead, 1 << 16), (12, 9, 65536, 1, 0, 0, 0)
            answer = struct.pack("IIIIHHIIHHI28x", *versions, *rest)
        elif opcode == 4:
            answer = struct.pack("QII", 0, 0, 0) + _attributes(node)
        else:
            answer = _answer(operation, node, request[40:])
        error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
        try:
            os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)
        except OSError:
            pass
os.close(device)
"""
"""A script whose mount has a writeback cache, but whose daemon answers no WRITE."""
_UNMOUNT: Final = """
root = point(sys.argv[1])
over = broker()
socket.send_fds(over, [_packet(2, flags=int(sys.argv[2]))], [root])
os.close(root)
try:
    _reply(over, 2)
except RefusedError as refused:
    print(f"{errno.errorcode[refused.args[0]]}: {refused.args[1]}")
"""


def descriptors() -> dict[str, str]:
    """Return the open descriptors of this process, except the one used to list them."""
    opened = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(path.readlink())
            if not target.endswith(f"/{os.getpid()}/fd"):
                opened[path.name] = target
    return opened


def fuse_mounts(process: int | str) -> list[str]:
    """Return the mount points of FUSE file systems that a process sees."""
    lines = Path(f"/proc/{process}/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if " - fuse" in line]


def until(look: Callable[[], Result | None], shown: object = None) -> Result:
    """Call `look` until its result is true; return the result."""
    deadline = time.monotonic() + WAIT_S
    while not (seen := look()):
        assert time.monotonic() < deadline, shown() if callable(shown) else shown
        time.sleep(0.01)
    return seen
