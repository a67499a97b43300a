"""Pure: jobs for the mounter and their outcomes, and their encoding as messages.

Only small modules of the standard library are imported, because the mounter is a separate process
that must stay small.
"""

import json
from typing import Final, NamedTuple

MESSAGE_MAX: Final = 16_384
"""The longest message between the broker and the mounter, in bytes."""
STARTED: Final = "started"
"""The stage of an outcome that is not final: a child has the job's descriptors."""
ATTACHING: Final = "attaching"
"""The stage of an outcome that is not final: the mount exists, and is about to be attached."""
_TEXT_MAX: Final = 1000
"""The longest text in an outcome, in characters; a character takes at most twelve bytes."""


class Caller(NamedTuple):
    """The process that sent the request, as the kernel sees it.

    `uid`, `gid` and `groups` are ids in the host's user namespace. `user_id` and `group_id` are the
    same ids as seen in the user namespace that will own the mount: the pod's user namespace if
    `user_namespace` is set, else the host's. `overrides` means that the process may write to any
    directory in its namespace (CAP_DAC_OVERRIDE), like root in a container.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    user_id: int
    group_id: int
    user_namespace: bool
    overrides: bool


class MountJob(NamedTuple):
    """A request to mount on a directory or file that the caller sent.

    `strings` and `flags` are parameters of fsconfig(2), without those that the mounter sets itself:
    `fd`, `rootmode`, `user_id` and `group_id`. `attributes` are MOUNT_ATTR bits of fsmount(2), of
    which NOSUID and NODEV are always set. With `sync_init`, the caller first receives the
    descriptor of /dev/fuse, and requests the mount later.
    """

    caller: Caller
    strings: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    attributes: int
    sync_init: bool = False


class UnmountJob(NamedTuple):
    """A request to remove the mount whose root the caller sent; `lazy` means MNT_DETACH."""

    caller: Caller
    lazy: bool


class ReceiveJob(NamedTuple):
    """A request to receive a packet and pass it on, with its descriptor only if that is O_PATH."""


class DiscardJob(NamedTuple):
    """A request to close a descriptor that a pod has sent, or a pod's connection.

    With a connection, the descriptors in its unread packets are closed as well.
    """


class SelfTestJob(NamedTuple):
    """A request to make, use and remove a test mount through the broker's socket at `socket`."""

    socket: str


class Outcome(NamedTuple):
    """The outcome of a job: `errno` is 0, or an error number that `text` explains.

    `text` is one line without a full stop. `stage` is the step that failed, empty if none did.
    After a mount, `minor` is the minor number of its device, and so the name of its directory in
    /sys/fs/fuse/connections; `inode` and `created_ns` distinguish that directory from a later one
    with the same name. After a failure, these three describe a mount that may still exist.
    """

    errno: int = 0
    text: str = ""
    stage: str = ""
    minor: int = 0
    inode: int = 0
    created_ns: int = 0


Job = MountJob | UnmountJob | ReceiveJob | DiscardJob | SelfTestJob


def encode(job: Job) -> bytes:
    """Return a job as a message."""
    return json.dumps([type(job).__name__, job]).encode()


def decode(message: bytes) -> Job:
    """Return the job in a message. Raises ValueError if there is none."""
    match json.loads(message):
        case ["MountJob", [caller, strings, flags, int(attributes), bool(sync_init)]]:
            pairs = tuple((str(key), str(value)) for key, value in strings)
            names = tuple(map(str, flags))
            return MountJob(_caller(caller), pairs, names, attributes, sync_init)
        case ["UnmountJob", [caller, bool(lazy)]]:
            return UnmountJob(_caller(caller), lazy)
        case ["ReceiveJob", []]:
            return ReceiveJob()
        case ["DiscardJob", []]:
            return DiscardJob()
        case ["SelfTestJob", [str(socket)]]:
            return SelfTestJob(socket)
    raise ValueError("not a job")


def encode_outcome(outcome: Outcome) -> bytes:
    """Return an outcome as a message; its text is cut to fit."""
    return json.dumps(outcome._replace(text=outcome.text[:_TEXT_MAX])).encode()


def decode_outcome(message: bytes) -> Outcome:
    """Return the outcome in a message. Raises ValueError if there is none."""
    match json.loads(message):
        case [int(errno), str(text), str(stage), int(minor), int(inode), int(created_ns)]:
            return Outcome(errno, text, stage, minor, inode, created_ns)
    raise ValueError("not an outcome")


def _caller(fields: list[object]) -> Caller:
    match fields:
        case [
            int(uid),
            int(gid),
            [*groups],
            int(user_id),
            int(group_id),
            bool(user_namespace),
            bool(overrides),
        ]:
            members = tuple(int(str(group)) for group in groups)
            return Caller(uid, gid, members, user_id, group_id, user_namespace, overrides)
    raise ValueError("not a caller")
