"""Pure: Globs and regular expressions over paths, bounded in what they may cost.

Globs are those of Go's path/filepath, which generic-device-plugin's users write: `*`, `?` and
`[a-z]` never cross a slash, a backslash takes the next character as it is, names that begin with a
dot are like others. Beyond Go, `**` as a whole component stands for any number of directories.

Regular expressions are those of smarter-device-manager: RE2, by which Go's package regexp goes. It
needs linear time whatever the expression, which Python's own does not.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re2

PATH_MAX: Final = 4096

GLOB_MAX: Final = 1024
"""The longest glob."""
REGEX_MAX: Final = 256
_ANY_MAX: Final = 4
_SAID_MAX: Final = 60
_CACHED: Final = 4096
_ANY: Final = "**"
_SPECIAL = re.compile(r"[*?\[\\]")
_BRACES = re.compile(r"(?<!\\)\{[^{}/]*,[^{}/]*\}")
_ROOTED = re.compile(r"\^\\?/(dev\\?/)?")


class Glob:
    """A glob made ready; raises ValueError for one that could never be meant."""

    def __init__(self, pattern: str) -> None:
        _refuse(glob_problems(pattern))
        self.pattern = pattern
        self.components = tuple(pattern.strip("/").split("/"))
        self._parts = tuple(None if c == _ANY else _component(c) for c in self.components)

    def fullmatch(self, path: str) -> bool:
        """Say whether the whole path matches; needs time in proportion to both lengths."""
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
        """Return what is reached from here when each `**` that follows stands for nothing."""
        positions = set()
        while at < len(self._parts) and self._parts[at] is None:
            at += 1
            positions.add(at)
        return positions


@functools.lru_cache(_CACHED)
def glob(pattern: str) -> Glob:
    """Return the glob, made ready once."""
    return Glob(pattern)


def regex_matches(pattern: str, below_dev: str) -> bool:
    """Say whether it matches anywhere in the path below /dev, unless it is written otherwise."""
    return _regex(pattern).search(below_dev) is not None


def is_literal(pattern: str) -> bool:
    """Say whether a glob can match one path only, its own."""
    return literal_prefix(pattern) == pattern


def literal_prefix(pattern: str) -> str:
    """Return what every path that a glob matches begins with; the whole of a literal one."""
    special = _SPECIAL.search(pattern)
    return pattern[: special.start()] if special else pattern


def surely_overlap(first: str, second: str) -> bool:
    """Say whether two globs surely have a path in common: equal, or one is a path of the other."""
    if first == second:
        return True
    if is_literal(first):
        return glob(second).fullmatch(first)
    return is_literal(second) and glob(first).fullmatch(second)


def name_matches(pattern: str, name: str) -> bool:
    """Compare a whole value that is no path (`*` crosses slashes in it)."""
    return len(name) <= PATH_MAX and _name(pattern).fullmatch(name) is not None


def component_matches(component: str, name: str) -> bool:
    """Compare one component of a glob with one name."""
    return _component(component).fullmatch(name) is not None


def first_match(globs: Iterable[str], path: str) -> str | None:
    """Return the first glob that matches the path, or None."""
    return next((pattern for pattern in globs if glob(pattern).fullmatch(path)), None)


def glob_problems(pattern: str) -> Iterator[str]:
    """Say why a glob is refused."""
    if len(pattern) > GLOB_MAX:
        yield f"{len(pattern)} characters; a glob has at most {GLOB_MAX}"
        return
    components = pattern.strip("/").split("/")
    if components.count(_ANY) > _ANY_MAX:
        yield f"{_said(pattern)} has more than {_ANY_MAX} times **"
    try:
        for component in components:
            _component(component)
    except ValueError as error:
        yield f"{_said(pattern)} {error}"


def regex_problems(pattern: str) -> Iterator[str]:
    """Say why a regular expression is refused."""
    if len(pattern) > REGEX_MAX:
        yield f"{len(pattern)} characters; a regular expression has at most {REGEX_MAX}"
        return
    try:
        _regex(pattern)
    except ValueError as error:
        yield f"{_said(pattern)} is not a regular expression: {error}"


@functools.lru_cache(_CACHED)
def glob_warnings(pattern: str) -> tuple[str, ...]:
    """Say what is no wildcard here, though it is one elsewhere."""
    warnings = []
    if _BRACES.search(pattern):
        warnings.append(
            f"{_said(pattern)}: braces are no alternatives here; write an entry for each"
        )
    if "[!" in pattern:
        warnings.append(f"{_said(pattern)}: ! in a set is itself; write [^...] for all others")
    return tuple(warnings)


@functools.lru_cache(_CACHED)
def regex_warnings(pattern: str) -> tuple[str, ...]:
    """Say why an expression will find nothing."""
    begins = _ROOTED.match(pattern)
    if begins is None:
        return ()
    shorter = _said(pattern.replace(begins[0], "^", 1))
    why = "it is compared with the path below /dev"
    return (f"{_said(pattern)} finds nothing: {why}; write {shorter}",)


@functools.lru_cache(_CACHED)
def _regex(pattern: str) -> "re2._Regexp":
    """Return the expression, made ready once; raises ValueError for what RE2 does not know."""
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
    """Translate; between two stars the first place that fits is taken and never given back.

    The pieces have fixed lengths, so another place could not do better; this keeps it linear.
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
    """Read a set after its `[`, as Go's path/filepath.Match does; `!` negates no set there."""
    negated = pattern.startswith("^", at)
    at += negated
    ranges: list[str] = []
    while not (ranges and pattern.startswith("]", at)):
        at, low = _member(pattern, at)
        high = low
        if pattern.startswith("-", at):
            at, high = _member(pattern, at + 1)
        if low > high:
            raise ValueError(f"has {low}-{high} in a set, the wrong way round")
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


def _said(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _SAID_MAX else pattern[:_SAID_MAX] + "...")


def _refuse(problems: Iterable[str]) -> None:
    text = "; ".join(problems)
    if text:
        raise ValueError(text)
