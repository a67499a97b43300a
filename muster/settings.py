"""Door to configuration: a YAML file and the environment become one frozen object, or clear errors.

Precedence: environment over file over defaults. The variable of a key is the prefix and its path,
upper case, levels joined by two underscores: `bus.url` of the plugin is `MUSTER_PLUGIN__BUS__URL`.
A variable's value is read as YAML. Aliases and repeated keys are refused: a few lines of aliases
can stand for gigabytes, and a repeated key hides the first. Every problem is reported at once, with
the path of the key, the value and, for an unknown key, the nearest valid one.
"""

import difflib
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml

Settings = TypeVar("Settings", bound=msgspec.Struct)

_FILE_BYTES_MAX = 1024 * 1024
_SHOWN_MAX = 60
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
        tree = foreign(_bytes(file), str(file)) if foreign else _read(file)
    _overlay(tree, f"{prefix}__", environment, problems)
    found = _validate(shape, tree, "", problems)
    if problems:
        raise BadSettings(problems)
    return found  # type: ignore[no-any-return]  # _validate returns a `shape` or reports


def validate(shape: type[Settings], tree: object) -> Settings:
    """Return a tree, read elsewhere, as validated settings. Raises BadSettings like `load`."""
    problems: list[str] = []
    if not isinstance(tree, Mapping):
        raise BadSettings([f"a mapping of keys is expected, found {type(tree).__name__}"])
    found = _validate(shape, tree, "", problems)
    if problems:
        raise BadSettings(problems)
    return found  # type: ignore[no-any-return]  # _validate returns a `shape` or reports


def parse(text: bytes, *, source: str) -> list[Any]:
    """Return the tree of each YAML document in a text, strictly. Raises BadSettings."""
    if len(text) > _FILE_BYTES_MAX:
        raise BadSettings([f"{source}: larger than {_FILE_BYTES_MAX} bytes"])
    try:
        return list(yaml.load_all(text.decode(), _Loader))
    except _UNREADABLE as error:
        raise BadSettings([f"{source}: not YAML: {' '.join(str(error).split())}"]) from None


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
                problem = f"the key {_shown(key.value)} stands here twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """Return the tree that YAML says. Raises one of `_UNREADABLE`."""
    return yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader


def _bytes(file: Path) -> bytes:
    """Return what a file holds, and a byte more than is allowed if it does. Raises BadSettings."""
    if file.is_fifo() or file.is_socket():
        # reading either could wait for ever
        raise BadSettings([f"{file}: no regular file"])
    try:
        with file.open("rb") as opened:
            return opened.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise BadSettings([f"{file}: {error.strerror}"]) from None


def _read(file: Path) -> dict[Any, Any]:
    """Return the tree in a file. Raises BadSettings."""
    documents = parse(_bytes(file), source=str(file))
    tree = documents[0] if documents else None
    if len(documents) > 1:
        raise BadSettings([f"{file}: not YAML: {len(documents)} documents, expected one"])
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        found = type(tree).__name__
        raise BadSettings([f"{file}: a mapping of keys is expected, found {found}"])
    return tree


def _overlay(
    tree: dict[Any, Any], prefix: str, environment: Mapping[str, str], problems: list[str]
) -> None:
    """Lay the variables that start with `prefix` over the tree."""
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix):
            continue
        path = variable.removeprefix(prefix).lower().split("__")
        try:
            value = _parse(text)
        except _UNREADABLE:
            problems.append(f"{variable}: not YAML: {_shown(text)}")
            continue
        branch: Any = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                problems.append(f"{variable}: {key} is not a section")
                break
        else:
            branch[path[-1]] = value


def _validate(
    shape: type[msgspec.Struct], tree: Mapping[Any, Any], path: str, problems: list[str]
) -> Any:
    """Return a `shape`, or None after reporting what is wrong; go on to find every problem."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(shape)}
    values: dict[str, Any] = {}
    before = len(problems)
    for key, value in tree.items():
        if key not in fields:
            name = key if isinstance(key, str) and key.isprintable() else _shown(key)
            near = difflib.get_close_matches(name[:_SHOWN_MAX], fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
            problems.append(
                f"{path}{name[:_SHOWN_MAX]}: unknown key (value {_shown(value)}); {hint}"
            )
            continue
        values[fields[key].name] = _value(fields[key].type, value, f"{path}{key}", problems)
    problems.extend(
        f"{path}{name}: required, and missing"
        for name, field in fields.items()
        if field.required and name not in tree
    )
    if len(problems) > before:
        return None
    try:
        return shape(**values)
    except ValueError as error:
        problems.append(f"{path.rstrip('.') or 'settings'}: {error}")
    return None


def _value(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    """Convert one value; sections and lists of sections are walked, the rest msgspec judges."""
    listed, shape = _section_in(kind)
    if shape is not None and not listed and isinstance(value, Mapping):
        return _validate(shape, value, f"{path}.", problems)
    if shape is not None and listed and isinstance(value, list):
        _check_length(kind, value, path, problems)
        found = []
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                found.append(_validate(shape, item, f"{path}[{index}].", problems))
            else:
                problems.append(f"{path}[{index}]: a mapping is expected, found {_shown(item)}")
        return tuple(found)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error).replace(" - at `$", f" at `{path}")
        problems.append(f"{path}: {text[0].lower()}{text[1:]} (value {_shown(value)})")
    return None


def _check_length(kind: Any, value: list[Any], path: str, problems: list[str]) -> None:
    """Report a list of sections that is shorter or longer than its annotation allows."""
    if typing.get_origin(kind) is not typing.Annotated:
        return
    try:
        msgspec.convert([None] * len(value), Annotated[(tuple[None, ...], *kind.__metadata__)])
    except msgspec.ValidationError as error:
        text = str(error)
        problems.append(f"{path}: {text[0].lower()}{text[1:]} (length {len(value)})")


def _section_in(kind: Any) -> tuple[bool, type[msgspec.Struct] | None]:
    """Return the section that a type holds, if any, and whether it holds a list of them."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _section_in(arguments[0])
    held = [found for found in map(_section_in, arguments) if found[1] is not None]
    if origin is tuple:
        return True, held[0][1] if held else None
    if origin in {typing.Union, types.UnionType}:
        return held[0] if held else (False, None)
    assert not held, f"{kind}: a section stands alone or in a tuple, else its keys go unchecked"
    is_section = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return False, kind if is_section else None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:
        # int to str has a limit, and `0xfff...` reads past it
        text = f"{type(value).__name__} too large to show"
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
