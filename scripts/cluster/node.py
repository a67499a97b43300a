"""Adapter for the kernel: creates the node's namespaces, and runs processes in them.

All processes belong to one PID namespace, whose first process only reaps children. When it is
killed, the kernel kills the others, and network, mounts and host name disappear with them. Only the
directory STATE and the cgroups remain, which `destroy` removes.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from scripts.cluster import layout

_FIRST: Final = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True: signal.pause()"
)
_DEVICES: Final = (
    *("null c 1 3", "zero c 1 5", "full c 1 7", "random c 1 8", "urandom c 1 9"),
    *("kmsg c 1 11", "tty c 5 0", "fuse c 10 229"),
)
_MOUNTS: Final = f"""
mount --make-rshared /
for folder in /run /var/lib /var/log; do mount -t tmpfs tmpfs $folder; done
mkdir -p /run/lock /run/cdi /var/lib/kubelet /var/log/pods
mount --bind {layout.KUBELET} /var/lib/kubelet
mount --make-shared /var/lib/kubelet
mount --bind {layout.STATE}/hosts /etc/hosts
mount --bind {layout.STATE}/resolv.conf /etc/resolv.conf
mount -t tmpfs -o mode=755 tmpfs /dev
mkdir /dev/pts /dev/shm /dev/mqueue
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t mqueue mqueue /dev/mqueue
ln -s pts/ptmx /dev/ptmx
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin; ln -s fd/1 /dev/stdout; ln -s fd/2 /dev/stderr
"""
_NETWORK: Final = f"""
hostname {layout.NODE}
ip link set lo up
ip address add {layout.NODE_IP}/30 dev node0
ip link set node0 up
ip route add default via {layout.HOST_IP}
echo 1 > /proc/sys/net/ipv4/ip_forward
"""
_INOTIFY: Final = Path("/proc/sys/fs/inotify/max_user_instances")
_INOTIFY_MIN: Final = 512
"""The value that kind's documentation recommends; the default of Linux is 128."""
_END_S: Final = 20.0
_RESTARTING: Final = ("sh", "-c", 'until "$@"; do sleep 1; done', "sh")
_TRIAL: Final = """
mount -t tmpfs tmpfs /mnt && umount /mnt
mount -t proc proc /proc
ip link add trial0 type veth peer name trial1
ip link add trial2 type bridge
"""
_DISK_BYTES: Final = 12 * 2**30
"""The required disk space for Go's caches, the Kubernetes programs and the images."""


def missing() -> str:
    """Return why no node can be created on this machine; otherwise empty."""
    if os.geteuid() != 0:
        return "only root can make the namespaces of a node"
    if not any(
        folder.parent.is_dir() and os.access(folder.parent, os.W_OK) for folder in _cgroups()
    ):
        return "no writable cgroups are mounted"
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    for folder in (layout.CACHE, layout.STATE.parent):
        if shutil.disk_usage(folder).free < _DISK_BYTES:
            return f"{folder}: less than {_DISK_BYTES >> 30} GiB are free"
    trial = (
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--uts",
        "--ipc",
        "--fork",
        "sh",
        "-ec",
        _TRIAL,
    )
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    return f"namespaces: {done.stderr.strip()}" if done.returncode else ""


def first() -> int | None:
    """Return the first process of the running node; None if no node is running."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((layout.STATE / "pid").read_text())
        if _FIRST.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def create() -> None:
    """Create the namespaces, the network link to this machine, and the cgroups."""
    for folder in (layout.LOGS, layout.KUBELET, layout.STATE / "volumes"):
        folder.mkdir(parents=True, exist_ok=True)
    (layout.STATE / "hosts").write_text(f"127.0.0.1 localhost\n{layout.NODE_IP} {layout.NODE}\n")
    # no nameserver answers, so that pulling a missing image fails at once
    (layout.STATE / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    for folder in _cgroups():
        folder.mkdir(exist_ok=True)
        _inherit_cpuset(folder)
    if int(_INOTIFY.read_text()) < _INOTIFY_MIN:
        # all processes of a user share them, and a kubelet that cannot create one exits
        (layout.STATE / "inotify").write_text(_INOTIFY.read_text())
        _INOTIFY.write_text(str(_INOTIFY_MIN))
    kinds = (
        "--pid",
        "--fork",
        "--mount",
        "--net",
        "--uts",
        "--ipc",
        "--mount-proc",
        "--kill-child=KILL",
    )
    with (layout.LOGS / "node.log").open("wb") as log:
        outer = subprocess.Popen(
            # not `python3`: a shell script of that name would create files in the node's /dev
            ["unshare", *kinds, sys.executable, "-S", "-c", _FIRST],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    pid = _only_child(outer.pid)
    (layout.STATE / "pid").write_text(str(pid))
    _run(
        "ip", "link", "add", layout.LINK, "type", "veth", "peer", "name", "node0", "netns", str(pid)
    )
    _run("ip", "address", "add", f"{layout.HOST_IP}/30", "dev", layout.LINK)
    _run("ip", "link", "set", layout.LINK, "up")
    for network in (layout.PODS, layout.SERVICES):
        _run("ip", "route", "replace", network, "via", layout.NODE_IP)
    nodes = "".join(f"mknod -m 666 /dev/{device}\n" for device in (*_DEVICES, *_disks()))
    _run(*entering(pid), "sh", "-ec", _MOUNTS + nodes + _NETWORK)


def entering(pid: int) -> list[str]:
    """Return the command prefix that runs a command inside the node."""
    return ["nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--ipc", "--pid", "--"]


def spawn(
    command: Sequence[str],
    folders: Sequence[Path],
    more: Mapping[str, str] | None = None,
    *,
    restarts: bool = False,
) -> None:
    """Start a component inside the node; its output goes to the log with its name.

    With `restarts`, it is restarted whenever it fails, like a kubelet's static pod.
    """
    pid = first()
    assert pid is not None
    path = ":".join(
        map(str, (*folders, "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))
    )
    environment = {"PATH": path, "HOME": "/root", "GOTRACEBACK": "single", **(more or {})}
    log = layout.LOGS / f"{command[0]}.log"
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    with log.open("wb") as output:
        subprocess.Popen(
            [*entering(pid), *(_RESTARTING if restarts else ()), *command],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, cwd="/",
        )  # fmt: skip


def processes(name: str) -> list[int]:
    """Return the host's process ids of a program that runs inside the node."""
    pid = first()
    if pid is None:
        return []
    namespace = _link(pid, "ns/pid")
    return [
        other
        for other in _processes()
        if _link(other, "exe").rpartition("/")[2] == name and _link(other, "ns/pid") == namespace
    ]


def end(name: str, number: signal.Signals = signal.SIGTERM) -> None:
    """End a component and wait for its exit; SIGKILL after 20 s."""
    deadline = time.monotonic() + _END_S
    while pids := processes(name):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number if time.monotonic() < deadline else signal.SIGKILL)
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)


def destroy() -> None:
    """End all processes in the node, and remove its files and cgroups from this machine."""
    if (pid := first()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + _END_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        _end_entered(pid)
    subprocess.run(["ip", "link", "delete", layout.LINK], capture_output=True, check=False)
    until = time.monotonic() + _END_S
    for folder in _cgroups():
        _remove_cgroup(folder, until)
    with contextlib.suppress(FileNotFoundError):
        _INOTIFY.write_text((layout.STATE / "inotify").read_text())
    shutil.rmtree(layout.STATE, ignore_errors=True)
    if layout.STATE.exists():
        raise layout.Refused(
            f"{layout.STATE} cannot be removed: something in it is mounted or busy"
        )


def _end_entered(pid: int) -> None:
    """End the nsenter processes outside the node that have started its programs.

    Normally nsenter ends with its program. But if its program is stopped, nsenter stops itself too,
    and remains stopped when the program is killed (util-linux 2.38, sys-utils/nsenter.c,
    continue_as_child).
    """
    command = b"\0".join(part.encode() for part in entering(pid))
    for other in _processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{other}/cmdline").read_bytes().startswith(command):
                os.kill(other, signal.SIGKILL)


def _cgroups() -> Iterator[Path]:
    """Yield our directory in each cgroup hierarchy, version 1 or 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mounted, kind, *_ = line.split()
        if kind in {"cgroup", "cgroup2"}:
            yield Path(mounted) / layout.CGROUP


def _inherit_cpuset(folder: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and not file.read_text().strip():
            with contextlib.suppress(OSError):
                file.write_text((folder.parent / name).read_text())


def _remove_cgroup(folder: Path, until: float) -> None:
    for below, _, _ in os.walk(folder, topdown=False):
        while True:
            try:
                Path(below).rmdir()
            except FileNotFoundError:
                break
            except OSError:
                # its last processes are still exiting
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                break


def _disks() -> Iterator[str]:
    """Yield this machine's block devices, which the kubelet needs to monitor disk usage."""
    for file in Path("/dev").iterdir():
        with contextlib.suppress(OSError):
            status = file.stat()
            if stat.S_ISBLK(status.st_mode):
                yield f"{file.name} b {os.major(status.st_rdev)} {os.minor(status.st_rdev)}"


def _only_child(pid: int) -> int:
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        for other in _processes():
            with contextlib.suppress(OSError, ValueError):
                parent = int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1])
                # until it executes Python, it is a copy of unshare without the mounts
                if parent == pid and _link(other, "exe") == str(Path(sys.executable).resolve()):
                    return other
        time.sleep(0.02)
    raise layout.Refused(f"no namespaces: {(layout.LOGS / 'node.log').read_text().strip()}")


def _processes() -> Iterator[int]:
    yield from (int(file.name) for file in Path("/proc").iterdir() if file.name.isdigit())


def _link(pid: int, name: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())
    except OSError:
        return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise layout.Refused(f"{command[0]}: {(done.stderr or done.stdout).strip()[-500:]}")
