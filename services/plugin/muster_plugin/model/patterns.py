"""Pure: globs and regular expressions for paths, with bounded cost.

Globs are those of Go's path/filepath, as in generic-device-plugin: `*`, `?` and `[a-z]` never match
a slash, a backslash escapes the next character, and names that begin with a dot are not special.
Beyond Go, `**` as a whole component matches any number of directories.

Regular expressions are those of smarter-device-manager: RE2, the syntax of Go's package regexp. RE2
takes linear time for every expression, unlike Python's module re.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re2

PATH_MAX: Final = 4096

GLOB_MAX: Final = 1024
"""The maximum length of a glob."""
REGEX_MAX: Final = 256
_DEEP_MAX: Final = 4
_SHOWN_MAX: Final = 60
_CACHED: Final = 4096
_DEEP: Final = "**"
_SPECIAL = re.compile(r"[*?\[\\]")
_BRACES = re.compile(r"(?<!\\)\{[^{}/]*,[^{}/]*\}")
_ROOTED = re.compile(r"\^\\?/(dev\\?/)?")


class Glob:
    """A compiled glob. Raises ValueError for an invalid pattern."""

    def __init__(self, pattern: str) -> None:
        _raise_if_any(glob_problems(pattern))
        self.pattern = pattern
        self.components = tuple(pattern.strip("/").split("/"))
        self._parts = tuple(None if c == _DEEP else _component(c) for c in self.components)

    def fullmatch(self, path: str) -> bool:
        """Return whether the whole path matches.

        The time is at most proportional to the product of both lengths. A path with more than
        `PATH_MAX` characters never matches.
        """
        if len(path) > PATH_MAX:
            return False
        names = path.strip("/").split("/")
        reached = {0} | self._skips(0)
        for name in names:
            step: set[int] = set()
            for at in reached:
                if at == len(self._parts):
                    continue
                part = self._parts[at]
                if part is None:
                    step |= {at} | self._skips(at)
                elif part.fullmatch(name):
                    step |= {at + 1} | self._skips(at + 1)
            reached = step
        return len(self._parts) in reached

    def _skips(self, at: int) -> set[int]:
        """Return the position after each `**` in a row from `at`; `**` may match nothing."""
        positions = set()
        while at < len(self._parts) and self._parts[at] is None:
            at += 1
            positions.add(at)
        return positions


@functools.lru_cache(_CACHED)
def glob(pattern: str) -> Glob:
    """Return the compiled glob, cached."""
    return Glob(pattern)


def regex_matches(pattern: str, below_dev: str) -> bool:
    """Return whether the expression matches any part of the path below /dev; anchors apply."""
    return _regex(pattern).search(below_dev) is not None


def is_literal(pattern: str) -> bool:
    """Return whether a glob matches only the path that is equal to it."""
    return literal_prefix(pattern) == pattern


def literal_prefix(pattern: str) -> str:
    """Return a glob up to its first special character; the whole glob if it has none."""
    special = _SPECIAL.search(pattern)
    return pattern[: special.start()] if special else pattern


def surely_overlap(first: str, second: str) -> bool:
    """Return whether two globs certainly share a path: they are equal, or one matches the other."""
    if first == second:
        return True
    if is_literal(first):
        return glob(second).fullmatch(first)
    return is_literal(second) and glob(first).fullmatch(second)


def name_matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a value that is not a path (`*` matches slashes too)."""
    return len(name) <= PATH_MAX and _name(pattern).fullmatch(name) is not None


def component_matches(component: str, name: str) -> bool:
    """Return whether a name matches one component of a glob."""
    return _component(component).fullmatch(name) is not None


def first_match(globs: Iterable[str], path: str) -> str | None:
    """Return the first glob that matches the path, or None."""
    return next((pattern for pattern in globs if glob(pattern).fullmatch(path)), None)


def glob_problems(pattern: str) -> Iterator[str]:
    """Yield the reasons why a glob is refused."""
    if len(pattern) > GLOB_MAX:
        yield f"{len(pattern)} characters; a glob has at most {GLOB_MAX}"
        return
    components = pattern.strip("/").split("/")
    if components.count(_DEEP) > _DEEP_MAX:
        yield f"{_quoted(pattern)} has ** more than {_DEEP_MAX} times"
    try:
        for component in components:
            _component(component)
    except ValueError as error:
        yield f"{_quoted(pattern)} {error}"


def regex_problems(pattern: str) -> Iterator[str]:
    """Yield the reasons why a regular expression is refused."""
    if len(pattern) > REGEX_MAX:
        yield f"{len(pattern)} characters; a regular expression has at most {REGEX_MAX}"
        return
    try:
        _regex(pattern)
    except ValueError as error:
        yield f"{_quoted(pattern)} is not a regular expression: {error}"


@functools.lru_cache(_CACHED)
def glob_warnings(pattern: str) -> tuple[str, ...]:
    """Return warnings about characters that are wildcards elsewhere, but not here."""
    warnings = []
    if _BRACES.search(pattern):
        warnings.append(
            f"{_quoted(pattern)}: braces are not alternatives here; write one entry for each"
        )
    if "[!" in pattern:
        warnings.append(
            f"{_quoted(pattern)}: ! in a set is an ordinary character; write [^...] to negate it"
        )
    return tuple(warnings)


@functools.lru_cache(_CACHED)
def regex_warnings(pattern: str) -> tuple[str, ...]:
    """Return warnings that explain why an expression will match nothing."""
    begins = _ROOTED.match(pattern)
    if begins is None:
        return ()
    shorter = _quoted(pattern.replace(begins[0], "^", 1))
    why = "it is compared with the path below /dev"
    return (f"{_quoted(pattern)} matches nothing: {why}; write {shorter}",)


@functools.lru_cache(_CACHED)
def _regex(pattern: str) -> "re2._Regexp":
    """Return the compiled expression, cached; raises ValueError if RE2 refuses it."""
    import re2  # noqa: PLC0415  # 3 MiB, for those who use regular expressions

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise ValueError(error.args[0].decode(errors="replace")) from None


@functools.lru_cache(_CACHED)
def _component(component: str) -> re.Pattern[str]:
    return _whole(component, gap="[^/]*")


@functools.lru_cache(_CACHED)
def _name(pattern: str) -> re.Pattern[str]:
    return _whole(pattern, gap=".*")


def _whole(pattern: str, *, gap: str) -> re.Pattern[str]:
    """Translate a glob; each part between two stars takes its first match and never backtracks.

    The parts have fixed lengths, so a later match would not be better; the time stays linear.
    """
    pieces = [""]
    for token in _tokens(pattern):
        if token is None:
            pieces.append("")
        else:
            pieces[-1] += token
    if len(pieces) == 1:
        return re.compile(pieces[0], re.DOTALL)
    middle = "".join(f"(?>{gap}?{piece})" for piece in pieces[1:-1] if piece)
    return re.compile(f"{pieces[0]}{middle}{gap}{pieces[-1]}", re.DOTALL)


def _tokens(pattern: str) -> Iterator[str | None]:
    """Yield one piece of a regular expression for each character to match; None for a star."""
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char == "*":
            yield None
        elif char == "?":
            yield "."
        elif char == "[":
            at, ranges, negated = _set(pattern, at)
            yield f"[{'^' if negated else ''}{ranges}]"
        elif char == "\\":
            if at == len(pattern):
                raise ValueError("ends with a backslash")
            yield re.escape(pattern[at])
            at += 1
        else:
            yield re.escape(char)


def _set(pattern: str, at: int) -> tuple[int, str, bool]:
    """Parse a set after its `[`, as Go's path/filepath.Match does; `!` does not negate it."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[str] = []
    while not (ranges and pattern.startswith("]", at)):
        at, low = _member(pattern, at)
        high = low
        if pattern.startswith("-", at):
            at, high = _member(pattern, at + 1)
        if low > high:
            raise ValueError(f"has the range {low}-{high} in the wrong order in a set")
        ranges.append(f"{re.escape(low)}-{re.escape(high)}")
    return at + 1, "".join(ranges), negated


def _member(pattern: str, at: int) -> tuple[int, str]:
    if pattern.startswith("\\", at):
        at += 1
    elif pattern[at : at + 1] in {"-", "]"}:
        raise ValueError(f"has a {pattern[at]} in a set that needs a backslash")
    if at >= len(pattern):
        raise ValueError("has a [ without its ]")
    return at + 1, pattern[at]


def _quoted(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _SHOWN_MAX else pattern[:_SHOWN_MAX] + "...")


def _raise_if_any(problems: Iterable[str]) -> None:
    text = "; ".join(problems)
    if text:
        raise ValueError(text)
