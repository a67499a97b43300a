"""A FUSE daemon of one process, without any library; its file system has a file `hello`.

As a program it runs in a pod that has nothing but the interpreter. It asks the broker for the mount
as the helper does, with its own implementation of the protocol, and serves the mount until it is
removed. It prints `mounted`, and `unmounted` at the end; it writes a refusal to stderr, and exits
with its errno.

It reads the operations named by `stall`, but never answers them.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Collection

TEXT = b"hello from the daemon\n"
ROOT, HELLO = 1, 2
MOUNT, SYNC_INIT, CONTINUE = 1, 4, 5
_PACKET = struct.Struct("<4sBBHII")
_SYNC_INIT_IOCTL = 0xE503
"""FUSE_DEV_IOC_SYNC_INIT of linux/fuse.h."""
_OPCODES = {
    1: "LOOKUP",
    2: "FORGET",
    3: "GETATTR",
    14: "OPEN",
    15: "READ",
    17: "STATFS",
    18: "RELEASE",
    25: "FLUSH",
    26: "INIT",
    27: "OPENDIR",
    28: "READDIR",
    29: "RELEASEDIR",
    34: "ACCESS",
    36: "INTERRUPT",
    38: "DESTROY",
    42: "BATCH_FORGET",
}
_UNANSWERED = ("FORGET", "BATCH_FORGET", "INTERRUPT")


class RefusedError(Exception):
    """The broker has refused the mount: errno and text."""


def connected(address: str) -> socket.socket:
    """Return a socket connected to the broker; `address` is a path or a descriptor's number."""
    if address.isdecimal():
        return socket.socket(fileno=int(address))
    broker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    broker.connect(address)
    return broker


def mount(
    broker: socket.socket,
    directory: str,
    options: str = "",
    *,
    sync_init: bool = False,
    stall: Collection[str] = (),
) -> int:
    """Return the descriptor of /dev/fuse of a new mount. Raises RefusedError.

    With `sync_init` a thread already serves the mount, which waits for the answer to INIT.
    """
    point = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    request = _packet(MOUNT, options.encode(), flags=2 if sync_init else 0)
    socket.send_fds(broker, [request], [point])
    os.close(point)
    device = _reply(broker, SYNC_INIT if sync_init else MOUNT)
    if sync_init:
        # before Linux 6.18: ENOTTY, and the mount does not wait
        with contextlib.suppress(OSError):
            fcntl.ioctl(device, _SYNC_INIT_IOCTL)
        threading.Thread(target=serve, args=(device, stall), daemon=True).start()
        broker.send(_packet(CONTINUE))
        _reply(broker, MOUNT)
    return device


def serve(device: int, stall: Collection[str] = ()) -> None:
    """Answer the kernel's requests until the mount is removed."""
    # ENODEV: the mount is removed
    with contextlib.suppress(OSError):
        while request := os.read(device, 1 << 18):
            _, opcode, unique, node, *_ = struct.unpack_from("IIQQ", request)
            operation = _OPCODES.get(opcode, "")
            if operation in stall or operation in _UNANSWERED:
                continue
            answer = _answer(operation, node, request[40:])
            error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
            os.write(device, struct.pack("IiQ", 16 + len(body), error, unique) + body)


def _packet(operation: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return _PACKET.pack(b"MFUS", 1, operation, flags, 0, len(payload)) + payload


def _reply(broker: socket.socket, expected: int) -> int:
    packet, descriptors, _, _ = socket.recv_fds(broker, 4096, 4)
    if not packet:
        raise RefusedError(errno.ECONNREFUSED, "the broker has closed the connection")
    _, _, operation, _, code, _ = _PACKET.unpack_from(packet)
    if code:
        raise RefusedError(code, packet[_PACKET.size :].decode())
    assert operation == expected, packet
    return descriptors[0] if descriptors else -1


def _answer(operation: str, node: int, body: bytes) -> bytes | int:
    answer: bytes | int = errno.ENOSYS
    match operation:
        case "INIT":
            _, _, readahead = struct.unpack_from("III", body)
            answer = struct.pack("IIIIHHIIHHI28x", 7, 31, readahead, 0, 12, 9, 65536, 1, 0, 0, 0)
        case "GETATTR":
            answer = struct.pack("QII", 0, 0, 0) + _attributes(node)
        case "LOOKUP" if (node, body) == (ROOT, b"hello\0"):
            answer = struct.pack("QQQQII", HELLO, 0, 0, 0, 0, 0) + _attributes(HELLO)
        case "LOOKUP":
            answer = errno.ENOENT
        case "OPEN" | "OPENDIR":
            answer = struct.pack("QIi", 0, 0, 0)
        case "READ" | "READDIR":
            content = TEXT if operation == "READ" else _listing()
            _, offset, size = struct.unpack_from("QQI", body)
            answer = content[offset : offset + size]
        case "STATFS":
            answer = bytes(80)
        case "ACCESS" | "FLUSH" | "RELEASE" | "RELEASEDIR" | "DESTROY":
            answer = b""
    return answer


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    size = 0 if node == ROOT else len(TEXT)
    times = (0,) * 6
    owner = (os.getuid(), os.getgid())
    return struct.pack("QQQ3Q3I7I", node, size, 0, *times, mode, 1, *owner, 0, 4096, 0)


def _listing() -> bytes:
    listing = b""
    for node, kind, name in ((ROOT, 4, b"."), (ROOT, 4, b".."), (HELLO, 8, b"hello")):
        padded = name.ljust(-(-len(name) // 8) * 8, b"\0")
        listing += struct.pack("QQII", node, len(listing) + 24 + len(padded), len(name), kind)
        listing += padded
    return listing


def main() -> None:
    """Mount and serve, as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("broker", help="path of the socket, or number of its descriptor")
    parser.add_argument("directory")
    parser.add_argument("--options", default="")
    parser.add_argument("--sync-init", action="store_true")
    parser.add_argument("--stall", nargs="*", default=[])
    arguments = parser.parse_args()
    broker = connected(arguments.broker)
    try:
        device = mount(
            broker,
            arguments.directory,
            arguments.options,
            sync_init=arguments.sync_init,
            stall=arguments.stall,
        )
    except RefusedError as refused:
        code, text = refused.args
        sys.stderr.write(f"{text}\n")
        sys.exit(code)
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    serve(device, arguments.stall)
    sys.stdout.write("unmounted\n")


if __name__ == "__main__":
    main()
