"""Settings: a file and the environment give one object, or all problems are reported."""

import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.service import sections, validation
from muster.service import settings as ours


class Mode(enum.StrEnum):
    FAST = "fast"
    SLOW = "slow"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    replicas: Annotated[int, msgspec.Meta(ge=1, le=100)] = 1


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    width_m: float = 1.0
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        if self.width_m > 9:
            raise ValueError(f"width_m: {self.width_m} is wider than the road")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    mode: Mode = Mode.FAST
    period_s: sections.Period = 5.0
    bus: sections.Bus = sections.Bus()
    lane: Lane | None = None
    devices: Annotated[tuple[Device, ...], msgspec.Meta(max_length=9)] = ()
    modes: tuple[Mode, ...] = ()


def load(tmp_path: Path, text: str | bytes = "", **environment: str) -> Settings:
    file = tmp_path / "settings.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ours.load(Settings, prefix="MUSTER_X", file=file, environment=environment)


def problems(tmp_path: Path, text: str | bytes = "", **environment: str) -> list[str]:
    with pytest.raises(ours.BadSettings) as refused:
        load(tmp_path, text, **environment)
    return [p.replace(str(tmp_path / "settings.yaml"), "FILE") for p in refused.value.problems]


def test_the_environment_wins_over_the_file_and_the_file_over_the_defaults(
    tmp_path: Path,
) -> None:
    loaded = load(
        tmp_path,
        "node: a\nmode: slow\nperiod_s: 2\nbus: {url: 'nats://file:1'}\n",
        MUSTER_X__PERIOD_S="1.5",
        MUSTER_X__BUS__URL="nats://environment:1",
        MUSTER_Y__PERIOD_S="9",
        MUSTER_X_PERIOD_S="9",
    )
    assert loaded == Settings(
        node="a", mode=Mode.SLOW, period_s=1.5, bus=sections.Bus(url="nats://environment:1")
    )


def test_no_file_is_needed() -> None:
    loaded = ours.load(Settings, prefix="M", file=None, environment={"M__NODE": "a"})
    assert loaded == Settings(node="a")


def test_a_variable_can_hold_a_list_of_sections(tmp_path: Path) -> None:
    loaded = load(tmp_path, "node: a", MUSTER_X__DEVICES="[{path: /dev/a}, {path: /dev/b}]")
    assert loaded.devices == (Device(path="/dev/a"), Device(path="/dev/b"))


def test_sections_and_lists_of_sections_nest(tmp_path: Path) -> None:
    text = "node: a\nlane: {width_m: 2, devices: [{path: /dev/a, replicas: 3}]}\nmodes: [slow]\n"
    assert load(tmp_path, text) == Settings(
        node="a",
        lane=Lane(width_m=2.0, devices=(Device(path="/dev/a", replicas=3),)),
        modes=(Mode.SLOW,),
    )


def test_every_problem_is_named_at_once_with_path_value_and_the_nearest_name(
    tmp_path: Path,
) -> None:
    text = """
        mod: fast
        period_s: soon
        bus: {ulr: 3}
        lane: {devices: [{path: 1}, {path: /dev/b, replicas: 0, zzz: 1}, 7]}
        devices: [{}]
        modes: [fast, quick]
    """
    assert problems(tmp_path, text) == [
        "FILE: mod: unknown key (value 'fast'); did you mean mode?",
        "FILE: period_s: expected a number, found 'soon'",
        "FILE: bus.ulr: unknown key (value 3); did you mean url?",
        "FILE: lane.devices[0].path: expected a string, found 1",
        "FILE: lane.devices[1].replicas: expected a whole number of at least 1, found 0",
        "FILE: lane.devices[1].zzz: unknown key (value 1); known keys: path, replicas",
        "FILE: lane.devices[2]: expected a mapping of keys, found 7",
        "FILE: devices[0].path: required but missing",
        "FILE: modes[1]: expected fast or slow, found 'quick'",
        "FILE: node: required but missing",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node: a\nperiod_s: .nan", "period_s: expected a number of more than 0, found nan"),
        ("node: a\nperiod_s: .inf", "period_s: expected a number of at most 86400, found inf"),
        ("node: 2026-11-21", "node: expected a string, found 2026-11-21"),
        ("node: !!binary aGE=", "node: expected a string, found binary data"),
        ("node: !!set {a, b}", "node: expected a string, found ["),
        ("node: 1234", "node: expected a string, found 1234"),
        ("node: a\nbus: 7", "bus: expected a mapping of keys, found 7"),
        ("node: a\nlane: {width_m: 10}", "lane.width_m: 10.0 is wider than the road"),
        (
            "node: a\ndevices: [" + "{path: /dev/a}, " * 10 + "]",
            "devices: expected a list of at most 9 items, found 10",
        ),
        ("node: a\n1: x", "1: unknown key (value 'x'); known keys: "),
        ("node: a\nmode: {}", "mode: expected fast or slow, found {}"),
        ("node: a\nnode: b", "FILE: not YAML: duplicate key 'node'"),
        ("- node", "FILE: expected a mapping of keys, found ['node']"),
        ("node: [", "FILE: not YAML: while parsing a flow node"),
        (b"\x00\x01", "FILE: not YAML: unacceptable character #x0000"),
        (b"\xff\xfe\xfa", "FILE: not YAML: 'utf-8' codec can't decode"),
        ("[" * 100_000, "FILE: not YAML: maximum recursion depth exceeded"),
        ("node: !!int ''", "FILE: not YAML: string index out of range"),
        ("node: !!bool x", "FILE: not YAML: 'x'"),
        ("node: !!timestamp x", "FILE: not YAML: "),
        ("node: 2026-99-99", "FILE: not YAML: month must be in 1..12"),
        ("node: !!python/name:os.system x", "FILE: not YAML: could not determine a constructor"),
        (
            "node: a\nperiod_s: 0x" + "f" * 9_000,
            "period_s: number out of range (value a number too large to show)",
        ),
        (
            "node: a\n? 0x" + "f" * 9_000 + "\n: 1",
            "a number too large to show: unknown key (value 1)",
        ),
        ("node: " + "9" * 9_000, "FILE: not YAML: Exceeds the limit (4300 digits)"),
        ("x" * 1_100_000, "FILE: larger than 1048576 bytes"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_each_unusable_file_is_refused_with_one_short_line(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    (loaded,) = problems(tmp_path, text)
    assert loaded.removeprefix("FILE: ").startswith(problem.removeprefix("FILE: "))
    assert loaded.startswith("FILE: ")
    assert len(loaded) < 400
    assert "\n" not in loaded


def test_a_file_that_is_missing_or_never_ends_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for file, problem in [
        (tmp_path / "absent", f"{tmp_path}/absent: No such file or directory"),
        (tmp_path, f"{tmp_path}: Is a directory"),
        (fifo, f"{fifo}: not a regular file"),
        (Path("/dev/zero"), "/dev/zero: larger than 1048576 bytes"),
    ]:
        with pytest.raises(ours.BadSettings) as refused:
            ours.load(Settings, prefix="M", file=file, environment={"M__NODE": "a"})
        assert refused.value.problems == [problem]


@pytest.mark.parametrize(
    "bomb",
    [
        "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 64)),
        "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 64)),
        "node: &a [*a]",
        "lane: &a {devices: *a}",
    ],
    ids=["lists", "merges", "recursive", "recursive section"],
)
def test_aliases_are_refused_so_that_no_file_can_grow_in_memory(tmp_path: Path, bomb: str) -> None:
    (loaded,) = problems(tmp_path, bomb)
    assert loaded.startswith("FILE: not YAML: aliases are not allowed")


def test_a_bad_variable_is_named(tmp_path: Path) -> None:
    assert problems(
        tmp_path,
        "node: a\nmode: fast",
        MUSTER_X__BUS__ULR="nats://a:1",
        MUSTER_X__MODE__DEEPER="1",
        MUSTER_X__NODE="[",
        MUSTER_X__PERIOD_S="2026-99-99",
        MUSTER_X__="1",
    ) == [
        "MUSTER_X__MODE__DEEPER: mode is not a section",
        "MUSTER_X__NODE: not YAML: '['",
        "MUSTER_X__PERIOD_S: not YAML: '2026-99-99'",
        (
            "MUSTER_X__: unknown key (value 1); known keys: node, mode, period_s, bus, lane, "
            "devices, modes"
        ),
        "MUSTER_X__BUS__ULR: bus.ulr: unknown key (value 'nats://a:1'); did you mean url?",
    ]


def test_a_shape_whose_keys_would_go_unchecked_is_a_bug_of_ours() -> None:
    class Shape(msgspec.Struct, frozen=True, kw_only=True):
        by_name: dict[str, Device] = {}

    with pytest.raises(AssertionError, match="a section must be single or in a tuple"):
        ours.load(Shape, prefix="M", file=None, environment={"M__BY_NAME": "{}"})


class Renamed(msgspec.Struct, frozen=True, kw_only=True, rename={"read_only": "readOnly"}):
    read_only: bool = False
    lanes: tuple[Lane, ...] = ()


def test_a_tree_read_elsewhere_is_validated_like_a_file() -> None:
    tree = {"readOnly": True, "lanes": [{"width_m": 2}]}
    assert ours.validate(Renamed, tree) == Renamed(read_only=True, lanes=(Lane(width_m=2.0),))
    for bad, expected in [
        (
            {"read_only": True, "lanes": [{"width_m": 10}]},
            [
                "read_only: unknown key (value true); did you mean readOnly?",
                "lanes[0].width_m: 10.0 is wider than the road",
            ],
        ),
        (["readOnly"], ["settings: expected a mapping of keys, found ['readOnly']"]),
    ]:
        with pytest.raises(ours.BadSettings) as refused:
            ours.validate(Renamed, bad)
        assert refused.value.problems == expected


def test_a_text_of_several_documents_is_read_as_strictly_as_a_file() -> None:
    assert ours.parse(b"a: 1\n---\n[b]\n", source="X") == [{"a": 1}, ["b"]]
    # as in JSON
    assert ours.parse(rb'{"a": "\ud83d\ude00"}', source="X") == [{"a": "\N{GRINNING FACE}"}]
    for text, problem in [
        (b"a: &a 1\nb: *a", "X: not YAML: aliases are not allowed"),
        (b"a: 1\n---\nb: 1\nb: 2", "X: not YAML: duplicate key 'b'"),
        (b'"\\ud83d"', "X: not YAML: half a surrogate pair"),
        (b"x" * 1_100_000, "X: larger than 1048576 bytes"),
    ]:
        with pytest.raises(ours.BadSettings, match=problem):
            ours.parse(text, source="X")


def test_a_file_of_settings_is_one_document(tmp_path: Path) -> None:
    assert problems(tmp_path, "node: a\n---\nnode: b") == ["FILE: 2 YAML documents, expected one"]


NAMES: Final = st.sampled_from(
    ["node", "mode", "period_s", "bus", "url", "lane", "devices", "path", "replicas", "modes"]
)
TREES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.dates()
    | st.sampled_from(["fast", "nats://a:1", "/dev/a"]),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES | st.text() | st.integers(), inner),
    max_leaves=10,
)
PYTHONS: Final = (
    "`str`",
    "`int`",
    "`float`",
    "`object`",
    "`array`",
    "`null`",
    "NoneType",
    "<class",
    " object at ",
    "datetime",
    "Expected",
)
"""Words of Python and msgspec that mean nothing to someone who writes YAML."""
REUSED: Final = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def is_usable(tmp_path: Path, text: bytes, **environment: str) -> bool:
    """Return whether the settings can be used; any error but BadSettings fails the test."""
    try:
        loaded = load(tmp_path, text, **environment)
    except ours.BadSettings as error:
        invalid = [problem for problem in error.problems if ": not YAML: " not in problem]
        assert not [word for word in PYTHONS if any(word in problem for problem in invalid)]
        return False
    return isinstance(loaded, Settings)


@REUSED
@given(tree=st.dictionaries(NAMES, TREES) | TREES)
def test_any_tree_yields_settings_or_problems(tmp_path: Path, tree: object) -> None:
    is_usable(tmp_path, yaml.safe_dump(tree).encode("utf-8", "surrogateescape"))


@REUSED
@given(text=st.binary() | st.text("ab:-[]{}!&*|>?'\"% \n#0.x_<=").map(str.encode))
def test_any_bytes_yield_settings_or_problems(tmp_path: Path, text: bytes) -> None:
    is_usable(tmp_path, text)


@REUSED
@given(
    path=st.lists(NAMES | st.text("AB_", max_size=4), min_size=1, max_size=3),
    text=st.text("ab:-[]{}!&*|>?'\"% \n#0.x_<=") | st.sampled_from(["fast", "{}", "nats://a:1"]),
)
def test_any_variable_yields_settings_or_problems(
    tmp_path: Path, path: list[str], text: str
) -> None:
    is_usable(tmp_path, b"node: a", **{"__".join(["MUSTER_X", *path]).upper(): text})


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    low: int = 0
    high: int = 9
    lanes: tuple[Lane, ...] = ()
    name: str = "a"

    def __post_init__(self) -> None:
        validation.refuse(self)

    def demands(self) -> Iterator[validation.Demand]:
        yield self._order
        yield self._widths
        yield self._name

    def _order(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"low: {self.low} is above {self.high}"

    def _widths(self) -> Iterator[str]:
        for at, lane in validation.whole(self.lanes):
            if lane.width_m == 5:
                yield f"lanes[{at}].width_m: 5 is taken"

    def _name(self) -> Iterator[str]:
        if self.name == "b":
            yield "b is no name"


@pytest.mark.parametrize(
    ("tree", "invalid"),
    [
        ({"low": 10}, ["low: 10 is above 9"]),
        ({"low": 10, "name": "b"}, ["low: 10 is above 9", "X: b is no name"]),
        ({"low": "x", "name": "b"}, ["low: expected a whole number, found 'x'", "X: b is no name"]),
        (
            {"lanes": [{"width_m": "x"}, {"width_m": 5}]},
            [
                "lanes[0].width_m: expected a number, found 'x'",
                "lanes[1].width_m: 5 is taken",
            ],
        ),
        (
            {"lwo": 10, "name": "b"},
            ["lwo: unknown key (value 10); did you mean low?", "X: b is no name"],
        ),
    ],
)
def test_demands_that_need_no_invalid_field_are_checked_beside_the_invalid_ones(
    tree: dict[str, object], invalid: list[str]
) -> None:
    with pytest.raises(ours.BadSettings) as refused:
        ours.validate(Whole, tree, source="X")
    assert refused.value.problems == [line if line[0] == "X" else f"X: {line}" for line in invalid]


def test_the_file_may_be_the_configmap_that_holds_it(tmp_path: Path) -> None:
    service = "---\nkind: Service\napiVersion: v1\n"
    manifest = "kind: ConfigMap\napiVersion: v1\ndata: {other.yaml: 'x: 1', a.yaml: 'node: a'}\n"
    assert load(tmp_path, manifest + service) == Settings(node="a")
    items = yaml.safe_dump({"kind": "List", "items": [yaml.safe_load(manifest)]})
    assert load(tmp_path, items) == Settings(node="a")
    assert problems(tmp_path, manifest.replace("x: 1", "node: b")) == [
        (
            "FILE: several configurations: other.yaml of ConfigMap without a name, a.yaml of "
            "ConfigMap without a name; give one file"
        )
    ]
    assert problems(tmp_path, service) == [
        "FILE: these manifests contain no configuration for muster"
    ]


def test_an_inherited_pipe_is_read_once_and_cached() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w") as written:
        written.write("node: a")
        written.close()
        for _ in range(2):
            loaded = ours.load(
                Settings, prefix="M", file=Path(f"/dev/fd/{reading}"), environment={}
            )
            assert loaded == Settings(node="a")
