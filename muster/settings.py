"""Door to configuration: a YAML file and the environment become one frozen object, or clear errors.

Precedence: environment over file over defaults. The variable of a key is the prefix and its path,
upper case, levels joined by two underscores: `bus.url` of the plugin is `MUSTER_PLUGIN__BUS__URL`.
A variable's value is read as YAML. Every problem is reported at once, with the path of the key, the
value and, for an unknown key, the nearest valid one.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

Settings = TypeVar("Settings", bound=msgspec.Struct)

_FILE_BYTES_MAX = 1024 * 1024
_SHOWN_MAX = 60


class BadSettings(ValueError):
    """Settings that cannot be used; `problems` holds one line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load(
    shape: type[Settings], *, prefix: str, file: Path | None, environment: Mapping[str, str]
) -> Settings:
    """Return validated settings. Raises BadSettings, whose text names every problem."""
    problems: list[str] = []
    tree = _read(file, problems) if file else {}
    _overlay(tree, f"{prefix}__", environment, problems)
    found = _validate(shape, tree, "", problems)
    if problems:
        raise BadSettings(problems)
    return found  # type: ignore[no-any-return]  # _validate returns a `shape` or reports


def _read(file: Path, problems: list[str]) -> dict[str, Any]:
    try:
        if file.stat().st_size > _FILE_BYTES_MAX:
            problems.append(f"{file}: larger than {_FILE_BYTES_MAX} bytes")
            return {}
        tree = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        problems.append(f"{file}: not YAML: {' '.join(str(error).split())}")
    else:
        if tree is None:
            return {}
        if isinstance(tree, dict):
            return tree
        problems.append(f"{file}: a mapping of keys is expected, found {type(tree).__name__}")
    return {}


def _overlay(
    tree: dict[str, Any], prefix: str, environment: Mapping[str, str], problems: list[str]
) -> None:
    """Lay the variables that start with `prefix` over the tree."""
    for variable, text in sorted(environment.items()):
        if not variable.startswith(prefix):
            continue
        path = variable.removeprefix(prefix).lower().split("__")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            problems.append(f"{variable}: not YAML: {text!r}")
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
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(fields)}"
            problems.append(f"{path}{key}: unknown key (value {_shown(value)}); {hint}")
            continue
        values[key] = _value(fields[key].type, value, f"{path}{key}", problems)
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
    shape = _struct_in(kind)
    if shape is not None and isinstance(value, Mapping):
        return _validate(shape, value, f"{path}.", problems)
    items = _struct_in_tuple(kind)
    if items is not None and isinstance(value, list):
        found = []
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                found.append(_validate(items, item, f"{path}[{index}].", problems))
            else:
                problems.append(f"{path}[{index}]: a mapping is expected, found {_shown(item)}")
        return tuple(found)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        text = str(error).replace(" - at `$", f" at `{path}").rstrip("`")
        problems.append(f"{path}: {text[0].lower()}{text[1:]} (value {_shown(value)})")
    return None


def _struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Return the section that a type is, or is when it is not None."""
    for option in getattr(kind, "__args__", (kind,)):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return None if getattr(kind, "__origin__", None) in {tuple, dict} else option
    return None


def _struct_in_tuple(kind: Any) -> type[msgspec.Struct] | None:
    """Return the section that a `tuple[Section, ...]` holds."""
    if getattr(kind, "__origin__", None) is not tuple:
        return None
    item = kind.__args__[0]
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 3] + "..."
