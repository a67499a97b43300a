"""Adapter for configuration: reads a YAML file and the environment into one frozen object.

The environment overrides the file, which overrides the defaults. A key's variable is the prefix and
the key's path in upper case, joined by two underscores: the plugin's `bus.url` is
`MUSTER_PLUGIN__BUS__URL`. A variable's value is read as YAML. Aliases and duplicate keys are
refused: a few lines of aliases can expand to gigabytes, and a duplicate key hides the first. All
detectable problems are reported together, each with its file or variable, the key's path and the
value.
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
_INHERITED: Final = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_OTHER_FORMATS: Final = frozenset({".conf", ".crt", ".pem"})
"""Other files in muster's own ConfigMaps: nats-server's configuration and certificates."""
_NO_CONFIGURATION: Final = "these manifests contain no configuration for muster"
UNREADABLE: Final = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    # PyYAML's constructors also raise these: `!!int ''`, `!!bool x`, `!!timestamp x`
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
)
"""The errors that PyYAML raises for invalid input."""


class BadSettings(ValueError):
    """The settings cannot be used; `problems` has one line for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


Foreign = Callable[[bytes, str], dict[str, Any]]
"""Converts another program's file, given as its text and name, to muster's settings tree."""


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
    if foreign:
        # another program may be configured by variables alone
        tree = foreign(_bytes(file) if file else b"{}", str(file or "--config"))
    elif file:
        tree = _read(file, shape)
    variables = _overlay(tree, f"{prefix}__", environment, problems)
    settings, invalid = _validated(shape, tree)
    problems.extend(_located(problem, variables, str(file or "")) for problem in invalid)
    if settings is None or problems:
        raise BadSettings(problems)
    return settings


def validate(shape: type[Settings], tree: object, *, source: str = "") -> Settings:
    """Convert a parsed tree to validated settings. Raises BadSettings like `load`."""
    if not isinstance(tree, Mapping):
        problem = validation.Problem(
            "", f"expected a mapping of keys, found {validation.quoted(tree)}"
        )
        raise BadSettings([_located(problem, {}, source)])
    settings, invalid = _validated(shape, tree)
    if settings is None:
        raise BadSettings([_located(problem, {}, source) for problem in invalid])
    return settings


def parse(text: bytes, *, source: str) -> list[Any]:
    """Parse a text strictly and return the tree of each YAML document. Raises BadSettings."""
    if len(text) > _FILE_BYTES_MAX:
        raise BadSettings([f"{source}: larger than {_FILE_BYTES_MAX} bytes"])
    try:
        return list(yaml.load_all(text.decode(), _Loader))
    except UNREADABLE as error:
        raise BadSettings([f"{source}: not YAML: {' '.join(str(error).split())}"]) from None


def only(documents: list[Any], shape: type[Settings], *, source: str, file: str = "") -> Any:
    """Return the only document of a file or, in manifests, the only configuration in a ConfigMap.

    If any ConfigMap contains a file named `file`, all other files are ignored.
    Returns None for an empty file. Raises BadSettings for several documents, or for manifests
    without exactly one configuration.
    """
    manifests = [d for d in documents if isinstance(d, dict) and "kind" in d]
    if not manifests:
        if len(documents) > 1:
            raise BadSettings([f"{source}: {len(documents)} YAML documents, expected one"])
        return documents[0] if documents else None
    data = [*_data(manifests)]
    named = [each for each in data if each[1] == file]
    keys = {field.encode_name for field in msgspec.structs.fields(shape)}
    configurations = [
        (f"{name} of ConfigMap {config_map}", tree)
        for config_map, name, text in named or data
        for tree in _trees(text, name, source)
        if isinstance(tree, dict) and not keys.isdisjoint(tree)
    ]
    if len(configurations) != 1:
        names = ", ".join(name for name, _ in configurations)
        problem = f"several configurations: {names}; give one file" if names else _NO_CONFIGURATION
        raise BadSettings([f"{source}: {problem}"])
    return configurations[0][1]


def _trees(text: str, name: str, source: str) -> list[Any]:
    """Return the documents of a ConfigMap's file; empty for a file in one of `_OTHER_FORMATS`."""
    try:
        return parse(text.encode(), source=f"{source}: {name}")
    except BadSettings:
        if Path(name).suffix in _OTHER_FORMATS:
            return []
        raise


class _Loader(yaml.SafeLoader):
    """YAML that refuses aliases and duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        value: str = super().construct_scalar(node)
        try:
            # JSON writes characters beyond 16 bits as two surrogate halves
            return value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            problem = "half a surrogate pair"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002  # PyYAML's
    ) -> dict[Hashable, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names: set[str] = set()
        for key in keys:
            if key.value in names:
                problem = f"duplicate key {validation.quoted(key.value)}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """Return the tree of a YAML text. Raises one of `UNREADABLE`."""
    return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader


def _bytes(file: Path) -> bytes:
    """Return the content of a file, at most one byte more than allowed.

    Raises BadSettings. It never waits for a writer, unless the file is a pipe that was passed at
    startup (`<(...)`).
    """
    is_inherited = str(file).startswith(_INHERITED)
    try:
        return _read_pipe(file) if is_inherited and file.is_fifo() else _read_regular(file)
    except OSError as error:
        raise BadSettings([f"{file}: {error.strerror}"]) from None


@functools.cache
def _read_pipe(file: Path) -> bytes:
    """Return the content of a pipe; cached, because a pipe can be read only once."""
    with file.open("rb") as opened:
        return opened.read(_FILE_BYTES_MAX + 1)


def _read_regular(file: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, BadSettings."""
    with open(file, "rb", opener=_open_nonblocking) as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise BadSettings([f"{file}: not a regular file"])
        return opened.read(_FILE_BYTES_MAX + 1) or b""


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: Path, shape: type[msgspec.Struct]) -> dict[Any, Any]:
    """Return the settings tree of a file. Raises BadSettings."""
    tree = only(parse(_bytes(file), source=str(file)), shape, source=str(file))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise BadSettings([f"{file}: expected a mapping of keys, found {validation.quoted(tree)}"])
    return tree


def _data(documents: list[dict[Any, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield each file of the ConfigMaps in manifests: ConfigMap's name, file's name, text."""
    for document in documents:
        items, data = document.get("items"), document.get("data")
        if document["kind"] == "List" and isinstance(items, list):
            yield from _data([i for i in items if isinstance(i, dict) and "kind" in i])
        elif document["kind"] == "ConfigMap" and isinstance(data, dict):
            metadata = document.get("metadata")
            config_map = metadata.get("name") if isinstance(metadata, dict) else None
            for name, text in data.items():
                if isinstance(text, str):
                    yield str(config_map or "without a name"), str(name), text


def _overlay(
    tree: dict[Any, Any], prefix: str, environment: Mapping[str, str], problems: list[str]
) -> dict[str, str]:
    """Apply the variables that start with `prefix`; return their names by the path of the key."""
    variables: dict[str, str] = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix):
            continue
        path = variable.removeprefix(prefix).lower().split("__")
        try:
            value = _parse(text)
        except UNREADABLE:
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
            variables[".".join(path)] = variable
    return variables


def _validated(
    shape: type[Settings], tree: Mapping[Any, Any]
) -> tuple[Settings | None, list[validation.Problem]]:
    problems: list[validation.Problem] = []
    return validation.read(shape, tree, problems), problems


def _located(problem: validation.Problem, variables: Mapping[str, str], source: str) -> str:
    """Return a problem with the origin of its value: a variable, or the file."""
    for path, variable in variables.items():
        if problem.path == path or problem.path.startswith((f"{path}.", f"{path}[")):
            return f"{variable}: {problem}"
    return f"{source or ('' if problem.path else 'settings')}: {problem}".removeprefix(": ")
