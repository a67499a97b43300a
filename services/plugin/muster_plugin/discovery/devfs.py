"""Adapter: scans /dev and other paths, and names the directories to watch for changes.

Everything is read below `root`, where the host's root directory is mounted; paths in and out are
the host's. Links are resolved, absolute ones below `root` too.
"""

import itertools
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from muster_plugin.config import resources
from muster_plugin.discovery import sysfs
from muster_plugin.model import patterns, scan_result

ENTRIES_MAX: Final = 20_000
DEPTH_MAX: Final = 10

_USB_NODES: Final = "/dev/bus/usb/*/*"
_EVERYTHING: Final = "/dev/**"
_NOT_WALKED: Final = frozenset(f"/dev/{name}" for name in ("pts", "shm", "mqueue", "hugepages"))
"""File systems of their own, with many short-lived files and no devices."""
_PER_PROCESS: Final = "/proc/"
"""/dev/fd and /dev/stdin lead there, to other files for each process."""
_LINKS_MAX: Final = 40
"""Linux, MAXSYMLINKS in include/linux/namei.h."""


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and the directories whose changes may change that.

    For a directory that does not exist, the nearest one above is included; so are the directories
    of link targets.
    """

    result: scan_result.ScanResult = scan_result.ScanResult()
    directories: frozenset[Path] = frozenset()


def scan(
    entries: Iterable[resources.Entry],
    *,
    root: Path = Path("/"),
    entries_max: int = ENTRIES_MAX,
    depth_max: int = DEPTH_MAX,
) -> Scan:
    """Return everything that these entries may match, sorted by path; `matching` selects from it.

    Attributes are read only if an entry asks for attributes, USB devices only if one asks for them.
    """
    entries = tuple(entries)
    walk = _Walk(root, entries_max=entries_max, depth_max=depth_max)
    walk.find(entries)
    names: dict[str, set[str]] = {}
    for name in walk.names:
        real = walk.resolve(name)
        if real is not None:
            names.setdefault(real, set()).add(name)
    facts = sysfs.Sysfs(root, entries)
    nodes = (_node(real, names[real], root=root, facts=facts) for real in sorted(names))
    result = scan_result.ScanResult(
        nodes=tuple(node for node in nodes if node is not None),
        problems=tuple(sorted(set(walk.problems))),
    )
    above = walk.directories | {real.rpartition("/")[0] for real in names}
    return Scan(result=result, directories=frozenset(Path(walk.mounted(p) or "/") for p in above))


class _Walk:
    """One scan of the file system; every directory is read at most once."""

    def __init__(self, root: Path, *, entries_max: int, depth_max: int) -> None:
        self.names: dict[str, None] = {}
        self.directories: set[str] = set()
        self.problems: list[str] = []
        self._root = str(root).rstrip("/")
        self._entries_max = entries_max
        self._entries_left = entries_max
        self._depth_max = depth_max
        self._read: dict[str, tuple[str, ...]] = {}
        self._real: dict[str, str | None] = {"": ""}

    def find(self, entries: Iterable[resources.Entry]) -> None:
        """Find everything that the entries, and their exclusions, could match."""
        globs: set[str] = set()
        for entry in entries:
            globs.update(glob for glob in (entry.path, *entry.exclude) if glob)
            if entry.usb:
                globs.add(_USB_NODES)
            if entry.regex or entry.udev:
                globs.add(_EVERYTHING)
        for glob in sorted(globs):
            self._expand("", patterns.glob(glob).components)

    def mounted(self, path: str) -> str:
        """Return where a path of the host is mounted here."""
        return self._root + path

    def resolve(self, path: str) -> str | None:
        """Resolve every link of a path; None if they form a loop, or lead into /proc."""
        if path not in self._real:
            above, _, name = path.rpartition("/")
            real = self.resolve(above)
            self._real[path] = None if real is None else self._resolved(real, name)
        return self._real[path]

    def _resolved(self, directory: str, name: str) -> str | None:
        """Resolve links one component at a time, as the kernel would if `root` were its root."""
        done, left, followed = directory, [name], 0
        while left:
            part = left.pop()
            if part == "..":
                done = done.rpartition("/")[0]
            elif part not in {"", "."}:
                target = _target(self.mounted(f"{done}/{part}"))
                if target is None:
                    done = f"{done}/{part}"
                    continue
                followed += 1
                if followed > _LINKS_MAX or target.startswith(_PER_PROCESS):
                    return None
                done = "" if target.startswith("/") else done
                left.extend(reversed(target.split("/")))
        return done

    def _expand(self, at: str, components: tuple[str, ...], depth: int = 0) -> None:
        """Add what matches the components below a directory, and the directories to watch."""
        component, rest = components[0], components[1:]
        if at or not self._is_directory(f"/{component}"):
            self.directories.add(at)
        if component == "**":
            self._expand_deep(at, components, depth)
            return
        if patterns.is_literal(component):
            matched: Iterable[str] = (component,)
        else:
            matched = (n for n in self._list(at) if patterns.component_matches(component, n))
        for name in matched:
            path = f"{at}/{name}"
            if not rest:
                self._add(path)
            elif self._is_directory(path):
                self._expand(path, rest, depth)

    def _expand_deep(self, at: str, components: tuple[str, ...], depth: int) -> None:
        """Descend through directories, but not through links: they may lead up again."""
        rest = components[1:]
        if rest:
            self._expand(at, rest, depth)
        for name in self._list(at):
            path = f"{at}/{name}"
            if not rest:
                self._add(path)
            if self.resolve(path) != path or path in _NOT_WALKED or not self._is_directory(path):
                continue
            if depth < self._depth_max:
                self._expand(path, components, depth + 1)
            else:
                self.problems.append(
                    f"{path}: more than {self._depth_max} directories deep; not scanned"
                )

    def _add(self, path: str) -> None:
        try:
            path.encode()
        except UnicodeEncodeError:
            self.problems.append(f"{path!a}: not UTF-8, so the kubelet cannot have it")
        else:
            self.names[path] = None

    def _is_directory(self, path: str) -> bool:
        real = self.resolve(path)
        return real is not None and os.path.isdir(self.mounted(real))  # noqa: PTH112  # a Path for each of thousands costs more than the call

    def _list(self, at: str) -> tuple[str, ...]:
        if at not in self._read:
            self._read[at] = self._names_in(at)
        return self._read[at]

    def _names_in(self, at: str) -> tuple[str, ...]:
        real = self.resolve(at)
        try:
            with os.scandir(self.mounted(real or at)) as opened:
                names = tuple(e.name for e in itertools.islice(opened, self._entries_left + 1))
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except OSError as error:
            self.problems.append(f"{at}: {(error.strerror or str(error)).lower()}")
            return ()
        if len(names) > self._entries_left:
            self.problems.append(
                f"{at}: more than {self._entries_max} entries; not all were scanned"
            )
            names = names[: self._entries_left]
        self._entries_left -= len(names)
        return names


def _target(path: str) -> str | None:
    try:
        return os.readlink(path)  # noqa: PTH115  # a Path for each of thousands costs more than the call
    except OSError:
        return None


def _node(path: str, names: set[str], *, root: Path, facts: sysfs.Sysfs) -> scan_result.Node | None:
    try:
        status = os.stat(f"{str(root).rstrip('/')}{path}", follow_symlinks=False)  # noqa: PTH116  # as above
    except OSError:
        return None  # gone meanwhile, or a dangling link
    kind = _kind(status.st_mode)
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    node = scan_result.Node(
        path=path, kind=kind, major=major, minor=minor, links=tuple(sorted(names - {path}))
    )
    if kind in {scan_result.Kind.CHAR, scan_result.Kind.BLOCK}:
        return facts.describe(node)
    return node


def _kind(mode: int) -> scan_result.Kind:
    if stat.S_ISCHR(mode):
        return scan_result.Kind.CHAR
    if stat.S_ISBLK(mode):
        return scan_result.Kind.BLOCK
    if stat.S_ISDIR(mode):
        return scan_result.Kind.DIRECTORY
    return scan_result.Kind.FILE if stat.S_ISREG(mode) else scan_result.Kind.OTHER
