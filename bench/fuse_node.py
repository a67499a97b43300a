"""Adapter for processes: runs the FUSE broker, simulated pods, and programs that mount in them.

A pod is a process in namespaces and a cgroup like a pod of a kubelet; the broker makes its volume.
The reference is a similar container that has /dev/fuse and may run setuid programs, like a machine
without muster: there a program calls Debian's fusermount3.
"""

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bench import programs
from muster_fuse.kernel import syscalls
from tests.worlds import fuse_helper, fuse_pods, fuse_process

USER: Final = 1_000_000 + os.getpid()
"""The subtype of all mounts here, which distinguishes them from other mounts on this machine."""
NEVER_MS: Final = 40_000.0
"""The time of a failed mount: the helper tries to connect for 30 s and to get a reply for 10 s."""
REFERENCE: Final = Path("/usr/bin/fusermount3")
BINDFS: Final = Path("/usr/bin/bindfs")
_HELPER: Final = "/run/muster-fuse/fusermount3"
_CLIENT: Final = Path("/run/bench/client")
_CLIENT_SOURCE: Final = Path(__file__).with_name("fuse_client.c")
_PLACE: Final = "/mnt/tmp/place"
"""The directory in which programs mount."""
_DATA: Final = "/mnt/data"
_COPIED: Final = re.compile(r"copied, ([0-9.e-]+) s,")
_WAIT_S: Final = 30.0


class Cycle(NamedTuple):
    """How long a mount and its unmount took."""

    mount_ms: float
    unmount_ms: float


class Programs:
    """The compiled programs: the helper as in the image, and a FUSE program."""

    def __init__(self, place: Path) -> None:
        is_static = shutil.which("musl-gcc") is not None
        flags = ("-Os", "-static", "-s") if is_static else ("-Os",)
        compiler = "musl-gcc" if is_static else "gcc"
        self.helper = fuse_helper.build(place, *flags, compiler=compiler, short=False)
        self.how = f"helper made by {compiler} {' '.join(flags)}"
        self.client = place / "client" / _CLIENT.name
        self.client.parent.mkdir()
        command = ["gcc", "-std=gnu11", "-O2", "-o", str(self.client), str(_CLIENT_SOURCE)]
        subprocess.run(command, check=True)  # noqa: S603
        # the setuid program requires that its user has a name and may open the device
        self.passwd = place / "passwd"
        self.passwd.write_text(f"bench:x:{USER}:{USER}::/:/bin/sh\n")
        self.device = place / "fuse"
        os.mknod(self.device, stat.S_IFCHR, Path("/dev/fuse").stat().st_rdev)
        self.device.chmod(0o666)


class Container:
    """A container whose programs run as an unprivileged user."""

    def __init__(self, pod: fuse_pods.Container, fusermount: str, *, setuid: bool) -> None:
        self._pod = pod
        self._fusermount = fusermount
        self._setuid = setuid
        self.run("/bin/mkdir", _PLACE)

    @contextlib.contextmanager
    def cycles(self) -> Iterator[Iterator[Cycle]]:
        """Yield an iterator; each of its steps mounts and unmounts once."""
        argv = (str(_CLIENT), self._fusermount, "cycle", _PLACE)
        with self._running(*argv) as process:
            yield _cycles(process)

    @contextlib.contextmanager
    def holds(self, mounts: int) -> Iterator[None]:
        """Keep this number of mounts until the block ends."""
        places = [f"{_PLACE}/{number}" for number in range(mounts)]
        self.run("/bin/mkdir", *places)
        with self._running(str(_CLIENT), self._fusermount, "hold", *places) as process:
            assert process.stdout is not None, "the stream is a pipe"
            assert process.stdout.readline() == "held\n", "the mounts could not be made"
            yield

    @contextlib.contextmanager
    def bindfs(self) -> Iterator[str]:
        """Mount the data with bindfs until the block ends; yield the mount's options."""
        with self._running(
            str(BINDFS), "-f", "--no-allow-other", "-o", "big_writes", _DATA, _PLACE
        ):
            yield self._mount_options()

    def copied_s(self, step: str, file: str, *, mib: int, at_mib: int) -> float:
        """Write or read a piece of a file through bindfs; return the duration."""
        file, piece = f"{_PLACE}/{file}", ("bs=1M", f"count={mib}")
        where = (f"if={file}", "of=/dev/null", f"skip={at_mib}", "conv=notrunc")
        if step == "write":
            where = ("if=/dev/zero", f"of={file}", f"seek={at_mib}", "conv=notrunc")
        match = _COPIED.search(self.run("/bin/dd", *where, *piece))
        assert match is not None, "dd says how long it took"
        return float(match[1])

    def drop(self, file: str) -> None:
        """Drop the cached pages of a file in the mount of bindfs."""
        self.run("/bin/dd", f"if={_PLACE}/{file}", "iflag=nocache", "count=0")

    def remove(self, file: str) -> None:
        """Remove a file in the mount of bindfs."""
        self.run("/bin/rm", f"{_PLACE}/{file}")

    def run(self, *argv: str) -> str:
        """Run a program that must succeed; return its output."""
        status, output = self._pod.run(*argv, uid=USER)
        assert status == 0, output
        return output

    @contextlib.contextmanager
    def _running(self, *argv: str) -> Iterator[subprocess.Popen[str]]:
        """Run a program with pipes, and end it."""
        process = self._start(*argv)
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()

    def _start(self, *argv: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        if not self._setuid:
            return self._pod.start(*argv, uid=USER, stdin=pipe, stdout=pipe)
        enter = ["nsenter", f"--target={self._pod.process.pid}", "--mount", "--", "setpriv"]
        enter += [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--", *argv]
        script = f"echo $$ > {self._pod.cgroup}/cgroup.procs; exec {shlex.join(enter)}"
        command = ["/bin/sh", "-ec", script]
        return subprocess.Popen(command, cwd="/", text=True, stdin=pipe, stdout=pipe)  # noqa: S603

    def _mount_options(self) -> str:
        until = time.monotonic() + _WAIT_S
        table = Path(f"/proc/{self._pod.process.pid}/mountinfo")
        while time.monotonic() < until:
            for line in table.read_text().splitlines():
                mount, _, system = line.partition(" - fuse")
                if system:
                    options = f"{mount.split()[5]} {system.split()[-1]}"
                    return options.replace(str(USER), "UID")
            time.sleep(0.01)
        raise TimeoutError("bindfs did not mount")


class Node:
    """The broker's processes and pods."""

    def __init__(self, world: fuse_process.Node, front: int, built: Programs) -> None:
        self.built = built
        self._front = front
        self._world = world

    @property
    def pids(self) -> tuple[int, int]:
        """The processes of the broker: front and mounter."""
        children = Path(f"/proc/{self._front}/task/{self._front}/children").read_text().split()
        return self._front, int(children[0])

    def open_files(self) -> int:
        """Return the number of open files of both processes; the minimum of several checks."""
        looks = []
        for _ in range(20):
            looks.append(sum(map(programs.descriptors, self.pids)))
            time.sleep(0.05)
        return min(looks)

    @contextlib.asynccontextmanager
    async def pod(self, data: Path | None = None) -> AsyncIterator[Container]:
        """Run a pod with a volume from the broker."""
        uid = str(uuid.uuid4())
        await self._world.kubelet.publish(uid=uid)
        volume = self._world.kubelet.target(uid=uid)
        binds = {"/run/muster-fuse": volume, "/dev/fuse": volume / "dev-fuse"}
        if REFERENCE.exists():
            # /usr/bin/fusermount is a link to it
            binds[str(REFERENCE)] = volume / "fusermount3"
        with self._container(uid, binds, data) as pod:
            yield Container(pod, _HELPER, setuid=False)
        await self._world.kubelet.unpublish(uid=uid)

    @contextlib.contextmanager
    def reference(self, data: Path | None = None) -> Iterator[Container]:
        """Run a container without a volume, where setuid programs may mount."""
        binds = {"/dev/fuse": self.built.device, "/etc/passwd": self.built.passwd}
        with self._container(str(uuid.uuid4()), binds, data) as pod:
            yield Container(pod, str(REFERENCE), setuid=True)

    def _container(
        self, uid: str, binds: Mapping[str, Path], data: Path | None
    ) -> contextlib.AbstractContextManager[fuse_pods.Container]:
        more = {str(_CLIENT.parent): self.built.client.parent, **({_DATA: data} if data else {})}
        return fuse_pods.container(pod_uid=uid, binds={**binds, **more})


@contextlib.asynccontextmanager
async def running(root: Path, bus_url: str) -> AsyncIterator[Node]:
    """Run a broker with the production settings, except for the request rate of a pod."""
    with tmpfs(root / "built", 16) as place:
        built = Programs(place)
        world = fuse_process.Node(root, bus_url=bus_url)
        world.write(
            helper=str(built.helper),
            bus={"url": bus_url},
            heartbeat={},
            limits={"requests_burst": 10_000, "requests_per_minute": 10_000},
        )
        command = (sys.executable, "-m", "muster_fuse", "--config", str(world.settings))
        async with programs.running(command) as process:
            await world.kubelet.wait_for_socket()
            await world.kubelet.register()
            yield Node(world, process.pid, built)


@contextlib.contextmanager
def tmpfs(place: Path, mib: int) -> Iterator[Path]:
    """Mount a world-writable tmpfs."""
    place.mkdir()
    syscalls.mount("bench", str(place), "tmpfs", 0, f"size={mib}m,mode=1777")
    try:
        yield place
    finally:
        syscalls.umount(str(place), syscalls.MNT_DETACH)
        place.rmdir()


def _cycles(process: subprocess.Popen[str]) -> Iterator[Cycle]:
    assert process.stdin is not None, "the stream is a pipe"
    assert process.stdout is not None, "the stream is a pipe"
    while True:
        process.stdin.write("\n")
        process.stdin.flush()
        taken = [int(text) for text in process.stdout.readline().split()]
        mount_ms, unmount_ms = (NEVER_MS if us < 0 else us / 1000 for us in taken)
        yield Cycle(mount_ms, unmount_ms)
