"""Pods for the tests of the FUSE broker: real namespaces, cgroups and dropped rights, as root.

A container here shares the files of the machine, except for `/mnt` and `/run`, which are its own:
`/mnt/home` belongs to uid 1000, `/mnt/tmp` is like `/tmp`, and `/mnt/python` has the interpreter.
Its cgroup is named as the kubelet names those of pods, below a directory of this process.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from muster_fuse.kernel import syscalls

USER = 1000
"""A user without any capability."""
FIRST_HOST_ID = 231_072
"""The host's id of the root of a container that has a user namespace."""
PYTHON = f"/mnt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
PROGRAM = (PYTHON, "-I", "-S")
DAEMON = (*PROGRAM, "-c", Path(__file__).with_name("fuse_daemon.py").read_text())
"""The daemon of `fuse_daemon` as a program in a container."""
_CGROUP = "muster-test-"
"""How the names of cgroups of tests begin; the process id of the test run follows."""
_DOCKER = (
    "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,"
    "sys_chroot,mknod,audit_write,setfcap"
)
"""The capabilities of the root of a container, as containerd and CRI-O grant them by default."""


def missing() -> str:
    """Return why there can be no pods here, or an empty text."""
    if os.geteuid():
        return "needs root: namespaces, cgroups and mounts of its own"
    if not Path("/dev/fuse").exists():
        return "needs /dev/fuse: the kernel has no FUSE here"
    if not all(Path("/usr/bin", name).exists() for name in ("unshare", "nsenter", "setpriv")):
        return "needs unshare, nsenter and setpriv of util-linux"
    if _cgroups() is None:
        return "needs a cgroup version 2 hierarchy that may be written"
    tried = subprocess.run(
        ["/usr/bin/unshare", "--mount", "--propagation=private", "--", "/bin/true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"needs mount namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def needs_pods() -> pytest.MarkDecorator:
    """Return the mark of tests that need pods: `pytestmark = fuse_pods.needs_pods()`."""
    reason = missing()
    return pytest.mark.skipif(bool(reason), reason=reason)


class Container(NamedTuple):
    """A running container of a pod; `process` holds its namespaces."""

    pod_uid: str
    process: subprocess.Popen[str]
    cgroup: Path
    user_namespace: bool

    @property
    def root(self) -> Path:
        """The container's root directory, as this process sees it."""
        return Path(f"/proc/{self.process.pid}/root")

    def start(
        self, *argv: str, uid: int = USER, pass_fds: Sequence[int] = (), **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program in the container; the process has the id of the program itself.

        Uid 0 has the capabilities that runtimes grant by default, other users have none.
        """
        namespaces = ["--mount", *(["--user"] if self.user_namespace else [])]
        rights = ["--bounding-set=-all" + (f",+{_DOCKER.replace(',', ',+')}" if uid == 0 else "")]
        rights += [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]
        enter = ["nsenter", f"--target={self.process.pid}", *namespaces, "--"]
        command = [*enter, "setpriv", *rights, "--no-new-privs", "--", *argv]
        script = f"echo $$ > {self.cgroup}/cgroup.procs; exec {shlex.join(command)}"
        return subprocess.Popen(
            ["/bin/sh", "-ec", script], pass_fds=pass_fds, text=True, **{"cwd": "/", **more}
        )

    def run(self, *argv: str, uid: int = USER) -> tuple[int, str]:
        """Run a program in the container; return its exit status and what it printed."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with self.start(*argv, uid=uid, stdin=subprocess.DEVNULL, **pipes) as process:
            output, _ = process.communicate(timeout=60)
        return process.returncode, output


@contextlib.contextmanager
def container(
    *,
    pod_uid: str | None = None,
    user_namespace: bool = False,
    read_only: bool = False,
    binds: Mapping[str, Path] | None = None,
) -> Iterator[Container]:
    """Run a container, and kill its processes at the end.

    `binds` are files and directories of the host by their path in the container; a path that is not
    below `/mnt` or `/run` must exist. `read_only` makes the root file system read-only.
    """
    pod_uid = pod_uid or str(uuid.uuid4())
    with _cgroup(pod_uid) as cgroup:
        script = "\n".join(_setup(binds or {}, read_only=read_only, user_namespace=user_namespace))
        process = subprocess.Popen(
            [
                "/usr/bin/unshare",
                "--mount",
                "--propagation=private",
                "--",
                "/bin/sh",
                "-ec",
                script,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        try:
            (cgroup / "cgroup.procs").write_text(str(process.pid))
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the container did not start"
            if user_namespace:
                for ids in ("uid_map", "gid_map"):
                    Path(f"/proc/{process.pid}/{ids}").write_text(f"0 {FIRST_HOST_ID} 65536")
            yield Container(pod_uid, process, cgroup, user_namespace)
        finally:
            (cgroup / "cgroup.kill").write_text("1")
            process.communicate()


def connections(user: int | None = None) -> dict[int, int]:
    """Return the FUSE connections of this machine, or of a user: inodes by minor number."""
    mount = syscalls.open_connections()
    listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=mount)
    try:
        with os.scandir(listing) as entries:
            return {
                int(entry.name): entry.inode()
                for entry in entries
                if user is None or entry.stat().st_uid == user
            }
    finally:
        for descriptor in (listing, mount):
            os.close(descriptor)


@contextlib.contextmanager
def same_connections() -> Iterator[None]:
    """Keep the inodes of FUSE connections: without any mount of fusectl they change."""
    mount = syscalls.open_connections()
    try:
        yield
    finally:
        os.close(mount)


def _setup(binds: Mapping[str, Path], *, read_only: bool, user_namespace: bool) -> Iterator[str]:
    owner = FIRST_HOST_ID if user_namespace else 0
    # FUSE mounts of other tests on the host at this moment
    inherited = "awk '/ - fuse[ .]/{print $5}' /proc/self/mountinfo"
    yield f"{inherited} | xargs -r umount --no-canonicalize --lazy"
    yield "mount -t tmpfs -o mode=0755,size=16m tmpfs /mnt"
    yield "mount -t tmpfs -o mode=0755,size=16m tmpfs /run"
    yield "mkdir /mnt/home /mnt/python; mkdir -m 1777 /mnt/tmp"
    yield f"chown {owner + USER}:{owner + USER} /mnt/home"
    for path, source in {"/mnt/python": Path(sys.base_prefix), **binds}.items():
        target, parent = shlex.quote(path), shlex.quote(str(Path(path).parent))
        make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {parent}; touch {target}"
        if path.startswith(("/mnt/", "/run/")):
            yield make
        yield f"mount --bind {shlex.quote(str(source))} {target}"
    if read_only:
        yield "mount -o remount,bind,ro /"
    unshare = "unshare --user --mount --propagation=private -- " if user_namespace else ""
    yield f"exec {unshare}/bin/sh -ec 'echo ready; read -r line || true'"


def _cgroups() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, directory, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(directory, os.W_OK):
            return Path(directory)
    return None


@contextlib.contextmanager
def _cgroup(pod_uid: str) -> Iterator[Path]:
    root = _cgroups()
    assert root is not None, missing()
    name = f"kubepods-besteffort-pod{pod_uid.replace('-', '_')}.slice"
    _remove_stale(root)
    top = root / f"{_CGROUP}{os.getpid()}-{uuid.uuid4().hex}"
    scope = top / "kubepods.slice" / "kubepods-besteffort.slice" / name / "cri-containerd-1.scope"
    scope.mkdir(parents=True)
    try:
        yield scope
    finally:
        _remove_all(top)


def _remove_stale(root: Path) -> None:
    """Kill the processes and remove the cgroups that a killed test run has left."""
    for top in root.glob(f"{_CGROUP}*"):
        pid = top.name.removeprefix(_CGROUP).partition("-")[0]
        # another run may be about to remove it too
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not Path("/proc", pid).exists():
                (top / "cgroup.kill").write_text("1")
                _remove_all(top)


def _remove_all(top: Path) -> None:
    for procs in sorted(top.rglob("cgroup.procs"), reverse=True):
        _remove(procs.parent)


def _remove(cgroup: Path) -> None:
    """Remove a cgroup; the kernel takes a moment to forget processes that have ended."""
    for _ in range(500):
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.01)
    cgroup.rmdir()
