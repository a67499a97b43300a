"""Pure: the configuration of one resource: its device nodes, and how containers get them.

A resource consists of groups; the devices of a group are allocated together, as one unit. Mistakes
are rejected here, before any scan, with messages that name the key. `patterns` defines globs and
regular expressions.
"""

import enum
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec

from muster import vocabulary
from muster.service import sections, validation
from muster_plugin.model import advertised, errors, patterns

_PERMISSIONS: Final = re.compile(r"(?!.*(.).*\1)[rwm]{1,3}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")

Glob = Annotated[str, msgspec.Meta(max_length=patterns.GLOB_MAX)]
UsbId = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[0-9A-Fa-f]{4}\Z", description="four hexadecimal digits in quotes ('1a86')"
    ),
]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
GracePeriod = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Argument = Annotated[str, msgspec.Meta(max_length=4096)]


class NodeType(enum.StrEnum):
    """How a container gets a path: as a device node, or as a bind mount."""

    DEVICE = "Device"
    MOUNT = "Mount"


class Registration(enum.StrEnum):
    """How a resource is registered: by a call, by the kubelet's plugin watcher, or by either.

    `auto` first calls Register.
    """

    REGISTER = "register"
    WATCHER = "watcher"
    AUTO = "auto"


class Usb(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A USB device; ids are four hexadecimal digits in quotes; an empty serial matches any."""

    vendor: UsbId
    product: UsbId
    serial: Annotated[str, msgspec.Meta(max_length=253)] = ""

    def __post_init__(self) -> None:
        """Convert the ids to lower case, as in sysfs."""
        msgspec.structs.force_setattr(self, "vendor", self.vendor.lower())
        msgspec.structs.force_setattr(self, "product", self.product.lower())


class Udev(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Selects device nodes by sysfs attributes; all of these shell patterns must match."""

    subsystem: Glob = ""
    driver: Glob = ""
    vendor: Glob = ""
    product: Glob = ""
    attrs: Annotated[Mapping[vocabulary.Name, Glob], msgspec.Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        """Refuse an entry that would match everything."""
        if not (self.subsystem or self.driver or self.vendor or self.product or self.attrs):
            raise ValueError("set at least one of subsystem, driver, vendor, product, attrs")


class Entry(
    errors.CheckedInParts,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"mount_path": "mountPath", "read_only": "readOnly"},
):
    """Device nodes or mounts chosen by one selector, and how a container gets them.

    `limit` is how many units may use one match if other entries of its group have more matches. An
    `optional` entry may have no match. A `shared` entry, such as a control node, may also belong to
    another resource.
    """

    path: Glob = ""
    regex: Glob = ""
    udev: Udev | None = None
    usb: Usb | None = None
    exclude: Annotated[tuple[Glob, ...], msgspec.Meta(max_length=64)] = ()
    type: NodeType = NodeType.DEVICE
    mount_path: Glob = ""
    permissions: str = "rw"
    read_only: bool = False
    limit: Count = 1
    optional: bool = False
    shared: bool = False

    @property
    def is_literal(self) -> bool:
        """Whether only one path can match."""
        return bool(self.path) and patterns.is_literal(self.path)

    @property
    def is_one(self) -> bool:
        """Whether the entry selects a single path, or a single USB device by its serial number."""
        return self.is_literal or bool(self.usb and self.usb.serial)

    def warnings(self) -> Iterator[str]:
        """Yield warnings about valid settings that are probably mistakes."""
        yield from errors.prefixed("regex", patterns.regex_warnings(self.regex))
        yield from errors.prefixed("path", patterns.glob_warnings(self.path))
        for at, glob in enumerate(self.exclude):
            yield from errors.prefixed(f"exclude[{at}]", patterns.glob_warnings(glob))

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._found_by
        yield lambda: _glob_problems("path", self.path) if self.path else ()
        yield lambda: _regex_problems(self.regex) if self.regex else ()
        yield self._exclude_problems
        yield self._place_problems
        yield self._permission_problems
        yield self._type_problems

    def _found_by(self) -> Iterator[str]:
        if sum(map(bool, (self.path, self.regex, self.udev, self.usb))) != 1:
            yield "set exactly one of path, regex, udev, usb"

    def _exclude_problems(self) -> Iterator[str]:
        for at, glob in enumerate(self.exclude):
            yield from _glob_problems(f"exclude[{at}]", glob)

    def _place_problems(self) -> Iterator[str]:
        if self.mount_path:
            yield from errors.prefixed(
                "mountPath", errors.path_problems(self.mount_path.removesuffix("/"))
            )

    def _permission_problems(self) -> Iterator[str]:
        if not _PERMISSIONS.fullmatch(self.permissions):
            # with anything else runc refuses to start the container
            yield f"permissions: {self.permissions!r} is not a combination of r, w and m"

    def _type_problems(self) -> Iterator[str]:
        match self.type:
            case NodeType.DEVICE if self.read_only:
                yield "readOnly: applies only to a Mount; for a Device write permissions: r"
            case NodeType.MOUNT if not self.path:
                yield "type: a Mount needs a path"
            case NodeType.MOUNT if self.permissions != "rw":
                yield "permissions: applies only to a Device; for a Mount write readOnly: true"
            case _:
                pass


class Group(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """The entries that make up one unit, and how many pods may use a unit at a time."""

    devices: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1, max_length=64)]
    count: Count = 1

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._place_problems

    def _place_problems(self) -> Iterator[str]:
        paths = [
            entry.mount_path or entry.path
            for _, entry in validation.whole(self.devices)
            if not entry.mount_path.endswith("/") and (entry.mount_path or entry.is_literal)
        ]
        for path in errors.duplicates(paths):
            yield f"devices: two entries would have the path {path} in the container"


class Expect(msgspec.Struct, frozen=True, kw_only=True):
    """The expected number of devices; fewer devices are a fault."""

    min: Count


class Checks(errors.CheckedInParts, frozen=True, kw_only=True, omit_defaults=True):
    """How a device is checked; the device is Healthy again after `good` good checks in a row."""

    open: bool = False
    command: Annotated[tuple[Argument, ...], msgspec.Meta(max_length=64)] = ()
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    period_s: sections.Pause = 30.0
    good: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._command_problems

    def _command_problems(self) -> Iterator[str]:
        if self.command and not self.command[0].startswith("/"):
            yield f"command: {errors.quoted(self.command[0])} is not an absolute path"
        if any("\0" in argument for argument in self.command):
            yield "command: an argument cannot contain a zero byte"


class Resource(
    errors.CheckedInParts,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"per_match": "perMatch", "pre_start": "preStart"},
):
    """One extended resource; with `per_match`, one resource for each match.

    `env` names the variable that lists the container's device paths; empty means no variable. The
    default contains the resource's name, so that two resources in one container do not collide. A
    device that disappears is Unhealthy for `grace_s` and is then removed from the list.
    """

    name: vocabulary.Name
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=256)]
    per_match: bool = False
    env: str | None = None
    expect: Expect | None = None
    checks: Checks = Checks()
    cdi: bool = False
    pre_start: bool = False
    grace_s: GracePeriod = 60.0
    registration: Registration = Registration.REGISTER

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield every entry with the path of its key."""
        for at, group in enumerate(self.groups):
            for within, entry in enumerate(group.devices):
                yield f"groups[{at}].devices[{within}]", entry

    def warnings(self) -> Iterator[str]:
        """Yield warnings about valid entries that probably do not match what was intended."""
        for key, entry in self.entries():
            yield from (f"{key}.{warning}" for warning in entry.warnings())

    def demands(self) -> Iterator[validation.Demand]:
        """Yield the consistency checks of this section."""
        yield self._name_problems
        yield self._env_problems
        yield self._group_problems
        yield self._match_problems

    def _name_problems(self) -> Iterator[str]:
        problems = advertised.name_problems(self.name, per_match=self.per_match)
        return errors.prefixed("name", problems)

    def _env_problems(self) -> Iterator[str]:
        if self.env and not _VARIABLE.fullmatch(self.env):
            yield f"env: {errors.quoted(self.env)} is not a valid variable name"

    def _group_problems(self) -> Iterator[str]:
        for at, group in validation.whole(self.groups):
            if group in self.groups[:at]:
                first = self.groups.index(group)
                yield f"groups[{at}]: repeats groups[{first}]; increase that group's count instead"

    def _match_problems(self) -> Iterator[str]:
        for at, group in validation.whole(self.groups if self.per_match else ()):
            if len(group.devices) > 1:
                yield f"groups[{at}].devices: perMatch needs one entry; each match is a resource"
            if any(entry.type is NodeType.MOUNT for entry in group.devices):
                yield f"groups[{at}].devices: perMatch is for devices, not for a Mount"


def _regex_problems(regex: str) -> Iterator[str]:
    return errors.prefixed("regex", patterns.regex_problems(regex))


def _glob_problems(key: str, glob: str) -> Iterator[str]:
    problems = [*patterns.glob_problems(glob)] or [*errors.path_problems(glob)]
    yield from errors.prefixed(key, problems)
    if not problems and not patterns.is_literal(glob.split("/")[1]):
        text = "would search the whole file system; begin with the name of a directory"
        yield f"{key}: {errors.quoted(glob)} {text}"
