"""Pure: converts a tree of plain values to a frozen object, or reports every problem.

A shape is a msgspec Struct. Its `demands` are conditions across its fields; if some fields are
invalid, every demand that does not need them is still checked. In a list, an invalid item has then
been replaced by None (`whole` skips it). A problem starts with the path of its key, and states in
YAML's terms the expected and the actual value.
"""

import difflib
import enum
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

Item = TypeVar("Item")

MSGSPEC_KNOWN: Final = "0.22"
"""The msgspec version whose error texts are translated here; see tests/pure/test_bounds.py."""

_WORDS: Final = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "a mapping of keys",
    "str": "a string",
}
_PARTS: Final = {"array": "item", "object": "key", "str": "character"}
_BOUNDS: Final = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than"}
_EXPECTED: Final = re.compile(
    r"Expected `(?P<kinds>[^`]+)`(, got `[^`]+`)?"
    r"( (?P<length>of length )?(?P<bound>[<>]=?) (?P<limit>\S+))?"
)
_SECRET: Final = re.compile(
    r"token|secret|password|credential|bearer|_key\b|_key_from", re.IGNORECASE
)
_OF_URL: Final = re.compile(r"(://)[^/?#]*(?=@)|(?<=\?).+")
_AT: Final = re.compile(r" - at `(?:key in )?\$(?P<at>.*)`$", re.DOTALL)
_STEP: Final = re.compile(r"\[(\d+)\]|\.([^.\[\]]+)")
_KEY: Final = re.compile(r"[A-Za-z_]\w*(?=[:.\[])")


Demand = Callable[[], Iterable[str]]
"""Yields the problems; a text may start with the key that it concerns."""


@runtime_checkable
class Demanding(Protocol):
    """A type with conditions across its fields."""

    def demands(self) -> Iterable[Demand]:
        """Yield, for each condition, a function that yields its problems."""


class Refused(ValueError):
    """Values that contradict each other; each of `problems` may start with its key."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Problem(typing.NamedTuple):
    """One problem, and the path of its key; an empty path is the whole tree."""

    path: str
    text: str

    def __str__(self) -> str:
        """Return path and problem as one line."""
        return f"{self.path}: {self.text}" if self.path else self.text


def read(shape: type[msgspec.Struct], tree: Mapping[Any, Any], problems: list[Problem]) -> Any:
    """Convert the tree to a `shape`; if it is invalid, append all problems and return None."""
    return _section(shape, tree, "", problems)


def refuse(shape: Demanding) -> None:
    """Raise Refused with all problems of the conditions, if there are any."""
    problems = [problem for demand in shape.demands() for problem in demand()]
    if problems:
        raise Refused(problems)


def whole(items: Iterable[Item | None]) -> Iterator[tuple[int, Item]]:
    """Yield index and value of each valid item."""
    return ((at, item) for at, item in enumerate(items) if item is not None)


class _InvalidField(AttributeError):
    """A condition reads a field that is invalid."""


class _Partial:
    """An object of which only the valid fields can be read."""

    def __init__(
        self, shape: type[msgspec.Struct], values: Mapping[str, Any], invalid: Collection[str]
    ) -> None:
        self._shape, self._values, self._invalid = shape, values, invalid

    def __getattr__(self, name: str) -> Any:
        if name in self._invalid:
            raise _InvalidField(name)
        if name in self._values:
            return self._values[name]
        return inspect.getattr_static(self._shape, name).__get__(self, self._shape)


def _section(
    shape: type[msgspec.Struct], tree: Mapping[Any, Any], path: str, problems: list[Problem]
) -> Any:
    fields = {field.encode_name: field for field in msgspec.structs.fields(shape)}
    values: dict[str, Any] = {}
    invalid: set[str] = set()
    before = len(problems)
    for name, value in tree.items():
        if name not in fields:
            hint = near(key_name(name), fields)
            invalid.update(
                field.name for encoded, field in fields.items() if f" {encoded}?" in hint
            )
            hint = hint or f"known keys: {', '.join(fields)}"
            shown = _shown(value, _below(path, key_name(name)))
            text = f"unknown key (value {quoted(shown)}); {hint}"
            problems.append(Problem(_below(path, key_name(name)), text))
            continue
        field, count_before = fields[name], len(problems)
        converted = _value(field.type, value, _below(path, name), problems)
        if converted is None and len(problems) > count_before:
            invalid.add(field.name)
        else:
            values[field.name] = converted
    for name, field in fields.items():
        if field.required and name not in tree:
            problems.append(Problem(_below(path, name), "required but missing"))
            invalid.add(field.name)
    if len(problems) == before:
        try:
            return shape(**values)
        except Refused as error:
            problems.extend(_placed(path, text, fields.values()) for text in error.problems)
        except ValueError as error:
            problems.append(_placed(path, str(error), fields.values()))
    else:
        problems.extend(_refused(shape, values, invalid, path))
    return None


def _refused(
    shape: type[msgspec.Struct], values: Mapping[str, Any], invalid: Collection[str], path: str
) -> list[Problem]:
    """Return the problems of each condition that can be checked."""
    if not issubclass(shape, Demanding):
        return []
    fields = msgspec.structs.fields(shape)
    partial = _Partial(shape, {**_defaults(fields), **values}, invalid)
    problems: list[Problem] = []
    for demand in shape.demands(partial):
        try:
            problems.extend(_placed(path, text, fields) for text in demand())
        except _InvalidField:
            continue
    return problems


def _defaults(fields: Iterable[msgspec.structs.FieldInfo]) -> dict[str, Any]:
    return {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in fields
        if not field.required
    }


def _placed(path: str, text: str, fields: Iterable[msgspec.structs.FieldInfo]) -> Problem:
    """Return a problem; a key at the start of its text is moved to its path."""
    begins = _KEY.match(text)
    at, colon, problem = text.partition(": ")
    if colon and begins and begins[0] in {field.encode_name for field in fields}:
        return Problem(_below(path, at), problem)
    return Problem(path, text)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value(kind: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    """Convert one value: recurse into sections and lists of them; msgspec converts other values."""
    listed, shape = section_in(kind)
    if shape is not None and not listed and isinstance(value, Mapping):
        return _section(shape, value, path, problems)
    if shape is not None and listed and isinstance(value, list):
        _check_length(kind, value, path, problems)
        sections = []
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                sections.append(_section(shape, item, f"{path}[{index}]", problems))
            else:
                text = f"expected a mapping of keys, found {quoted(_shown(item, path))}"
                problems.append(Problem(f"{path}[{index}]", text))
                sections.append(None)
        return tuple(sections)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        problems.append(_translated(kind, value, path, str(error)))
    return None


def _check_length(kind: Any, value: list[Any], path: str, problems: list[Problem]) -> None:
    """Report a list of sections that is too short or too long for its annotation."""
    if typing.get_origin(kind) is not typing.Annotated:
        return
    try:
        msgspec.convert([None] * len(value), Annotated[(tuple[None, ...], *kind.__metadata__)])
    except msgspec.ValidationError as error:
        problems.append(_translated(kind, value, path, str(error)))


def section_in(kind: Any) -> tuple[bool, type[msgspec.Struct] | None]:
    """Return whether a type is a list, and the type of the section in it, if any."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return section_in(arguments[0])
    inner = [section for section in map(section_in, arguments) if section[1] is not None]
    if origin is tuple:
        return True, inner[0][1] if inner else None
    if origin in {typing.Union, types.UnionType}:
        return inner[0] if inner else (False, None)
    assert not inner, f"{kind}: a section must be single or in a tuple, or its keys go unchecked"
    is_section = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return False, kind if is_section else None


def _translated(kind: Any, value: Any, path: str, error: str) -> Problem:
    """Translate an error text from msgspec to muster's wording."""
    place = _AT.search(error)
    error = error[: place.start()] if place else error
    for index, name in _STEP.findall(place["at"]) if place else ():
        try:
            value = value[int(index)] if index else value[name]
        except (LookupError, TypeError):
            break
        path = f"{path}[{index}]" if index else _below(path, name)
    return Problem(path, _complaint(kind, _shown(value, path), error))


def _shown(value: Any, path: str) -> Any:
    """Return a value that is safe to show; users may write a secret in place of a reference."""
    if isinstance(value, str) and _SECRET.search(path.rpartition(".")[2]):
        return "(not shown)"
    if isinstance(value, str) and "://" in value:
        return _OF_URL.sub(r"\1(not shown)", value)
    return value


def _complaint(kind: Any, value: Any, error: str) -> str:
    expected, choices = _EXPECTED.match(error), [*_choices(kind)]
    if choices and (expected is None or "str" in expected["kinds"]):
        hint = near(value, choices) if isinstance(value, str) else ""
        return f"expected {_either(choices)}, found {quoted(value)}{hint and f'; {hint}'}"
    if described := next(_described(kind), ""):
        return f"expected {described}, found {quoted(value)}"
    if " matching regex " in error:
        return f"{quoted(value)} is not of the form {error.partition(' matching regex ')[2]}"
    if expected is None:
        return f"{error[:1].lower()}{error[1:]} (value {quoted(value)})"
    return f"expected {_expectation(expected)}, found {_shown_value(expected, value)}"


def _shown_value(expected: re.Match[str], value: Any) -> str:
    return str(len(value)) if expected["length"] else quoted(value)


def _either(choices: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))


def _expectation(expected: re.Match[str]) -> str:
    kinds = [kind for kind in expected["kinds"].split(" | ") if kind != "null"]
    words = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    if not expected["bound"]:
        return words
    limit = expected["limit"].removesuffix(".0")
    part = _PARTS[kinds[0]] if expected["length"] else ""
    plural = "" if limit == "1" or not part else "s"
    return f"{words} of {_BOUNDS[expected['bound']]} {limit} {part}{plural}".strip()


def _choices(kind: Any) -> Iterator[str]:
    """Yield every value of the enumerations and literals in a type."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        yield from (str(member.value) for member in kind)
    elif typing.get_origin(kind) is typing.Literal:
        yield from map(str, typing.get_args(kind))
    else:
        for inner in typing.get_args(kind):
            yield from _choices(inner)


def _described(kind: Any) -> Iterator[str]:
    """Yield the descriptions in the annotations of the types."""
    for inner in typing.get_args(kind):
        if isinstance(inner, msgspec.Meta):
            if inner.description:
                yield inner.description
        else:
            yield from _described(inner)


_QUOTED_MAX: Final = 60
_ITEMS_MAX: Final = _QUOTED_MAX // 3
"""How many items of a collection are formatted: more than fit into the quoted text."""
_DEPTH_MAX: Final = 4
_BITS_MAX: Final = 4096
_NEAR: Final = 0.5


def quoted(value: object) -> str:
    """Return the user's value as YAML, short enough for a line."""
    text = _quoted(value)
    return text if len(text) <= _QUOTED_MAX else text[: _QUOTED_MAX - 3] + "..."


def near(name: str, names: Collection[str], cutoff: float = _NEAR) -> str:
    """Return a suggestion of the nearest name; empty if none is near."""
    nearest = difflib.get_close_matches(name[:_QUOTED_MAX], names, n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]}?" if nearest else ""


def key_name(name: object) -> str:
    """Return the name of a key as it is shown in a path."""
    return name[:_QUOTED_MAX] if isinstance(name, str) and name.isprintable() else quoted(name)


def _quoted(value: object, depth: int = 0) -> str:
    match value:
        case None | bool():
            return "nothing" if value is None else str(value).lower()
        case str():
            return repr(value[: _QUOTED_MAX + 1])
        case Mapping() | list() | tuple() | set():
            return _gathered(value, depth + 1)
        case bytes():
            return "binary data"
        case int() if value.bit_length() > _BITS_MAX:
            # Python refuses to write very long integers, although it can read them as `0xfff...`
            return "a number too large to show"
        case _:
            # numbers, and the dates that YAML creates
            return str(value)


def _gathered(values: Collection[object], depth: int) -> str:
    if depth > _DEPTH_MAX:
        return "..."
    some = itertools.islice(values, _ITEMS_MAX)
    if isinstance(values, Mapping):
        return f"{{{', '.join(f'{_plain(k)}: {_quoted(values[k], depth)}' for k in some)}}}"
    return f"[{', '.join(_quoted(item, depth) for item in some)}]"


def _plain(name: object) -> str:
    is_plain = isinstance(name, str) and name.isprintable()
    return str(name)[: _QUOTED_MAX + 1] if is_plain else _quoted(name, _DEPTH_MAX)
