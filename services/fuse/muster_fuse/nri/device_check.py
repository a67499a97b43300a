"""Adapter for the device: a command for init containers that fails if /dev/fuse cannot be opened.

While no NRI plugin is connected, a container starts without its device, and this is not reported.
An init container with this command delays the pod's other containers until the device exists: each
restart recreates the init container, and the runtime calls the plugin again.
"""

import errno
import os
import sys
from typing import Final

_PATH: Final = "/dev/fuse"
_NOT_GIVEN: Final = (
    "the runtime gave this container no device; check that muster-fuse-nri is ready on this node, "
    'and that the pod has the annotation fuse.muster.dev/device: "true"'
)
_NO_MODULE: Final = "the node's kernel has no FUSE; load the module with `modprobe fuse`"
_CAUSES: Final = {
    errno.ENOENT: _NOT_GIVEN,
    errno.EPERM: f"the device cgroup of this container forbids it; {_NOT_GIVEN}",
    errno.EACCES: "the mode of the device, or a security module of the node, does not allow it",
    errno.ENODEV: _NO_MODULE,
    errno.ENXIO: _NO_MODULE,
}


def main() -> int:
    """Open the device and close it; return the exit code."""
    try:
        os.close(os.open(_PATH, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        cause = _CAUSES.get(error.errno or 0, "")
        text = f"{_PATH}: {error.strerror}" + (f": {cause}" if cause else "")
        sys.stderr.write(f"muster: {text}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
