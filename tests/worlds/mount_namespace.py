"""Adapter for mount namespaces: runs a function in a new one, with which its mounts disappear.

The function runs in a thread that has left the namespace of the process; threads that it starts
inherit the new one.
"""

import concurrent.futures
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from muster_fuse.kernel import syscalls

Result = TypeVar("Result")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")


def inside(body: Callable[[], Result]) -> Result:
    """Run `body` in a new mount namespace; return its result, or raise its exception."""
    done: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            root = os.open("/", os.O_PATH)
            syscalls.make_private(root)
            os.close(root)
            done.set_result(body())
        except BaseException as error:  # noqa: BLE001  # raised again in the test
            done.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done.result()
