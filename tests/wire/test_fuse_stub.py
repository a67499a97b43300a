"""Why a container with CAP_SYS_ADMIN cannot use the broker: the kernel's error for the stub."""

import errno
import os
import pathlib
import subprocess
import sys
from typing import Final

import pytest

from tests.worlds import fuse_pods

pytestmark = fuse_pods.needs_pods()

MOUNT: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={os.open(sys.argv[1], os.O_RDWR)},rootmode=40000,user_id=0,group_id=0"
assert libc.mount(b"x", sys.argv[2].encode(), b"fuse", 6, options.encode()) == -1
print(ctypes.get_errno())
"""
WITHOUT: Final = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")


@pytest.mark.parametrize(("drops", "error"), [((), errno.EINVAL), (WITHOUT, errno.EPERM)])
def test_only_without_the_capability_the_stub_sends_a_library_to_the_helper(
    tmp_path: pathlib.Path, drops: tuple[str, ...], error: int
) -> None:
    # libfuse calls fusermount after EPERM, and after no other error (lib/mount.c)
    os.mkfifo(tmp_path / "dev-fuse")
    (tmp_path / "mnt").mkdir()
    private = ("unshare", "--mount", "--propagation", "private", *drops)
    command = [sys.executable, "-I", "-c", MOUNT, str(tmp_path / "dev-fuse"), str(tmp_path / "mnt")]
    assert int(subprocess.check_output([*private, *command])) == error
