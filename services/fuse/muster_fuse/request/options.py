"""Pure: converts the option string of fusermount to parameters of a mount.

| class     | options                                                                  |
|-----------|--------------------------------------------------------------------------|
| passed on | ro, noexec, noatime, sync, dirsync, default_permissions, max_read=N      |
| by policy | allow_other                                                              |
| cleaned   | fsname=, subtype=                                                        |
| ignored   | defaults, options for the helper alone, and options that the mounter     |
|           | sets itself: rw, exec, atime, async, nosuid, nodev, nonempty,            |
|           | auto_unmount, x-*, fd=, rootmode=, user_id=, group_id=                   |
| refused   | all others                                                               |

Options are separated by commas. A backslash escapes the next character. If an option appears more
than once, the last one applies.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from muster import escaping

VALUE_MAX: Final = 255
"""The maximum length of a string in fsconfig(2), in bytes."""

_RDONLY: Final = 0x1
_NOEXEC: Final = 0x8
_NOATIME: Final = 0x10
_ATTRIBUTES: Final = {"ro": _RDONLY, "noexec": _NOEXEC, "noatime": _NOATIME}
_FLAGS: Final = frozenset({"ro", "sync", "dirsync", "default_permissions", "allow_other"})
_IGNORED: Final = frozenset(
    {"rw", "exec", "atime", "async", "nosuid", "nodev", "nonempty", "auto_unmount"}
)
_IGNORED_KEYS: Final = frozenset({"fd", "rootmode", "user_id", "group_id"})
_UINT32_MAX: Final = 0xFFFF_FFFF
_NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_SHOWN_MAX: Final = 64
_REASONS: Final = {
    "suid": "programs on a FUSE file system gain no privileges",
    "dev": "device nodes on a FUSE file system cannot be used",
    "blkdev": "block devices are not available to pods",
    "blksize": "block devices are not available to pods",
    "allow_root": "use allow_other, or run the program as the user who needs the files",
    "context": "pods may not choose security labels",
    "fscontext": "pods may not choose security labels",
    "defcontext": "pods may not choose security labels",
    "rootcontext": "pods may not choose security labels",
}


class Parameters(NamedTuple):
    """The parameters of a mount: see jobs.MountJob."""

    strings: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    attributes: int


class RefusedOption(ValueError):
    """An option that is not allowed; the text names the option and the reason."""


def parse(options: bytes, *, allow_other: bool) -> Parameters:
    """Return the parameters in an option string. Raises RefusedOption."""
    flags: set[str] = set()
    attributes = 0
    values: dict[str, str] = {}
    for option in _split(options):
        key, equals, value = option.partition("=")
        if option in _FLAGS or option in _ATTRIBUTES:
            if option == "allow_other" and not allow_other:
                raise _refused(option, "the settings of the broker do not allow it")
            flags |= {option} & _FLAGS
            attributes |= _ATTRIBUTES.get(option, 0)
        elif equals and key in {"fsname", "subtype"}:
            values[key] = _cleaned(value)
        elif equals and key == "max_read":
            if not _NUMBER.fullmatch(value) or int(value) > _UINT32_MAX:
                raise _refused(option, "its value must be a number of bytes")
            values[key] = str(int(value))
        elif not _is_ignored(option, key if equals else ""):
            raise _refused(option, _REASONS.get(key, "unknown to the broker; remove it"))
    return Parameters(_strings(values), tuple(sorted(flags)), attributes)


def _is_ignored(option: str, key: str) -> bool:
    return option in _IGNORED or key in _IGNORED_KEYS or option.startswith("x-")


def _strings(values: dict[str, str]) -> tuple[tuple[str, str], ...]:
    subtype = values.get("subtype", "")
    strings = {
        "source": values.get("fsname", "") or subtype or "fuse",
        "subtype": subtype,
        "max_read": values.get("max_read", ""),
    }
    return tuple((key, value) for key, value in strings.items() if value)


def _split(options: bytes) -> Iterator[str]:
    """Yield the options that are not empty, with their escapes resolved."""
    option = ""
    characters = iter(options.decode("utf-8", "replace"))
    for character in characters:
        if character == ",":
            if option:
                yield option
            option = ""
        else:
            option += next(characters, "\\") if character == "\\" else character
    if option:
        yield option


def _cleaned(value: str) -> str:
    """Make a value safe for a mount table: printable, and not too long."""
    return escaping.plain(value).encode()[:VALUE_MAX].decode("utf-8", "ignore")


def _refused(option: str, why: str) -> RefusedOption:
    shown = escaping.plain(option)
    if len(shown) > _SHOWN_MAX:
        shown = f"{shown[:_SHOWN_MAX]}..."
    return RefusedOption(f"option '{shown}' is refused: {why}")
