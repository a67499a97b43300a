"""The schema: what is valid, and what is refused at load, with its key and the reason."""

import json
from pathlib import Path
from typing import Any, Final

import jsonschema
import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muster.service import settings
from muster_plugin.cli import configure
from muster_plugin.config import resources
from muster_plugin.config import settings as config_settings
from muster_plugin.model import advertised


def read(text: str) -> config_settings.Document:
    (tree,) = settings.parse(text.encode(), source="FILE")
    return settings.validate(config_settings.Document, tree)


def problems(text: str) -> list[str]:
    with pytest.raises(settings.BadSettings) as refused:
        read(text)
    return refused.value.problems


def resource(text: str) -> str:
    return f"apiVersion: muster.dev/v1\nresources: [{text}]"


def device_group(nodes: str) -> str:
    return resource(f"{{name: a.example/b, groups: [{{devices: [{nodes}]}}]}}")


def test_a_resource_needs_a_name_and_one_way_to_find_its_nodes() -> None:
    parsed = read(device_group("{path: /dev/fuse}"))
    assert parsed.resources == (
        resources.Resource(
            name="a.example/b",
            groups=(resources.Group(devices=(resources.Entry(path="/dev/fuse"),), count=1),),
            per_match=False,
            env=None,
            expect=None,
            checks=resources.Checks(open=False, command=(), timeout_s=5.0, period_s=30.0, good=3),
            cdi=False,
            pre_start=False,
            grace_s=60.0,
            registration=resources.Registration.REGISTER,
        ),
    )
    (group,) = parsed.resources[0].groups
    assert group.devices == (
        resources.Entry(
            path="/dev/fuse",
            exclude=(),
            type=resources.NodeType.DEVICE,
            mount_path="",
            permissions="rw",
            read_only=False,
            limit=1,
            optional=False,
            shared=False,
        ),
    )


EVERYTHING: Final = """
apiVersion: muster.dev/v1
resources:
  - name: a.example/*
    perMatch: true
    groups: [{devices: [{regex: '^video[0-9]+$', exclude: [/dev/video9]}], count: 20}]
  - name: a.example/capture
    env: CAPTURE
    expect: {min: 2}
    checks: {open: true, command: [/bin/true, -x], timeout_s: 1, period_s: 10, good: 2}
    cdi: true
    preStart: true
    grace_s: 5
    registration: auto
    groups:
      - devices:
          - {path: '/dev/snd/pcmC[0-3]D0c', mountPath: /dev/snd/, permissions: r}
          - {path: /dev/snd/controlC0, limit: 10, shared: true}
          - {path: /opt/lib, type: Mount, readOnly: true, optional: true}
      - devices: [{usb: {vendor: '1A86', product: '7523', serial: x1}}]
      - devices: [{udev: {subsystem: tty, driver: 'ftdi*', attrs: {idVendor: '0403'}}}]
nodes:
  - match: 'edge-*'
    resources: [{name: a.example/capture, groups: [{devices: [{path: '/dev/snd/**'}]}]}]
  - match: {zone: 'north*', gpu: 'true'}
    resources: [{name: b.example/c, groups: [{devices: [{path: /dev/kvm}]}]}]
"""


def test_everything_that_can_be_reported_survives_being_printed_and_read_again() -> None:
    parsed = read(EVERYTHING)
    assert read(msgspec.yaml.encode(parsed).decode()) == parsed
    assert parsed.resources[1].groups[1].devices[0].usb == resources.Usb(
        vendor="1a86", product="7523", serial="x1"
    )


def test_the_schema_for_editors_takes_what_the_loader_takes_and_knows_every_key() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(configure.schema())))
    tree = yaml.safe_load(EVERYTHING)
    validator.validate(tree)
    tree["resources"][0]["cuont"] = 1
    assert [error.message for error in validator.iter_errors(tree)] == [
        "Additional properties are not allowed ('cuont' was unexpected)"
    ]


def test_a_node_gets_the_rules_that_match_its_name_or_its_labels() -> None:
    parsed = read(EVERYTHING)
    of = {
        node: [(r.name, len(r.groups)) for r in parsed.for_node(node, labels).resources]
        for node, labels in {
            "a": {},
            "edge-1": {"zone": "south", "gpu": "true"},
            "b": {"zone": "north-2", "gpu": "true", "more": "x"},
        }.items()
    }
    base = ("a.example/*", 1)
    assert of == {
        "a": [base, ("a.example/capture", 3)],
        "edge-1": [base, ("a.example/capture", 1)],
        "b": [base, ("a.example/capture", 3), ("b.example/c", 1)],
    }


def test_rules_that_only_clash_on_one_node_are_refused_there() -> None:
    parsed = read(
        """
        apiVersion: muster.dev/v1
        resources: [{name: a.example/b, groups: [{devices: [{path: /dev/fuse}]}]}]
        nodes:
          - match: n
            resources: [{name: a.example/c, groups: [{devices: [{path: '/dev/f*'}]}]}]
        """
    )
    assert [r.name for r in parsed.for_node("m", {}).resources] == ["a.example/b"]
    with pytest.raises(ValueError, match=r"^resources\[0\]\.groups\[0\]\.devices\[0\]: a\.example"):
        parsed.for_node("n", {})


def test_every_problem_is_reported_at_once_with_key_value_and_nearest_name() -> None:
    assert problems(
        """
        apiVersion: muster.dev/v2
        resuorces: []
        resources:
          - name: noslash
            env: 1x
            groups:
              - cuont: 2
                devices:
                  - {path: /dev/x, mountpath: /y}
                  - {usb: {vendor: 0407, product: '1'}}
          - name: a.example/b
            groups: [{count: 0, devices: [{path: dev/x, permissions: rx, limit: 0}]}]
            checks: {period_s: 0}
        """
    ) == [
        "apiVersion: expected muster.dev/v1, found 'muster.dev/v2'; did you mean muster.dev/v1?",
        "resuorces: unknown key (value []); did you mean resources?",
        "resources[0].groups[0].cuont: unknown key (value 2); did you mean count?",
        (
            "resources[0].groups[0].devices[0].mountpath: unknown key (value '/y'); "
            "did you mean mountPath?"
        ),
        (
            "resources[0].groups[0].devices[1].usb.vendor: expected four hexadecimal digits in "
            "quotes ('1a86'), found 263"
        ),
        (
            "resources[0].groups[0].devices[1].usb.product: expected four hexadecimal digits in "
            "quotes ('1a86'), found '1'"
        ),
        "resources[0].name: 'noslash' has no domain; write it as example.com/noslash",
        "resources[0].env: '1x' is not a valid variable name",
        "resources[1].groups[0].count: expected a whole number of at least 1, found 0",
        "resources[1].groups[0].devices[0].limit: expected a whole number of at least 1, found 0",
        "resources[1].groups[0].devices[0].path: 'dev/x' is not an absolute path",
        ("resources[1].groups[0].devices[0].permissions: 'rx' is not a combination of r, w and m"),
        "resources[1].checks.period_s: expected a number of at least 0.1, found 0",
    ]


HERE: Final = "resources[0].groups[0].devices[0]"


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ("{}", "set exactly one of path, regex, udev, usb"),
        ("{path: /dev/a, regex: a}", "set exactly one of path, regex, udev, usb"),
        ("{path: dev/a}", "path: 'dev/a' is not an absolute path"),
        ("{path: /dev/}", "path: '/dev/' is not the shortest form of this path"),
        ("{path: /dev/../a}", "path: '/dev/../a' is not the shortest form of this path"),
        (
            "{path: /*/a}",
            "path: '/*/a' would search the whole file system; begin with the name of a directory",
        ),
        ("{path: '/dev/a[0-'}", "path: '/dev/a[0-' has a [ without its ]"),
        (
            "{path: '/dev/a[9-0]'}",
            "path: '/dev/a[9-0]' has the range 9-0 in the wrong order in a set",
        ),
        ("{path: '/dev/a', exclude: [b]}", "exclude[0]: 'b' is not an absolute path"),
        ("{path: /dev/a, mountPath: b}", "mountPath: 'b' is not an absolute path"),
        ("{path: /dev/a, permissions: ''}", "permissions: '' is not a combination of r, w and m"),
        ("{path: /dev/a, permissions: rr}", "permissions: 'rr' is not a combination of"),
        ("{path: /dev/a, permissions: rwx}", "permissions: 'rwx' is not a combination"),
        (
            "{path: /dev/a, readOnly: true}",
            "readOnly: applies only to a Mount; for a Device write p",
        ),
        ("{regex: a, type: Mount}", "type: a Mount needs a path"),
        ("{path: /a/b, type: Mount, permissions: r}", "permissions: applies only to a Device"),
        ("{regex: '('}", "regex: '(' is not a regular expression: missing )"),
        ("{regex: '(?=a)'}", "regex: '(?=a)' is not a regular expression: invalid perl operator"),
    ],
)
def test_each_way_to_describe_nodes_wrongly_is_refused(nodes: str, problem: str) -> None:
    (parsed,) = problems(device_group(nodes))
    assert parsed.startswith(HERE + (": " if problem.startswith("set") else ".") + problem)


def group(groups: str, more: str = "") -> str:
    return resource(f"{{name: a.example/b, {more} groups: [{groups}]}}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("apiVersion: muster.dev/v1", "resources: set resources, gpus or both"),
        (
            "resources: [{name: a.example/b, groups: [{devices: [{path: /dev/a}]}]}]",
            "apiVersion: required but missing",
        ),
        (
            group("{devices: [{path: /dev/a}, {path: /dev/b, mountPath: /dev/a}]}"),
            "resources[0].groups[0].devices: two entries would have the path /dev/a in the co",
        ),
        (
            group("{devices: [{path: /dev/a}]}, {devices: [{path: /dev/a}]}"),
            "resources[0].groups[1]: repeats groups[0]; increase that group's count instead",
        ),
        (
            group("{devices: [{udev: {}}]}"),
            "resources[0].groups[0].devices[0].udev: set at least one of subsystem, driver, vendor",
        ),
        (group(""), "resources[0].groups: expected a list of at least 1 item, found 0"),
        (
            group("{devices: [{path: /dev/a}]}", "checks: {command: [true]},"),
            "resources[0].checks.command[0]: expected a string, found true",
        ),
        (
            group("{devices: [{path: /dev/a}]}", "checks: {command: ['true']},"),
            "resources[0].checks.command: 'true' is not an absolute path",
        ),
        (
            group("{devices: [{path: /dev/a}]}", "perMatch: true,"),
            "resources[0].name: 'a.example/b' is a single name, but perMatch needs a.",
        ),
        (
            group("{devices: [{path: /dev/a}]}", "env: A-B,"),
            "resources[0].env: 'A-B' is not a valid variable name",
        ),
        (
            resource("{name: a.example/*, groups: [{devices: [{path: /dev/a}]}]}"),
            "resources[0].name: 'a.example/*' needs perMatch: true",
        ),
        (
            resource(
                "{name: a.example/*, perMatch: true,"
                " groups: [{devices: [{path: /dev/a}, {path: /dev/b}]}]}"
            ),
            "resources[0].groups[0].devices: perMatch needs one entry; each match is a resource",
        ),
    ],
)
def test_each_group_or_resource_that_cannot_be_is_refused(text: str, problem: str) -> None:
    (parsed,) = problems(text)
    assert parsed.startswith(problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fuse", "name: 'fuse' has no domain; write it as example.com/fuse"),
        ("node.kubernetes.io/x", "name: 'node.kubernetes.io/x' is in Kubernetes' own domain"),
        ("requests.a/x", "name: 'requests.a/x' starts with 'requests.', which quotas use"),
        ("A.com/x", "name: 'A.com' is not a lower-case DNS name of at most 244 characters"),
        (f"{'a' * 245}/x", f"name: {'a' * 245!r} is not a lower-case DNS name of at most 244 char"),
        ("a.com/-x", "name: '-x' must have 1 to 63 of A-Z a-z 0-9 - _ . and begin and end with"),
        (f"a.com/{'x' * 64}", f"name: {'x' * 64!r} must have 1 to 63 of A-Z a-z 0-9 - _ . and"),
    ],
)
def test_what_the_kubelet_would_refuse_is_refused(name: str, problem: str) -> None:
    (parsed,) = problems(resource(f"{{name: {name!r}, groups: [{{devices: [{{path: /dev/a}}]}}]}}"))
    assert parsed.startswith(f"resources[0].{problem}")


CLAIMS: Final = [
    ("{path: /dev/a}", "{path: /dev/a}", True),
    ("{path: /dev/a}", "{path: '/dev/[a-c]'}", True),
    ("{path: /dev/a}", "{path: '/dev/**'}", True),
    ("{path: /dev/a}", "{path: '/dev/?', exclude: [/dev/a]}", False),
    ("{path: /dev/a}", "{path: '/dev/?b'}", False),
    ("{path: '/dev/a*'}", "{path: '/dev/a*'}", True),
    ("{path: '/dev/a*'}", "{path: '/dev/*a'}", False),  # found only on the node
    ("{path: /dev/a}", "{regex: '^[ab]$'}", True),
    ("{path: /opt/a}", "{regex: a}", False),
    ("{regex: '^a$'}", "{regex: '^a$'}", True),
    ("{path: /dev/a}", "{path: /dev/a, shared: true}", False),
    ("{path: /opt/a, type: Mount}", "{path: /opt/a, type: Mount}", False),
    ("{usb: {vendor: '1a86', product: '7523'}}", "{usb: {vendor: '1A86', product: '7523'}}", True),
    (
        "{usb: {vendor: '1a86', product: '7523'}}",
        "{usb: {vendor: '1a86', product: '7523', serial: a}}",
        True,
    ),
    (
        "{usb: {vendor: '1a86', product: '7523', serial: b}}",
        "{usb: {vendor: '1a86', product: '7523', serial: a}}",
        False,
    ),
    ("{udev: {subsystem: tty}}", "{udev: {subsystem: tty}}", True),
    ("{udev: {subsystem: tty}}", "{udev: {subsystem: tty, driver: x}}", False),
]


@pytest.mark.parametrize(("first", "second", "clash"), CLAIMS)
@pytest.mark.parametrize("order", [1, -1])
def test_nodes_that_two_resources_would_both_count_are_refused(
    first: str, second: str, *, clash: bool, order: int
) -> None:
    a, b = (first, second)[::order]
    text = resource(
        f"{{name: a.example/a, groups: [{{devices: [{a}]}}]}},"
        f"{{name: a.example/b, groups: [{{devices: [{b}]}}]}}"
    )
    if clash:
        (parsed,) = problems(text)
        assert parsed.startswith("resources[")
        assert "write shared: true in one of these entries" in parsed
    else:
        assert len(read(text).resources) == 2


def test_two_resources_of_one_name_are_refused() -> None:
    text = ", ".join(
        f"{{name: a.example/a, groups: [{{devices: [{{path: /dev/{node}}}]}}]}}" for node in "ab"
    )
    assert problems(resource(text)) == [
        "resources: two resources are named a.example/a; the kubelet would keep only one"
    ]


def test_more_entries_than_can_be_compared_in_time_are_refused() -> None:
    devices = ", ".join(f"{{path: /dev/a{at}}}" for at in range(60))
    text = resource(
        ", ".join(
            f"{{name: a.example/r{at}, groups: [{{devices: [{devices}]}}]}}" for at in range(9)
        )
    )
    assert problems(text) == ["resources: all groups together have 540 entries; use at most 500"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("video0", "e.com/video0"),
        ("net/tun", "e.com/net_tun"),
        ("snd/by-path/pci-0000:00:1b.0", "e.com/snd_by-path_pci-0000_00_1b_0"),
        ("_x", "e.com/x-a01e47cb"),
        ("a" * 64, f"e.com/{'a' * 54}-ffe054fe"),
        ("ä", "e.com/33e6d73f"),
    ],
)
def test_a_match_is_named_after_its_path_as_smarter_does(path: str, name: str) -> None:
    assert advertised.derived_name("e.com/*", path) == name


@given(st.text(min_size=1))
def test_derived_names_are_names_that_the_kubelet_takes(path: str) -> None:
    assert [*advertised.name_problems(advertised.derived_name("e.com/*", path))] == []


PAGES: Final = ("configuration.md", "gpus.md")
SHAPES: Final = msgspec.json.schema(config_settings.Document)["$defs"].values()
KEYS: Final = st.sampled_from(sorted({key for s in SHAPES for key in s.get("properties", {})}))
VALUES: Final = st.sampled_from(
    ["muster.dev/v1", "a.example/b", "a.example/*", "/dev/a*", "^a[0-9]+$", "1a86", "Mount", "rw"]
)
TREES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(), inner, max_size=5)
    ),
    max_leaves=20,
)


def usable(text: bytes) -> bool:
    """Return whether a text is valid; any error but BadSettings fails the test."""
    try:
        for tree in settings.parse(text, source="FILE"):
            settings.validate(config_settings.Document, tree)
    except settings.BadSettings:
        return False
    return True


@given(text=st.binary() | st.text("ab:-[]{}!&*|>?'\"% \n#0.x_<=").map(str.encode))
def test_any_bytes_give_rules_or_say_why_not(text: bytes) -> None:
    usable(text)


@given(
    tree=st.fixed_dictionaries({"apiVersion": st.just("muster.dev/v1"), "resources": TREES}) | TREES
)
def test_any_tree_gives_rules_or_says_why_not(tree: object) -> None:
    usable(yaml.safe_dump(tree).encode("utf-8", "surrogateescape"))


NODES: Final = st.fixed_dictionaries(
    {},
    optional={
        "path": st.sampled_from(["/dev/a", "/dev/a*", "/dev/b", "/dev/**", "/x/"]) | st.text(),
        "regex": st.sampled_from(["^a$", "a.*", "(a|b)", "a**"]) | st.text("ab()[]*+?{}^$|\\.0,"),
        "usb": st.fixed_dictionaries(
            {"vendor": st.sampled_from(["1a86", "zzzz"]), "product": st.just("7523")},
            optional={"serial": st.text(max_size=3)},
        ),
        "limit": st.integers(-1, 3),
        "permissions": st.text("rwm", max_size=3),
        "shared": st.booleans(),
        "exclude": st.lists(st.sampled_from(["/dev/a", "x", "/dev/*"]), max_size=2),
        "mountPath": st.sampled_from(["/dev/a", "/x/", "y"]),
    },
)
RESOURCES: Final = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["a.example/a", "a.example/b", "a.example/*", "b"]),
            "groups": st.lists(
                st.fixed_dictionaries({"devices": st.lists(NODES, max_size=2)}), max_size=2
            ),
        },
        optional={"perMatch": st.booleans()},
    ),
    max_size=3,
)


@hypothesis_settings(max_examples=100)
@given(resources=RESOURCES)
def test_rules_that_are_taken_are_printed_and_read_again_as_the_same(
    resources: list[dict[str, Any]],
) -> None:
    tree = {"apiVersion": "muster.dev/v1", "resources": resources}
    text = yaml.safe_dump(tree).encode("utf-8", "surrogateescape")
    if usable(text):
        parsed = read(text.decode())
        assert read(msgspec.yaml.encode(parsed).decode()) == parsed


def test_the_documentation_names_every_key_and_its_examples_can_be_used() -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = "".join(docs.joinpath(page).read_text("utf-8") for page in PAGES)
    keys = {key for shape in SHAPES for key in shape.get("properties", {})}
    assert {key for key in keys if f"`{key}`" not in text} == set()
    examples = [block.split("```")[0] for block in text.split("```yaml\n")[1:]]
    assert len(examples) > 8
    for example in examples:
        assert isinstance(read(example), config_settings.Document)
