"""Globs match as in Go's path/filepath; regular expressions stay cheap."""

import fnmatch
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster_plugin.model import patterns

# pattern, path, whether it matches; the first block restates Go's path/filepath match_test.go
GLOBS = [
    ("/abc", "/abc", True),
    ("/*", "/abc", True),
    ("/*c", "/abc", True),
    ("/a*", "/ab/c", False),
    ("/a*/b", "/abc/b", True),
    ("/a*/b", "/a/c/b", False),
    ("/a*b*c*d*e*/f", "/axbxcxdxexxx/f", True),
    ("/a*b*c*d*e*/f", "/axbxcxdxe/xxx/f", False),
    ("/a*b?c*x", "/abxbbxdbxebxczzx", True),
    ("/a*b?c*x", "/abxbbxdbxebxczzy", False),
    ("/ab[c]", "/abc", True),
    ("/ab[b-d]", "/abc", True),
    ("/ab[e-g]", "/abc", False),
    ("/ab[^c]", "/abc", False),
    ("/ab[^e-g]", "/abc", True),
    (r"/a\*b", "/a*b", True),
    (r"/a\*b", "/ab", False),
    ("/a?b", "/a☺b", True),
    ("/a[^a]b", "/a☺b", True),
    ("/a???b", "/a☺b", False),
    ("/a?b", "/a/b", False),
    (r"/[\]a]", "/]", True),
    (r"/[\-x]", "/-", True),
    ("/[a-b-c]", "/a", None),
    ("/[]a]", "/]", None),
    ("/[-]", "/-", None),
    ("/[", "/a", None),
    ("/[^bc", "/a", None),
    ("/a[", "/ab", None),
    ("/*x", "/xxx", True),
    # Go has no **; in muster, it matches any number of whole directories
    ("/dev/**", "/dev/a", True),
    ("/dev/**", "/dev/a/b/c", True),
    ("/dev/**/video*", "/dev/video0", True),
    ("/dev/**/video*", "/dev/v4l/by-id/video-x", True),
    ("/dev/**/by-*/**/x", "/dev/a/by-id/b/c/x", True),
    ("/dev/**/by-*/**/x", "/dev/a/x", False),
    ("/dev/a**b", "/dev/axxb", True),
    ("/dev/a**b", "/dev/a/b", False),
    # in shells and Python, this negates; in Go, it is a literal exclamation mark
    ("/dev/[!a]", "/dev/!", True),
    ("/dev/[!a]", "/dev/b", False),
    ("/dev/*", "/dev/.hidden", True),
]


@pytest.mark.parametrize(("pattern", "path", "expected"), GLOBS)
def test_a_glob_means_what_it_means_in_go(
    pattern: str, path: str, *, expected: bool | None
) -> None:
    if expected is None:
        assert [*patterns.glob_problems(pattern)]
        with pytest.raises(ValueError, match="has"):
            patterns.glob(pattern)
    else:
        assert [*patterns.glob_problems(pattern)] == []
        assert patterns.glob(pattern).fullmatch(path) is expected


@settings(deadline=None)
@given(st.text("ab*?/", max_size=12), st.text("ab/", max_size=12))
def test_a_glob_agrees_with_a_slow_one(pattern: str, path: str) -> None:
    ours, names = pattern.strip("/").split("/"), path.strip("/").split("/")

    def slow(left: list[str], names: list[str]) -> bool:
        if not left:
            return not names
        if left[0] == "**":
            return slow(left[1:], names) or (bool(names) and slow(left, names[1:]))
        return bool(names) and fnmatch.fnmatchcase(names[0], left[0]) and slow(left[1:], names[1:])

    if not [*patterns.glob_problems(pattern)]:
        assert patterns.glob(pattern).fullmatch(path) is slow(ours, names)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_a_pattern_is_refused_or_ready_and_never_a_traceback(pattern: str) -> None:
    if not [*patterns.glob_problems(pattern)]:
        patterns.glob(pattern).fullmatch("/dev/null")
        patterns.name_matches(pattern, "null")
    if not [*patterns.regex_problems(pattern)]:
        patterns.regex_matches(pattern, "null")


@settings(deadline=None)
@given(st.text("a*+?()|{1,}[]^$\\", max_size=20))
def test_no_regular_expression_that_is_taken_needs_long(pattern: str) -> None:
    if [*patterns.regex_problems(pattern)]:
        return
    began = time.process_time()
    patterns.regex_matches(pattern, "a" * 255 + "b")
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "^" + "a{0,3}" * 25 + "b", "(a|a)(a|a)" * 12 + "b", ".*.*.*.*x"]
)
def test_what_hangs_others_ends_at_once(pattern: str) -> None:
    began = time.process_time()
    assert patterns.regex_matches(pattern, "a" * 250) is pattern.startswith("(a+)")
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)", "'(?=a)' is not a regular expression: invalid perl operator: (?="),
        (r"(a)\1", r"'(a)\\1' is not a regular expression: invalid escape sequence: \1"),
        ("a**", "'a**' is not a regular expression: bad repetition operator: **"),
        ("video[", "'video[' is not a regular expression: missing ]: ["),
        (
            "(a{9}){999}",
            "'(a{9}){999}' is not a regular expression: invalid repetition size: {999}",
        ),
        ("a" * 257, "257 characters; a regular expression has at most 256"),
    ],
)
def test_what_re2_does_not_know_is_refused(pattern: str, problem: str) -> None:
    assert [*patterns.regex_problems(pattern)] == [problem]


@pytest.mark.parametrize(
    ("pattern", "below_dev", "expected"),
    [
        ("^video[0-9]*$", "video0", True),
        ("^video[0-9]*$", "v4l/video0", False),
        ("video", "v4l/by-id/video-x", True),
        ("^(ttyUSB|ttyACM)[0-9]+$", "ttyACM1", True),
        ("snd", "snd", True),
        ("tun", "net/tun", True),
    ],
)
def test_a_regular_expression_is_unanchored_unless_written_so(
    pattern: str, below_dev: str, *, expected: bool
) -> None:
    assert patterns.regex_matches(pattern, below_dev) is expected


def test_two_globs_overlap_when_that_is_certain() -> None:
    assert patterns.surely_overlap("/dev/video*", "/dev/video*")
    assert patterns.surely_overlap("/dev/video*", "/dev/video0")
    assert patterns.surely_overlap("/dev/video0", "/dev/video*")
    assert not patterns.surely_overlap("/dev/video0", "/dev/video1")
    assert not patterns.surely_overlap("/dev/video*", "/dev/vid*")
