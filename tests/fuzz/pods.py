"""Fuzz targets for requests of pods to the FUSE broker, and for files of processes in /proc."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from muster_fuse import protocol
from muster_fuse.request import caller, options
from tests.fuzz.target import split, target

_FLAGS: Final = frozenset({"ro", "sync", "dirsync", "default_permissions", "allow_other"})
_STRINGS: Final = frozenset({"source", "subtype", "max_read"})
_ATTRIBUTES: Final = 0x1 | 0x8 | 0x10
_UID: Final = "0f2c9d3e-1b7a-4e53-9c55-6f0d2a1b3c4d"
_WORDS: Final = ("suid", "dev", "blkdev", "context=", "allow_other", "fsname=", "max_read=", "ro,")


def _packets() -> Iterator[bytes]:
    head = b"MFUS\x01"
    yield head + b"\x01\x00\x00" + bytes(4) + b"\x04\x00\x00\x00ro,x"
    yield head + b"\x01\x02\x00" + bytes(8)
    yield head + b"\x02\x01\x00" + bytes(8)
    yield head + b"\x03\x00\x00" + bytes(8)


@target(seeds=_packets, words=("MFUS",))
def fuse_packets(data: bytes) -> None:
    """Check that an accepted packet has exactly the descriptors that its operation needs."""
    for descriptors in range(4):
        with contextlib.suppress(protocol.MalformedPacket):
            request = protocol.parse(data, descriptors=descriptors)
            assert descriptors == protocol.DESCRIPTORS.get(request.operation, 0)
            assert len(data) <= protocol.PACKET_MAX


def _options() -> Iterator[bytes]:
    yield b"rw,nosuid,nodev,fsname=host:/a\\,b,subtype=sshfs,max_read=65536"
    yield b"ro,allow_other,default_permissions,noexec,noatime,sync,dirsync,auto_unmount,x-a=b"
    yield b"suid,dev,blkdev,context=a,fd=3,rootmode=40000,user_id=0"


@target(seeds=_options, words=_WORDS, long=lambda parts: b",".join([b"fsname=a\\,b"] * parts))
def mount_options(data: bytes) -> None:
    """Check that accepted mount options are on the list of allowed ones, and printable."""
    with contextlib.suppress(options.RefusedOption):
        parameters = options.parse(data, allow_other=True)
        assert set(parameters.flags) <= _FLAGS
        assert not parameters.attributes & ~_ATTRIBUTES
        assert {key for key, _ in parameters.strings} <= _STRINGS
        for _, value in parameters.strings:
            assert value.isprintable()
            assert len(value.encode()) <= options.VALUE_MAX


def _texts() -> Iterator[bytes]:
    yield f"cgroup\n3:cpu:/kubepods/burstable/pod{_UID}/x\n0::/\n".encode()
    yield b"cgroup\n0::/kubepods.slice/kubepods-pod0f2c_9d3e.slice/a.scope\n"
    yield b"status\nName:\tx\\ny\nUid:\t0\t1\t2\t3\nGid:\t0\t1\t2\t3\nGroups:\t5 6 \nCapEff:\t0f\n"
    yield b"ids\n         0     100000      65536\n"
    yield b"fdinfo\npos:\t0\nflags:\t012100000\nmnt_id:\t29\n"
    yield b"mounts\n29 1 0:40 / /a\\040b rw shared:1 - fuse.x src rw,user_id=0\n"


def _long_text(parts: int) -> bytes:
    line = b"29 1 0:40 / /a\\040b rw shared:1 - fuse.x src rw,user_id=0\n"
    return b"mounts\n" + line.replace(b"29", b"30") * parts + line


def _cgroup(text: str) -> None:
    uid = caller.pod_uid(text)
    assert uid is None or "/" not in uid


def _mount(text: str) -> None:
    line = caller.mount_line(text.split("\n"), 29)
    assert line is None or line.mount_id == 29


_READERS: Final[dict[str, Callable[[str], object]]] = {
    "cgroup": _cgroup,
    "status": caller.ids,
    "ids": lambda text: caller.seen_inside(100_000, text),
    "fdinfo": lambda text: caller.descriptor(text, "/"),
    "mounts": _mount,
}


@target(seeds=_texts, words=("kubepods-pod", "/kubepods/pod", "Uid:", "\x0b"), long=_long_text)
def process_texts(data: bytes) -> None:
    """Check that a file in /proc is read, or rejected as unclear."""
    read, body = split(data, _READERS)
    with contextlib.suppress(caller.Unclear):
        if read:
            read(body.decode("utf-8", "surrogateescape"))
