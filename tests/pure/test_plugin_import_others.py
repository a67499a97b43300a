"""The import of configurations for other plugins: the same resources, and each difference.

The examples are the published ones, restated: names, patterns and counts are facts. Origins:
smarter-project/smarter-device-manager conf.yaml and smarter-device-manager-configmap-xavier.yaml;
squat/generic-device-plugin manifests/generic-device-plugin.yaml, its --help and the cases of its
deviceplugin/path_test.go and usb_test.go. NVIDIA's are in test_plugin_import_nvidia.py.
"""

from typing import Any, Final

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muster.service import settings
from muster_plugin.config import files
from muster_plugin.config import resources as config_resources
from muster_plugin.config import settings as config_settings
from muster_plugin.config.importers import base, smarter_and_generic

Format = config_settings.Format


def imported(
    text: str | bytes, peer: Format, domain: str | None = None
) -> base.ImportedConfiguration:
    given = text if isinstance(text, bytes) else text.encode()
    return files.import_peer(given, source="FILE", peer=peer, domain=domain)


def resources(
    text: str, peer: Format, domain: str | None = None
) -> tuple[config_resources.Resource, ...]:
    """Return the resources; assert that direct use and the printed form give the same."""
    result = imported(text, peer, domain).rules
    printed = msgspec.yaml.encode(result)
    direct = files.read(text.encode(), source="F", written_for=peer, domain=domain)
    again = files.read(printed, source="F", written_for=Format.MUSTER)
    assert direct.resources == again.resources == result.resources
    return result.resources


def differences(text: str, peer: Format) -> list[str]:
    """Return the differences that are specific to this file."""
    plain = {
        Format.SMARTER: "[{devicematch: ^x$, nummaxdevices: 1}]",
        Format.GENERIC: "{domain: a.b, device: ['xy,/dev/x']}",
    }[peer]
    general = imported(plain, peer).differences
    return [lines for lines in imported(text, peer).differences if lines not in general]


def problems(text: str | bytes, peer: Format) -> list[str]:
    with pytest.raises(settings.BadSettings) as refused:
        imported(text, peer)
    return refused.value.problems


def each(pattern: str, count: int) -> config_resources.Resource:
    """Return what an entry of smarter means: one resource for each match, with `rw`."""
    nodes = config_resources.Entry(regex=pattern, permissions="rw")
    groups = (config_resources.Group(devices=(nodes,), count=count),)
    return config_resources.Resource(name="smarter-devices/*", groups=groups, per_match=True)


SMARTER: Final = {
    "^snd$": 20,
    "^gpiomem$": 40,
    "^gpiochip[0-9]*$": 20,
    "^hci[0-9]*$": 1,
    "^i2c-[0-9]*$": 1,
    "^rtc0$": 20,
    "^video[0-9]*$": 20,
    "^vchiq$": 20,
    "^vcsm.*$": 20,
    "^ttyUSB[0-9]*$": 1,
    "^ttyACM[0-9]*$": 1,
    "^ttyTHS[0-9]*$": 1,
    "^ttyS[0-9]*$": 1,
}


def conf(entries: dict[str, int]) -> str:
    return "".join(f"- devicematch: {m}\n  nummaxdevices: {n}\n" for m, n in entries.items())


@pytest.mark.parametrize("entries", [SMARTER, {"^fuse$": 20}, {"^fuse$": 1000, "^kvm$": 100}])
def test_the_published_configurations_of_smarter_mean_the_same_here(
    entries: dict[str, int],
) -> None:
    assert resources(conf(entries), Format.SMARTER) == tuple(
        each(pattern, count) for pattern, count in entries.items()
    )
    assert differences(conf(entries), Format.SMARTER) == []


def test_a_config_map_of_smarter_is_read_as_it_is() -> None:
    text = yaml.safe_dump_all(
        [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "spec": {"template": {}}},
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "data": {"conf.yaml": conf({"^vcsm.*$": 20, "nvidia-gpu": 20}), "note": "none"},
            },
        ]
    )
    assert resources(text, Format.SMARTER) == (each("^vcsm.*$", 20),)
    assert differences(text, Format.SMARTER) == []
    assert imported(text, Format.SMARTER).losses == (
        "[1]: Jetson GPUs (/sys/devices/gpu.N) have no device node",
    )


def test_what_smarter_does_silently_is_reported() -> None:
    text = """
    - {devicematch: video, nummaxdevices: 2}
    - {devicematch: ^kvm$, nummaxdevices: 1}
    - {devicematch: ^kvm$, nummaxdevices: 3, nummaxdevice: 2}
    - {devicematch: ^rtc$}
    """
    assert resources(text, Format.SMARTER) == (each("video", 2), each("^kvm$", 3))
    assert differences(text, Format.SMARTER) == [
        (
            "[0]: devicematch 'video' is not anchored: it matches any part of a path "
            "below /dev, with smarter and with muster; ^ and $ make it exact"
        ),
        "[2].nummaxdevice: smarter ignores this key; did you mean nummaxdevices?",
        (
            "[2]: devicematch '^kvm$' is listed twice; the later one is kept, "
            "because the kubelet keeps it too"
        ),
        "[3]: '^rtc$' has nummaxdevices 0, so no device; left out",
    ]


def test_every_problem_of_a_file_of_smarter_is_reported_at_once() -> None:
    text = """
    - {devicematch: 7, nummaxdevices: many}
    - {devicematch: '(', nummaxdevices: 1}
    - {devicematch: a, nummaxdevices: -1}
    - {devicematch: a, nummaxdevices: 20000}
    - fuse
    """
    result = problems(text, Format.SMARTER)
    assert [line[:70] for line in result] == [
        "FILE: [0].devicematch: expected a string; write 7 in quotes",
        "FILE: [0].nummaxdevices: expected a whole number of at least 0, found ",
        "FILE: [1].devicematch: '(' is not a regular expression: missing ): (",
        "FILE: [2].nummaxdevices: expected a whole number of at least 0, found ",
        "FILE: [3].nummaxdevices: expected a whole number of at most 10000, fou",
        "FILE: [4]: expected a mapping of keys, found 'fuse'",
    ]


def group(*paths: str | tuple[str, str], count: int = 1) -> config_resources.Group:
    """Return a group of generic: `mrw`, each path unchanged or at its mountPath."""
    return config_resources.Group(
        devices=tuple(
            config_resources.Entry(path=path, permissions="mrw")
            if isinstance(path, str)
            else config_resources.Entry(path=path[0], mount_path=path[1], permissions="mrw")
            for path in paths
        ),
        count=count,
    )


def capture(card: int) -> config_resources.Group:
    control, pcm = f"/dev/snd/controlC{card}", f"/dev/snd/pcmC{card}D0c"
    if card == 0:
        return group(control, pcm)
    return group((control, "/dev/snd/controlC0"), (pcm, "/dev/snd/pcmC0D0c"))


SERIAL: Final = ("ttyUSB*", "ttyACM*", "tty.usb*", "cu.*", "cuaU*", "rfcomm*")
MANIFEST: Final = {
    "serial": tuple(group(f"/dev/{name}") for name in SERIAL),
    "video": (group("/dev/video0"),),
    "fuse": (group("/dev/fuse", count=10),),
    "audio": (group("/dev/snd", count=10),),
    "capture": tuple(capture(card) for card in range(4)),
}


def spec(name: str, groups: tuple[config_resources.Group, ...]) -> dict[str, Any]:
    """Return groups in the form of generic's configuration."""
    return {
        "name": name,
        "groups": [
            {
                "paths": [
                    {"path": n.path, **({"mountPath": n.mount_path} if n.mount_path else {})}
                    for n in node.devices
                ],
                **({"count": node.count} if node.count > 1 else {}),
            }
            for node in groups
        ],
    }


def daemon_set(arguments: list[str]) -> str:
    container = {"name": "generic-device-plugin", "args": arguments}
    pod = {"containers": [container]}
    manifest = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "spec": {"template": {"spec": pod}},
    }
    return yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [manifest]})


@pytest.mark.parametrize(
    "form", ["flags", "flags with =", "file", "file with device", "config map"]
)
def test_the_published_manifest_of_generic_means_the_same_here(form: str) -> None:
    specs = [spec(name, groups) for name, groups in MANIFEST.items()]
    texts = [yaml.safe_dump(node) for node in specs]
    file = yaml.safe_dump({"devices": specs})
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"config.yaml": file}}
    text = {
        "flags": daemon_set([part for node in texts for part in ("--device", node)]),
        "flags with =": daemon_set([f"--device={node}" for node in texts]),
        "file": file,
        "file with device": yaml.safe_dump({"device": specs}),
        "config map": yaml.safe_dump(config_map),
    }[form]
    assert resources(text, Format.GENERIC) == tuple(
        config_resources.Resource(name=f"squat.ai/{name}", groups=groups)
        for name, groups in MANIFEST.items()
    )
    assert differences(text, Format.GENERIC) == [
        (
            "domain: missing; squat.ai is used, the default of generic 0.1; "
            "since 0.2.0 it is devic.es"
        ),
    ]


@pytest.mark.parametrize(
    ("arguments", "chosen", "domain"),
    [
        ([], None, "squat.ai"),
        (["--domain=devic.es"], None, "devic.es"),
        (["--domain", "devic.es"], None, "devic.es"),
        (["--domain", "devic.es"], "a.example", "a.example"),
    ],
)
def test_the_domain_of_a_manifest_is_taken_unless_another_gets(
    arguments: list[str], chosen: str | None, domain: str
) -> None:
    text = daemon_set([*arguments, "--device", "video,/dev/video0"])
    (result,) = resources(text, Format.GENERIC, chosen)
    assert result == config_resources.Resource(
        name=f"{domain}/video", groups=(group("/dev/video0"),)
    )


def nodes(path: str) -> config_resources.Entry:
    """Return what one path in generic's configuration means."""
    text = f"{{domain: a.example, devices: [{{name: aa, groups: [{{paths: [{path}]}}]}}]}}"
    (result,) = resources(text, Format.GENERIC)
    (node,) = result.groups[0].devices
    return node


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("{path: /dev/plain}", config_resources.Entry(path="/dev/plain", permissions="mrw")),
        (
            "{path: /dev/ttyUSB*, mountPath: /dev/ttyUSB0}",
            config_resources.Entry(
                path="/dev/ttyUSB*", mount_path="/dev/ttyUSB0", permissions="mrw"
            ),
        ),
        (
            "{path: /dev/ttyUSB*, mountPath: /dev/serial/, permissions: r, limit: 0}",
            config_resources.Entry(path="/dev/ttyUSB*", mount_path="/dev/serial/", permissions="r"),
        ),
        (
            "{path: /dev/snd/controlC0, limit: 10, type: Device}",
            config_resources.Entry(path="/dev/snd/controlC0", limit=10, permissions="mrw"),
        ),
        (
            "{path: /dev/ttyS0, optional: true}",
            config_resources.Entry(path="/dev/ttyS0", optional=True, permissions="mrw"),
        ),
        (
            "{path: /opt/lib, type: Mount, readOnly: true, permissions: r}",
            config_resources.Entry(
                path="/opt/lib", type=config_resources.NodeType.MOUNT, read_only=True
            ),
        ),
    ],
)
def test_each_key_of_a_path_means_the_same_here(
    path: str, expected: config_resources.Entry
) -> None:
    assert nodes(path) == expected


def with_usb(usb: str) -> str:
    return f"{{domain: a.example, devices: [{{name: aa, groups: [{{usb: [{usb}]}}]}}]}}"


def test_usb_devices_mean_the_same_here_but_two_sticks_are_two_units() -> None:
    text = with_usb("{vendor: '1050', product: '0407'}, {vendor: 1A86, product: f, serial: x}")
    (result,) = resources(text, Format.GENERIC)
    assert result.groups == (
        config_resources.Group(
            devices=(
                config_resources.Entry(
                    usb=config_resources.Usb(vendor="1050", product="0407"), optional=True
                ),
                config_resources.Entry(
                    usb=config_resources.Usb(vendor="1a86", product="000f", serial="x"),
                    optional=True,
                ),
            )
        ),
    )
    assert differences(text, Format.GENERIC) == [
        (
            "usb: two identical USB devices count as two, for different containers; "
            "generic-device-plugin gives all matching devices to one container"
        )
    ]


def test_a_usb_id_without_quotes_is_refused_in_a_file_and_hexadecimal_in_a_flag() -> None:
    (result,) = problems(with_usb("{vendor: '1a86', product: 7523}"), Format.GENERIC)
    assert result.startswith("FILE: devices[0].groups[0].usb[0].product: 7523 is not in quotes: g")
    flag = "{name: ch340, groups: [{usb: [{vendor: 1a86, product: 7523}]}]}"
    (resource,) = resources(daemon_set(["--device", flag]), Format.GENERIC)
    assert resource.groups[0].devices[0].usb == config_resources.Usb(vendor="1a86", product="7523")
    octal = flag.replace("7523", "0407")
    (result,) = problems(daemon_set(["--device", octal]), Format.GENERIC)
    assert result.startswith("FILE: --device[0].groups[0].usb[0].product: 263 is not in quotes: g")


def test_nodes_that_generic_gives_to_two_resources_are_shared_here() -> None:
    control = "{path: /dev/snd/controlC0}"
    text = f"""
    domain: a.example
    devices:
      - {{name: capture, groups: [{{paths: [{control}, {{path: /dev/snd/pcmC0D0c}}]}}]}}
      - {{name: playback, groups: [{{paths: [{control}, {{path: /dev/snd/pcmC0D0p}}]}}]}}
    """
    node, other = resources(text, Format.GENERIC)
    assert [n.shared for n in node.groups[0].devices] == [False, False]
    assert [n.shared for n in other.groups[0].devices] == [True, False]
    assert differences(text, Format.GENERIC) == [
        (
            "resources[1].groups[0].devices[0]: a.example/capture has the same nodes; marked as"
            " shared"
        )
    ]


def test_what_generic_does_silently_is_reported() -> None:
    text = """
    domain: a.example
    log-level: debug
    device:
      - name: ' fuse '
        group: []
        groups:
          - {paths: [{path: /dev/fuse, readOnly: true, mountpath: /x}], count: 0}
          - {paths: [{path: /dev/fuse}]}
          - {count: 2}
      - {name: none, groups: []}
    """
    (result,) = resources(text, Format.GENERIC)
    assert result == config_resources.Resource(name="a.example/fuse", groups=(group("/dev/fuse"),))
    assert differences(text, Format.GENERIC) == [
        "log-level: concerns the process; set it in muster's deployment",
        "device[0].group: generic ignores this key; did you mean groups?",
        "device[0].groups[0].paths[0].mountpath: generic ignores this key; did you mean mountPath?",
        ("device[0].groups[0].paths[0].readOnly: generic ignores it for a Device; left out"),
        "device[0].groups[1]: the same as an earlier group, with the same ids; left out",
        "device[0].groups[2]: has neither paths nor usb; left out",
        "device[1]: has no group with a device; left out",
    ]


def test_every_problem_of_a_file_of_generic_is_reported_at_once() -> None:
    text = """
    devices:
      - {name: a, groups: [{paths: [{path: /dev/a}]}]}
      - {name: both, groups: [{paths: [{path: /dev/a}], usb: [{vendor: a, product: b}]}]}
      - {name: u_s, groups: [{count: 2}, {paths: [{path: a, moutnPath: /b}]}]}
      - {name: perm, groups: [{paths: [{path: /dev/a, permissions: rwx}]}]}
      - {name: rel, groups: [{paths: [{path: dev/a}]}]}
      - {name: type, groups: [{paths: [{path: /dev/a, type: Disk, optional: 1}]}]}
      - {name: hex, groups: [{usb: [{vendor: xyz, product: '12345'}]}]}
      - 7
    """
    assert [line[:70] for line in problems(f"{text}\n    domain: A.b", Format.GENERIC)] == [
        "FILE: domain: 'A.b' is not a lower-case DNS name of at most 244 charac",
        "FILE: devices[0].name: 'a': expected two or more of a-z, 0-9 and -",
        "FILE: devices[1].groups[0]: has paths and usb; generic-device-plugin r",
        "FILE: devices[2].name: 'u_s': expected two or more of a-z, 0-9 and -",
        "FILE: devices[2].groups[1].paths[0].path: 'a' is not an absolute path",
        "FILE: devices[3].groups[0].paths[0].permissions: 'rwx' is not a combin",
        "FILE: devices[4].groups[0].paths[0].path: 'dev/a' is not an absolute p",
        "FILE: devices[5].groups[0].paths[0].optional: expected true or false, ",
        "FILE: devices[5].groups[0].paths[0].type: expected Device or Mount, fo",
        "FILE: devices[6].groups[0].usb[0].vendor: expected four hexadecimal di",
        "FILE: devices[6].groups[0].usb[0].product: expected four hexadecimal d",
        "FILE: devices[7]: expected a mapping of keys, found 7",
        "FILE: devices[2].groups[1].paths[0].moutnPath: generic ignores this ke",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no device to import"),
        ("{}", "expected a list, found {}"),
        ("- 1\n---\n- 2", "FILE: 2 YAML documents, expected one"),
        ("a: &a 1\nb: *a", "FILE: not YAML: aliases are not allowed"),
        (b"\xff", "FILE: not YAML: 'utf-8' codec can't decode"),
        (
            "{kind: Pod, apiVersion: v1, spec: 1}",
            "FILE: these manifests contain no configuration for smarter",
        ),
        (
            "{kind: ConfigMap, apiVersion: v1, data: {a: '[]', b: '[]'}}",
            "FILE: several configurations: a, b; give one file",
        ),
        (
            "{kind: ConfigMap, apiVersion: v1, data: {a: '['}}",
            "FILE: a: not YAML: while parsing a flow node",
        ),
    ],
)
def test_a_file_that_holds_no_configuration_is_refused(text: str | bytes, problem: str) -> None:
    first = problems(text, Format.SMARTER)[0]
    assert first.removeprefix("FILE: ").startswith(problem.removeprefix("FILE: "))


KEYS: Final = st.sampled_from(
    [
        *("devicematch", "nummaxdevices", "devices", "device", "domain", "name", "groups"),
        *("paths", "usb", "count", "path", "mountPath", "permissions", "limit", "optional"),
        *("type", "readOnly", "vendor", "product", "serial", "version", "flags", "plugin", "gfd"),
        *("sharing", "timeSlicing", "mps", "resources", "replicas", "rename", "imex"),
        *("kind", "apiVersion", "spec", "template", "containers", "args", "data", "items"),
    ]
)
VALUES: Final = st.sampled_from(
    [
        *("^a$", "[", "/dev/a*", "aa", "Mount", "rw", "1a86", "v1", "ConfigMap", "DaemonSet"),
        *("List", "--device", "--domain=a", "aa,/dev/a", "[{devicematch: a, nummaxdevices: 1}]"),
    ]
)
TREES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS | st.text(max_size=3) | st.integers(), inner, max_size=5)
    ),
    max_leaves=20,
)
ENTRIES: Final = st.lists(
    st.dictionaries(st.sampled_from(["devicematch", "nummaxdevices"]), TREES), max_size=3
)
PATHS: Final = st.dictionaries(
    st.sampled_from(["path", "mountPath", "permissions", "limit", "optional", "type"]), TREES
)
GROUPS: Final = st.fixed_dictionaries(
    {},
    optional={
        "paths": st.lists(PATHS | st.just({"path": "/dev/a"}) | st.just({"path": "/dev/*"})),
        "usb": st.lists(st.dictionaries(st.sampled_from(["vendor", "product"]), TREES)),
        "count": TREES,
    },
)
SPECS: Final = st.fixed_dictionaries(
    {"name": st.sampled_from(["aa", "bb", "c"]), "groups": st.lists(GROUPS, max_size=3)}
)


def usable(text: bytes, peer: Format) -> None:
    """Import a text, and use it directly; any error but BadSettings fails the test."""
    try:
        result = imported(text, peer)
        direct = files.read(text, source="F", written_for=peer)
        assert direct == config_settings.Settings(
            resources=result.rules.resources, gpus=result.rules.gpus
        )
        printed = msgspec.yaml.encode(result.rules)
        again = files.read(printed, source="F", written_for=Format.MUSTER)
        assert again == direct
    except settings.BadSettings:
        return


@given(
    text=st.binary() | st.text("ab:-[]{}!&*|>?'\"% \n#0.x_<=").map(str.encode),
    peer=st.sampled_from([Format.SMARTER, Format.GENERIC, Format.NVIDIA]),
)
def test_any_bytes_give_rules_or_say_why_not(text: bytes, peer: Format) -> None:
    usable(text, peer)


@hypothesis_settings(max_examples=40)
@given(
    tree=TREES | ENTRIES | st.fixed_dictionaries({"devices": st.lists(SPECS, max_size=3)}),
    peer=st.sampled_from([Format.SMARTER, Format.GENERIC, Format.NVIDIA]),
)
def test_any_tree_gives_rules_or_says_why_not(tree: object, peer: Format) -> None:
    usable(yaml.safe_dump(tree).encode("utf-8", "surrogateescape"), peer)


def test_importers_are_given_trees_by_other_programs_too() -> None:
    assert smarter_and_generic.read_smarter(
        [{"devicematch": "^a$", "nummaxdevices": 2.0}]
    ).rules == config_settings.Document(api_version="muster.dev/v1", resources=(each("^a$", 2),))
    assert smarter_and_generic.read_generic_flags(
        ["aa,/dev/a,/dev/b"], domain="d.e"
    ).rules == config_settings.Document(
        api_version="muster.dev/v1",
        resources=(
            config_resources.Resource(name="d.e/aa", groups=(group("/dev/a"), group("/dev/b"))),
        ),
    )
