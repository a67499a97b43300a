"""FUSE programs of Debian, whose ordinary commands mount, use and unmount in pods.

In the container, fusermount and fusermount3 are the helper, and /dev/fuse is a FIFO, as in the
volume of the broker. The broker, its mounter and the kernel are real.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from muster_fuse.broker import observations
from tests.worlds import fuse_broker, fuse_helper, fuse_pods

pytestmark = fuse_pods.needs_pods()
SFTP_SERVER: Final = "/usr/lib/openssh/sftp-server"
DEBIAN: Final = (
    "apt-get install bindfs fuse3 gocryptfs openssh-server rclone squashfs-tools squashfuse sshfs"
)
READ: Final = 'test "$(cat mnt/file)" = content'
READ_AND_WRITE: Final = f"""
{READ}
echo new > mnt/new
test "$(cat mnt/new)" = new
"""
AWAIT: Final = f"until {READ} 2>&1; do sleep 0.05; done"
SITE: Final = "/mnt/site"
FILE_SYSTEM: Final = """
cat > file_system.py <<END
import errno, sys
import mfusepy

class FileSystem(mfusepy.Operations):
    use_ns = True

    def getattr(self, path, fh=None):
        if path == "/":
            return {"st_mode": 0o40755, "st_nlink": 2}
        if path == "/file":
            return {"st_mode": 0o100644, "st_nlink": 1, "st_size": 8}
        raise mfusepy.FuseOSError(errno.ENOENT)

    def read(self, path, size, offset, fh):
        return b"content\\n"[offset : offset + size]

mfusepy.FUSE(FileSystem(), "mnt", foreground=False)
END
"""
GONE: Final = """
! grep -q " $PWD/mnt " /proc/self/mounts
"""


class Program(NamedTuple):
    """A FUSE program: the commands that it needs, and a script that mounts, uses and unmounts."""

    needs: tuple[str, ...]
    script: str
    subtype: str = ""


PROGRAMS: Final = {
    "bindfs (libfuse 2)": Program(
        ("bindfs", "fusermount"), f"bindfs src mnt\n{READ_AND_WRITE}\nfusermount -u mnt"
    ),
    "sshfs (libfuse 3)": Program(
        ("sshfs", "fusermount3", SFTP_SERVER),
        f"sshfs -o ssh_command=$PWD/ssh host:$PWD/src mnt\n{READ_AND_WRITE}\nfusermount3 -u mnt",
        subtype="sshfs",
    ),
    "rclone": Program(
        ("rclone", "fusermount3"),
        f"rclone mount --config /dev/null src mnt &\n{AWAIT}\nfusermount3 -u mnt\nwait $!",
        subtype="rclone",
    ),
    "squashfuse": Program(
        ("squashfuse", "mksquashfs", "fusermount3"),
        "mksquashfs src image -quiet -no-progress\nsquashfuse image mnt\n"
        f"{READ}\nfusermount3 -u mnt",
        subtype="squashfuse",
    ),
    "gocryptfs (go-fuse)": Program(
        ("gocryptfs", "fusermount3"),
        "mkdir cipher\ngocryptfs -q -extpass 'echo secret' -init -scryptn 10 cipher\n"
        "gocryptfs -q -extpass 'echo secret' cipher mnt\necho content > mnt/file\n"
        f"{READ_AND_WRITE}\nfusermount3 -u mnt",
        subtype="gocryptfs",
    ),
    "mfusepy (Python)": Program(
        ("fusermount3",),
        f"{FILE_SYSTEM}\nPYTHONPATH={SITE} {fuse_pods.PYTHON} -s file_system.py\n"
        f"{READ}\nfusermount3 -u mnt",
    ),
}


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuse_helper.build(tmp_path_factory.mktemp("helper"), short=False)


@contextlib.contextmanager
def pod_with(
    running: fuse_broker.Running,
    helper: Path,
    place: Path,
    *,
    user_namespace: bool = False,
    read_only: bool = False,
) -> Iterator[fuse_pods.Container]:
    """Run a pod with everything that the CSI volume provides."""
    uid = "1f0c5a1e-1b7a-4e53-9c55-6f0d2a1b3c4d"
    running.open(uid)
    stub = place / "dev-fuse"
    os.mkfifo(stub)
    stub.chmod(0o666)
    mfusepy = importlib.util.find_spec("mfusepy")
    assert mfusepy is not None
    assert mfusepy.origin is not None
    binds = {
        "/run/muster-fuse": running.socket_of(uid).parent,
        "/dev/fuse": stub,
        SITE: Path(mfusepy.origin).parent,
    }
    binds |= {f"/usr/bin/{name}": helper for name in installed("fusermount", "fusermount3")}
    with fuse_pods.container(
        pod_uid=uid, user_namespace=user_namespace, read_only=read_only, binds=binds
    ) as pod:
        yield pod


def installed(*names: str) -> list[str]:
    return [name for name in names if Path("/usr/bin", name).exists()]


def require(*names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} ({DEBIAN})")


def use(pod: fuse_pods.Container, script: str, *, uid: int) -> None:
    """Run a script in the home directory of the container; it must succeed."""
    prepare = f"""
cd {fuse_broker.HOME}
mkdir src mnt
echo content > src/file
printf '#!/bin/sh\\nexec {SFTP_SERVER}\\n' > ssh
chmod +x ssh
export HOME=$PWD
"""
    status, output = pod.run("/bin/sh", "-exc", prepare + script, uid=uid)
    assert status == 0, output


@pytest.mark.parametrize("uid", [0, fuse_pods.USER], ids=["root", "user"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_mounts_is_used_and_is_unmounted(
    name: str, uid: int, helper: Path, tmp_path: Path
) -> None:
    program = PROGRAMS[name]
    require(*program.needs)
    # `running` also asserts that no mount is left on this machine
    with fuse_broker.running() as running, pod_with(running, helper, tmp_path) as pod:
        use(pod, f"{program.script}\n{GONE}", uid=uid)
        event = running.seen(observations.Mounted)
        place = f"{fuse_broker.HOME}/mnt"
        mount = event.mount
        assert (mount.mount_point, mount.user_id, mount.subtype) == (place, uid, program.subtype)
        assert running.of(observations.Refused) == []
        fuse_broker.until(lambda: not running.broker.mounts())


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("uid", [0, fuse_pods.USER], ids=["root", "user"])
def test_a_read_only_root_and_a_user_namespace_make_no_difference(
    uid: int, helper: Path, tmp_path: Path, *, read_only: bool
) -> None:
    program = PROGRAMS["bindfs (libfuse 2)"]
    require(*program.needs)
    with (
        fuse_broker.running() as running,
        pod_with(
            running, helper, tmp_path, user_namespace=not read_only, read_only=read_only
        ) as pod,
    ):
        use(pod, f"{program.script}\n{GONE}", uid=uid)


@pytest.mark.parametrize("program", ["bindfs", "sshfs"])
def test_with_auto_unmount_a_program_that_is_killed_leaves_no_mount(
    program: str, helper: Path, tmp_path: Path
) -> None:
    require(program, "fusermount3", SFTP_SERVER)
    command = {
        "bindfs": "bindfs -f -o auto_unmount src mnt",
        "sshfs": "sshfs -f -o auto_unmount,ssh_command=$PWD/ssh host:$PWD/src mnt",
    }[program]
    wait = 'while grep -q " $PWD/mnt " /proc/self/mounts; do sleep 0.05; done'
    with fuse_broker.running() as running, pod_with(running, helper, tmp_path) as pod:
        script = f"{command} &\n{AWAIT}\nkill -9 $!\n{wait}"
        use(pod, script, uid=fuse_pods.USER)
        fuse_broker.until(lambda: not running.broker.mounts())


def test_a_mount_whose_program_was_killed_is_reported_and_can_be_unmounted(
    helper: Path, tmp_path: Path
) -> None:
    require("bindfs", "fusermount")
    dead = "until cat mnt/file 2>&1 | grep -q 'not connected'; do sleep 0.05; done"
    with fuse_broker.running() as running, pod_with(running, helper, tmp_path) as pod:
        use(pod, f"bindfs -f src mnt &\n{AWAIT}\nkill -9 $!\n{dead}", uid=fuse_pods.USER)
        running.seen(observations.ConditionChanged)
        script = f"cd {fuse_broker.HOME}\nfusermount -u mnt\n{GONE}"
        assert pod.run("/bin/sh", "-exc", script)[0] == 0
        fuse_broker.until(lambda: not running.broker.mounts())


def test_what_the_broker_refuses_is_a_line_that_the_program_prints(
    helper: Path, tmp_path: Path
) -> None:
    require("bindfs", "fusermount")
    with fuse_broker.running() as running, pod_with(running, helper, tmp_path) as pod:
        status, output = pod.run("/usr/bin/bindfs", fuse_broker.HOME, "/srv")
        refused = running.seen(observations.Refused)
        line = f"fusermount: cannot mount on /srv: {refused.text}"
        assert (status, line in output.splitlines()) == (1, True), output


def test_the_helper_for_the_image_is_static_and_small(tmp_path: Path) -> None:
    helper = fuse_helper.build(tmp_path, "-Os", "-static", "-s", compiler="musl-gcc", short=False)
    described = subprocess.run(
        ["/usr/bin/ldd", helper], capture_output=True, text=True, check=False
    )
    assert "statically linked" in described.stdout or "not a dynamic" in described.stderr
    assert helper.stat().st_size < 100_000
