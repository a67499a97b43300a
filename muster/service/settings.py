"""Adapter: configuration: reads a YAML file and the environment into one frozen object.

Precedence: environment over file over defaults. The variable of a key is the prefix and its path,
upper case, levels joined by two underscores: `bus.url` of the plugin is `MUSTER_PLUGIN__BUS__URL`.
A variable's value is read as YAML. Aliases and repeated keys are refused: a few lines of aliases
can stand for gigabytes, and a repeated key hides the first. Problems are told as far as they can be
seen at once (`shapes`), with the file or variable, the path of the key and the value.
"""

import functools
import os
import stat
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from muster.service import validation

Settings = TypeVar("Settings", bound=msgspec.Struct)

_FILE_BYTES_MAX = 1024 * 1024
_OUR_FILES: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_NONE_HELD: Final = "these manifests hold no configuration of muster's"
_UNREADABLE = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    # what PyYAML's constructors let through: `!!int ''`, `!!bool x`, `!!timestamp x`
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)


class BadSettings(ValueError):
    """Settings that cannot be used; `problems` holds one line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


Foreign = Callable[[bytes, str], dict[str, Any]]
"""From the text of a file that was written for something else, and its name, to our tree."""


def load(
    shape: type[Settings],
    *,
    prefix: str,
    file: Path | None,
    environment: Mapping[str, str],
    foreign: Foreign | None = None,
) -> Settings:
    """Return validated settings. Raises BadSettings, whose text names every problem."""
    problems: list[str] = []
    tree: dict[Any, Any] = {}
    if file:
        tree = foreign(_bytes(file), str(file)) if foreign else _read(file, shape)
    variables = _overlay(tree, f"{prefix}__", environment, problems)
    found, wrong = _validated(shape, tree)
    problems.extend(_told(problem, variables, str(file or "")) for problem in wrong)
    if found is None or problems:
        raise BadSettings(problems)
    return found


def validate(shape: type[Settings], tree: object, *, source: str = "") -> Settings:
    """Return a tree, read elsewhere, as validated settings. Raises BadSettings like `load`."""
    if not isinstance(tree, Mapping):
        problem = validation.Problem(
            "", f"expected a mapping of keys, found {validation.quoted(tree)}"
        )
        raise BadSettings([_told(problem, {}, source)])
    found, wrong = _validated(shape, tree)
    if found is None:
        raise BadSettings([_told(problem, {}, source) for problem in wrong])
    return found


def parse(text: bytes, *, source: str) -> list[Any]:
    """Return the tree of each YAML document in a text, strictly. Raises BadSettings."""
    if len(text) > _FILE_BYTES_MAX:
        raise BadSettings([f"{source}: larger than {_FILE_BYTES_MAX} bytes"])
    try:
        return list(yaml.load_all(text.decode(), _Loader))
    except _UNREADABLE as error:
        raise BadSettings([f"{source}: not YAML: {' '.join(str(error).split())}"]) from None


def only(documents: list[Any], shape: type[Settings], *, source: str) -> Any:
    """Return the one document of a file, or of the ConfigMap that stands around it.

    Raises BadSettings where that is not one.
    """
    maps = [one for one in documents if isinstance(one, dict) and "kind" in one]
    if not maps:
        if len(documents) > 1:
            raise BadSettings([f"{source}: {len(documents)} YAML documents, expected one"])
        return documents[0] if documents else None
    keys = {field.encode_name for field in msgspec.structs.fields(shape)}
    found = [
        (name, tree)
        for name, text in _data(maps)
        for tree in parse(text.encode(), source=f"{source}: {name}")
        if isinstance(tree, dict) and not keys.isdisjoint(tree)
    ]
    if len(found) != 1:
        held = ", ".join(name for name, _ in found)
        problem = f"several configurations: {held}; give one file" if held else _NONE_HELD
        raise BadSettings([f"{source}: {problem}"])
    return found[0][1]


class _Loader(yaml.SafeLoader):
    """YAML in which every value is written where it stands, once."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002  # PyYAML's
    ) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[str] = set()
        for key in keys:
            if key.value in seen:
                problem = f"the key {validation.quoted(key.value)} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """Return the tree that YAML says. Raises one of `_UNREADABLE`."""
    return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader


def _bytes(file: Path) -> bytes:
    """Return what a file holds, and a byte more than is allowed if it does. Raises BadSettings.

    Never waits for a writer, except where the file is one that we were started with (`<(...)`).
    """
    is_ours = str(file).startswith(_OUR_FILES)
    try:
        return _given(file) if is_ours and file.is_fifo() else _regular(file)
    except OSError as error:
        raise BadSettings([f"{file}: {error.strerror}"]) from None


@functools.cache
def _given(file: Path) -> bytes:
    """Return what comes through a pipe; it comes once only, and settings are read again."""
    with file.open("rb") as opened:
        return opened.read(_FILE_BYTES_MAX + 1)


def _regular(file: Path) -> bytes:
    """Return what a file holds, for a Path takes no opener. Raises OSError, BadSettings."""
    with open(file, "rb", opener=_at_once) as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise BadSettings([f"{file}: no regular file"])
        return opened.read(_FILE_BYTES_MAX + 1) or b""


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: Path, shape: type[msgspec.Struct]) -> dict[Any, Any]:
    """Return the tree in a file. Raises BadSettings."""
    tree = only(parse(_bytes(file), source=str(file)), shape, source=str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise BadSettings([f"{file}: expected a mapping of keys, found {validation.quoted(tree)}"])
    return tree


def _data(documents: list[dict[Any, Any]]) -> Iterator[tuple[str, str]]:
    """Give each file of the ConfigMaps in manifests, with its name."""
    for document in documents:
        items, data = document.get("items"), document.get("data")
        if document["kind"] == "List" and isinstance(items, list):
            yield from _data([one for one in items if isinstance(one, dict) and "kind" in one])
        elif document["kind"] == "ConfigMap" and isinstance(data, dict):
            for name, text in data.items():
                if isinstance(text, str):
                    yield str(name), text


def _overlay(
    tree: dict[Any, Any], prefix: str, environment: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Lay the variables that start with `prefix` over the tree; return each by its path."""
    laid: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix):
            continue
        path = variable.removeprefix(prefix).lower().split("__")
        try:
            value = _parse(text)
        except _UNREADABLE:
            problems.append(f"{variable}: not YAML: {validation.quoted(text)}")
            continue
        branch: Any = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                problems.append(f"{variable}: {key} is not a section")
                break
        else:
            branch[path[-1]] = value
            laid[".".join(path)] = variable
    return laid


def _validated(
    shape: type[Settings], tree: Mapping[Any, Any]
) -> tuple[Settings | None, list[validation.Problem]]:
    problems: list[validation.Problem] = []
    return validation.read(shape, tree, problems), problems


def _told(problem: validation.Problem, variables: Mapping[str, str], source: str) -> str:
    """Return a problem behind where the value came from: a variable, or the file."""
    for path, variable in variables.items():
        if problem.path == path or problem.path.startswith((f"{path}.", f"{path}[")):
            return f"{variable}: {problem}"
    return f"{source or ('' if problem.path else 'settings')}: {problem}".removeprefix(": ")
