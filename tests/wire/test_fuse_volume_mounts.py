import errno
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from muster_fuse.volume import tmpfs
from tests.worlds import mount_namespace

pytestmark = mount_namespace.needs_root

_MOUNTS_AS_A_POD = """
import ctypes, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={descriptor},rootmode=40000,user_id=1000,group_id=1000".encode()
assert libc.mount(b"x", b"/", b"fuse", 0, options) == -1
print(os.strerror(ctypes.get_errno()))
"""
_AS_A_POD = ("setpriv", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all")


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    program = tmp_path / "helper"
    program.write_text("#!/bin/sh\necho helped\n")
    return program


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path / "pods" / "6a5f"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "kubelet" / "pods" / "6a5f" / "volumes" / "a b" / "mount"


def test_a_volume_has_the_helper_a_stub_and_no_more(helper: Path, pod: Path, target: Path) -> None:
    def body() -> dict[str, str]:
        tmpfs.make(pod, helper)
        tmpfs.attach(pod, target)
        return {path.name: stat.filemode(path.lstat().st_mode) for path in target.iterdir()}

    assert mount_namespace.inside(body) == {
        "fusermount3": "-rwxr-xr-x",
        "dev-fuse": "prw-rw-rw-",
    }


def test_root_cannot_write_to_a_volume_even_where_a_runtime_makes_its_mount_writable(
    helper: Path, pod: Path, target: Path
) -> None:
    def body() -> list[int | None]:
        tmpfs.make(pod, helper)
        tmpfs.attach(pod, target)
        _run("mount", "-o", "remount,bind,rw", str(target))
        return [
            _error((target / "x").touch),
            _error((target / "fusermount3").unlink),
            _error(lambda: (target / "fusermount3").open("wb")),
        ]

    assert mount_namespace.inside(body) == [errno.EROFS] * 3


def test_a_pod_runs_the_helper_connects_to_the_socket_and_is_refused_by_mount_with_the_stub(
    helper: Path, pod: Path, target: Path
) -> None:
    def body() -> list[str]:
        tmpfs.make(pod, helper)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            tmpfs.set_read_only(pod, read_only=False)
            listening.bind(str(pod / tmpfs.SOCKET))
            (pod / tmpfs.SOCKET).chmod(0o666)
            tmpfs.set_read_only(pod, read_only=True)
            listening.listen()
            tmpfs.attach(pod, target)
            connect = "import socket, sys; socket.socket(1, 5).connect(sys.argv[1])"
            python = (*_AS_A_POD, sys.executable, "-c")
            return [
                _run(*_AS_A_POD, f"./{tmpfs.HELPER}", cwd=target),
                _run(*python, connect, tmpfs.SOCKET, cwd=target),
                _run(*python, _MOUNTS_AS_A_POD, tmpfs.STUB, cwd=target),
            ]

    assert mount_namespace.inside(body) == ["helped", "", "Operation not permitted"]


def test_a_new_socket_can_be_made_while_the_volume_is_in_use(
    helper: Path, pod: Path, target: Path
) -> None:
    def body() -> tuple[bool, int | None]:
        tmpfs.make(pod, helper)
        tmpfs.attach(pod, target)
        tmpfs.set_read_only(pod, read_only=False)
        (pod / tmpfs.SOCKET).touch()
        tmpfs.set_read_only(pod, read_only=True)
        return (target / tmpfs.SOCKET).exists(), _error((pod / "x").touch)

    assert mount_namespace.inside(body) == (True, errno.EROFS)


def test_publishing_again_changes_nothing(helper: Path, pod: Path, target: Path) -> None:
    def body() -> bool:
        tmpfs.make(pod, helper)
        tmpfs.attach(pod, target)
        before = Path("/proc/thread-self/mountinfo").read_text()
        tmpfs.make(pod, helper)
        tmpfs.attach(pod, target)
        return Path("/proc/thread-self/mountinfo").read_text() == before

    assert mount_namespace.inside(body)


def test_a_volume_replaces_whatever_else_is_mounted_at_the_kubelets_directory(
    helper: Path, pod: Path, target: Path
) -> None:
    def body() -> tuple[bool, bool]:
        tmpfs.make(pod, helper)
        target.mkdir(parents=True)
        for _ in range(3):
            _run("mount", "-t", "tmpfs", "stale", str(target))
        tmpfs.attach(pod, target)
        return tmpfs.mounted_at(target) == tmpfs.mounted_at(pod), (target / tmpfs.HELPER).exists()

    assert mount_namespace.inside(body) == (True, True)


def test_a_volume_that_was_made_in_part_is_made_anew(helper: Path, pod: Path) -> None:
    def body() -> list[str]:
        pod.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "killed", str(pod))
        (pod / tmpfs.HELPER).touch()
        tmpfs.make(pod, helper)
        assert len(tmpfs.mounted_at(pod)) == 1
        return _names(pod)

    assert mount_namespace.inside(body) == ["dev-fuse", "fusermount3"]


def test_no_link_that_a_pod_leaves_in_its_volume_is_followed(helper: Path, pod: Path) -> None:
    """Root in a pod may write to its volume while a new socket is made, and keep it writable."""

    def body() -> list[str]:
        tmpfs.make(pod, helper)
        tmpfs.set_read_only(pod, read_only=False)
        for name in (tmpfs.STUB, tmpfs.SOCKET):
            (pod / name).unlink(missing_ok=True)
        os.mkfifo(pod.parent / "fifo")
        (pod / tmpfs.STUB).symlink_to(pod.parent / "fifo")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(pod.parent / "s"))
            (pod / tmpfs.SOCKET).symlink_to(pod.parent / "s")
            assert not tmpfs.has(pod / tmpfs.SOCKET, stat.S_ISSOCK)
        tmpfs.make(pod, helper)
        return sorted(stat.filemode(path.lstat().st_mode) for path in pod.iterdir())

    assert mount_namespace.inside(body) == ["-rwxr-xr-x", "prw-rw-rw-"]


def test_a_volume_that_cannot_be_filled_leaves_no_mount(tmp_path: Path, pod: Path) -> None:
    def body() -> tuple[int | None, list[bytes], bool]:
        failed = _error(lambda: tmpfs.make(pod, tmp_path / "absent"))
        return failed, tmpfs.mounted_at(pod), pod.exists()

    assert mount_namespace.inside(body) == (errno.ENOENT, [], False)


def test_a_volume_is_removed_at_once_while_it_is_in_use_and_a_hung_file_system_is_below_it(
    helper: Path, pod: Path, target: Path
) -> None:
    if not Path("/dev/fuse").exists():
        pytest.skip("this kernel has no /dev/fuse")

    def body() -> tuple[float, list[bytes], list[bytes], bool, bool]:
        tmpfs.make(pod, helper)
        tmpfs.set_read_only(pod, read_only=False)
        (pod / "below").mkdir()
        tmpfs.attach(pod, target)
        # no daemon answers: every access to this directory hangs
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        below = str(target / "below")
        _run("mount", "-i", "-t", "fuse", "-o", options, "hung", below, keep=[device])
        in_use = os.open(target / tmpfs.HELPER, os.O_RDONLY)
        began = time.monotonic()
        tmpfs.remove(target)
        tmpfs.remove(pod)
        took_s = time.monotonic() - began
        os.close(in_use)
        os.close(device)
        left = target.exists(), pod.exists()
        return took_s, tmpfs.mounted_at(target), tmpfs.mounted_at(pod), *left

    took_s, *left = mount_namespace.inside(body)
    assert left == [[], [], False, False]
    assert took_s < 1


def test_what_is_gone_already_is_removed_without_an_error(pod: Path) -> None:
    def body() -> None:
        tmpfs.remove(pod)
        pod.mkdir(parents=True)
        tmpfs.remove(pod)

    mount_namespace.inside(body)
    assert not pod.exists()


_IN_A_CONTAINER: Final = """
import pathlib, sys
from muster_fuse.volume import tmpfs
place = pathlib.Path(sys.argv[1])
pod, target = place / "pods" / "6a5f", place / "target"
tmpfs.make(pod, pathlib.Path(sys.argv[2]))
tmpfs.attach(pod, target)
print("made", flush=True)
sys.stdin.readline()
tmpfs.set_read_only(pod, read_only=False)
(pod / "broker.sock").touch()
tmpfs.set_read_only(pod, read_only=True)
print("changed", flush=True)
sys.stdin.readline()
tmpfs.remove(target)
tmpfs.remove(pod)
"""


def test_a_volume_made_in_the_brokers_container_is_the_nodes_as_well(
    helper: Path, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    target = place / "target"

    def body() -> list[object]:
        _run("mount", "-t", "tmpfs", "node", str(place))
        _run("mount", "--make-shared", str(place))
        command = [
            *("unshare", "--mount", "--propagation", "unchanged"),
            *(sys.executable, "-c", _IN_A_CONTAINER, str(place), str(helper)),
        ]
        pipe = subprocess.PIPE
        seen: list[object] = []
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as container:
            assert container.stdout is not None
            assert container.stdin is not None
            seen.append(container.stdout.readline())
            seen += [_names(target), _error((target / "x").touch)]
            container.stdin.write("\n")
            container.stdin.flush()
            seen.append(container.stdout.readline())
            seen += [_names(target), _error((target / "x").touch)]
            container.communicate("\n")
        return [*seen, container.returncode, _names(place)]

    assert mount_namespace.inside(body) == [
        "made\n",
        ["dev-fuse", "fusermount3"],
        errno.EROFS,
        "changed\n",
        ["broker.sock", "dev-fuse", "fusermount3"],
        errno.EROFS,
        0,
        ["pods"],
    ]


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _error(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


def _run(*command: str, cwd: Path | None = None, keep: Sequence[int] = ()) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=cwd, pass_fds=keep
    )
    return done.stdout.strip()
