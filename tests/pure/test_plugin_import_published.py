"""The import of files in published formats, written for these tests from the documentation.

The formats: smarter-device-manager's chart and its ConfigMap for Xavier; the ConfigMap of SkyPilot;
generic-device-plugin's README; NVIDIA's k8s-device-plugin: its chart (v0.20), static DaemonSet and
README; the GPU operator's page about time-slicing, its ClusterPolicy and chart; iktos' README.
"""

from typing import Any, Final

import msgspec
import pytest
import yaml

from muster.service import settings
from muster_plugin.config import files
from muster_plugin.config import settings as config_settings
from muster_plugin.config.importers import nvidia, nvidia_nodes, nvidia_settings

SMARTER, GENERIC, NVIDIA = (
    config_settings.Format.SMARTER,
    config_settings.Format.GENERIC,
    config_settings.Format.NVIDIA,
)

SMARTER_VALUES: Final = """
application: {appName: smarter-device-manager}
image: {repository: ghcr.io/smarter-project/smarter-device-manager, tag: ""}
config:
  - devicematch: ^i2c-[0-9]*$
    nummaxdevices: 1
  - devicematch: ttyUSB
    nummaxdevices: 1
"""
SKYPILOT: Final = """
apiVersion: v1
kind: ConfigMap
metadata: {name: smarter-device-manager, namespace: smarter-device-manager}
data:
  conf.yaml: |
    - devicematch: ^fuse$
      nummaxdevices: 1000
"""
XAVIER: Final = """
apiVersion: v1
kind: ConfigMap
metadata: {name: smarter-device-manager-xavier}
data:
  conf.yaml: |
    - {devicematch: ^nvhost-.*$, nummaxdevices: 20}
    - {devicematch: nvidia-gpu, nummaxdevices: 20}
"""
GENERIC_DAEMONSET: Final = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: generic-device-plugin, namespace: kube-system}
spec:
  selector: {matchLabels: {app.kubernetes.io/name: generic-device-plugin}}
  template:
    spec:
      containers:
        - name: generic-device-plugin
          image: squat/generic-device-plugin
          args:
            - --domain
            - devic.es
            - --device
            - |
              name: fuse
              groups: [{count: 10, paths: [{path: /dev/fuse}]}]
            - --device
            - |
              name: zigbee
              groups: [{usb: [{vendor: "10c4", product: "ea60"}]}]
"""
GENERIC_FILE: Final = """
domain: example.com
devices:
  - name: serial
    groups: [{paths: [{path: "/dev/ttyUSB*", permissions: rw}]}]
  - name: camera
    groups:
      - paths:
          - {path: /dev/video0, permissions: rw}
          - {path: /opt/camera, type: Mount, readOnly: true, optional: true}
"""
NVIDIA_VALUES: Final = """
config:
  default: whole
  map:
    whole: |-
      version: v1
      flags: {migStrategy: none}
    shared: |-
      version: v1
      sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    mixed: |-
      version: v1
      flags: {migStrategy: mixed}
deviceIDStrategy: index
compatWithCPUManager: true
failOnInitError: "false"
gfd: {enabled: true}
nodeSelector: {pool: gpu}
"""
NVIDIA_NAMED: Final = """
config: {name: my-configurations}
migStrategy: single
"""
NVIDIA_STATIC: Final = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: nvidia-device-plugin-daemonset, namespace: kube-system}
spec:
  selector: {matchLabels: {name: nvidia-device-plugin-ds}}
  template:
    spec:
      priorityClassName: system-node-critical
      containers:
        - image: nvcr.io/nvidia/k8s-device-plugin:v0.20.0
          name: nvidia-device-plugin-ctr
          env: [{name: FAIL_ON_INIT_ERROR, value: "false"}]
"""
MPS: Final = """
version: v1
sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}
"""
SLICING: Final = """
apiVersion: v1
kind: ConfigMap
metadata: {name: time-slicing-config, namespace: gpu-operator}
data:
  any: |-
    version: v1
    flags: {migStrategy: none}
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
  tesla-t4: |-
    version: v1
    flags: {migStrategy: none}
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 8}]}}
"""
POLICY: Final = """
---
apiVersion: nvidia.com/v1
kind: ClusterPolicy
metadata: {name: cluster-policy}
spec:
  operator: {defaultRuntime: containerd}
  devicePlugin:
    enabled: true
    config: {name: time-slicing-config, default: any}
    env: [{name: DEVICE_ID_STRATEGY, value: index}]
  mig: {strategy: mixed}
"""
OPERATOR_VALUES: Final = """
operator: {defaultRuntime: containerd}
devicePlugin:
  config:
    create: true
    name: slices
    default: any
    data:
      any: |-
        version: v1
        sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
cdi: {enabled: true}
"""
IKTOS: Final = "gpu:gpu-mem-gb:-1"


def per_match(regex: str, count: int) -> dict[str, Any]:
    group = {"devices": [{"regex": regex}]} | ({"count": count} if count > 1 else {})
    return {"name": "smarter-devices/*", "groups": [group], "perMatch": True}


def slices(replicas: int) -> dict[str, Any]:
    return {"resources": [{"name": "nvidia.com/gpu", "replicas": replicas}]}


def labelled(name: str, gpus: dict[str, Any]) -> dict[str, Any]:
    return {"match": {nvidia_nodes.LABEL: name}, "gpus": gpus}


GIVEN: Final = {"deviceIds": "index", "deviceSpecs": True}
CASES: Final[list[tuple[str, str, config_settings.Format, dict[str, Any], list[str]]]] = [
    (
        "smarter's chart",
        SMARTER_VALUES,
        SMARTER,
        {"resources": [per_match("^i2c-[0-9]*$", 1), per_match("ttyUSB", 1)]},
        [],
    ),
    ("SkyPilot", SKYPILOT, SMARTER, {"resources": [per_match("^fuse$", 1000)]}, []),
    (
        "Xavier",
        XAVIER,
        SMARTER,
        {"resources": [per_match("^nvhost-.*$", 20)]},
        ["[1]: Jetson GPUs (/sys/devices/gpu.N) have no device node"],
    ),
    (
        "generic's DaemonSet",
        GENERIC_DAEMONSET,
        GENERIC,
        {
            "resources": [
                {
                    "name": "devic.es/fuse",
                    "groups": [
                        {"devices": [{"path": "/dev/fuse", "permissions": "mrw"}], "count": 10}
                    ],
                },
                {
                    "name": "devic.es/zigbee",
                    "groups": [{"devices": [{"usb": {"vendor": "10c4", "product": "ea60"}}]}],
                },
            ]
        },
        [],
    ),
    (
        "generic's file",
        GENERIC_FILE,
        GENERIC,
        {
            "resources": [
                {
                    "name": "example.com/serial",
                    "groups": [{"devices": [{"path": "/dev/ttyUSB*", "permissions": "rw"}]}],
                },
                {
                    "name": "example.com/camera",
                    "groups": [
                        {
                            "devices": [
                                {"path": "/dev/video0", "permissions": "rw"},
                                {
                                    "path": "/opt/camera",
                                    "type": "Mount",
                                    "readOnly": True,
                                    "optional": True,
                                },
                            ]
                        }
                    ],
                },
            ]
        },
        [],
    ),
    (
        "NVIDIA's chart",
        NVIDIA_VALUES,
        NVIDIA,
        {
            "gpus": {"given": GIVEN},
            "nodes": [
                labelled("shared", {"sharing": slices(4), "given": GIVEN}),
                labelled("mixed", {"migStrategy": "mixed", "given": GIVEN}),
            ],
        },
        [],
    ),
    (
        "NVIDIA's chart, file elsewhere",
        NVIDIA_NAMED,
        NVIDIA,
        {"gpus": {"migStrategy": "single"}},
        ["config.name: the ConfigMap 'my-configurations' is missing: add its manifest"],
    ),
    ("NVIDIA's DaemonSet", NVIDIA_STATIC, NVIDIA, {"gpus": {}}, []),
    (
        "ClusterPolicy",
        SLICING + POLICY,
        NVIDIA,
        {
            "gpus": {"migStrategy": "mixed", "sharing": slices(4), "given": GIVEN},
            "nodes": [
                labelled("tesla-t4", {"migStrategy": "mixed", "sharing": slices(8), "given": GIVEN})
            ],
        },
        [],
    ),
    (
        "the operator's chart",
        OPERATOR_VALUES,
        NVIDIA,
        {
            "gpus": {
                "migStrategy": "single",
                "sharing": slices(2),
                "given": {"deviceSpecs": True},
            }
        },
        ["cdi.enabled: the operator passes GPUs to containers by CDI; set gpus.given.deviceList"],
    ),
    (
        "iktos",
        IKTOS,
        NVIDIA,
        {
            "gpus": {
                "sharing": {
                    "resources": [
                        {
                            "name": "nvidia.com/gpu",
                            "perGb": True,
                            "rename": "nvidia.com/gpu-mem-gb",
                        }
                    ]
                }
            }
        },
        [],
    ),
]


@pytest.mark.parametrize(
    ("text", "peer", "expected", "losses"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_a_published_file_means_the_same_here_or_says_what_is_lost(
    text: str, peer: config_settings.Format, expected: dict[str, Any], losses: list[str]
) -> None:
    imported = files.import_peer(text.encode(), source="FILE", peer=peer)
    printed = msgspec.yaml.encode(imported.rules)
    read = yaml.safe_load(printed)
    assert (read, list(imported.losses)) == ({"apiVersion": "muster.dev/v1", **expected}, losses)
    files.read(printed, source="F", written_for=config_settings.Format.MUSTER)


@pytest.mark.parametrize(
    ("text", "default", "problem"),
    [
        (MPS, "", f"sharing.mps: {nvidia_settings.MPS}"),
        (
            SLICING,
            "",
            (
                "several configurations: any, tesla-t4; name the one for nodes without the label "
                "nvidia.com/device-plugin.config with `muster config import --default`, "
                "or call it `default`"
            ),
        ),
        (SLICING, "all", "all: no such configuration; available: any, tesla-t4"),
        (SLICING.replace("tesla-t4", "tesla-*"), "any", "tesla-*: no label can have this value"),
        (SLICING + "---" + SLICING, "any", "any: two configurations have this name"),
        (
            SLICING.replace("mixed", "none").replace("replicas: 8", "replicas: 1"),
            "any",
            (
                "tesla-t4: sharing.timeSlicing.resources[0].replicas: "
                "number of replicas must be >= 2, and for muster <= 1000"
            ),
        ),
    ],
)
def test_a_published_file_that_would_mean_something_else_is_refused(
    text: str, default: str, problem: str
) -> None:
    with pytest.raises(settings.BadSettings) as refused:
        files.import_peer(text.encode(), source="FILE", peer=NVIDIA, default=default)
    assert f"FILE: {problem}" in refused.value.problems


def test_each_node_gets_the_configuration_that_its_label_names() -> None:
    rules = files.import_peer(SLICING.encode(), source="FILE", peer=NVIDIA, default="any").rules
    replicas = {
        label: rules.for_node("a", {nvidia_nodes.LABEL: label} if label else {})
        .gpus.sharing.resources[0]  # type: ignore[union-attr]  # both share
        .replicas
        for label in ("", "any", "tesla-t4", "unknown")
    }
    assert replicas == {"": 4, "any": 4, "tesla-t4": 8, "unknown": 4}


def test_what_only_one_of_several_configurations_does_is_said_with_its_name() -> None:
    text = SLICING.replace("replicas: 8", "replicas: 8, rename: t4")
    imported = files.import_peer(text.encode(), source="FILE", peer=NVIDIA, default="any")
    general = nvidia.read({}).differences
    assert [line for line in imported.differences if line not in general][2:] == [
        (
            "tesla-t4: sharing.timeSlicing.resources[0].rename: "
            "NVIDIA drops it with a warning; with muster it works"
        )
    ]


def test_what_a_chart_ignores_is_said() -> None:
    imported = files.import_peer(NVIDIA_VALUES.encode(), source="FILE", peer=NVIDIA)
    assert imported.differences[:2] == (
        "failOnInitError: 'false' is not true or false; NVIDIA's chart ignores it",
        "nodeSelector: belongs in the values of muster's chart",
    )


# muster in place of NVIDIA's plugin: the variables of the process


def test_the_variables_of_the_process_take_precedence_over_the_file() -> None:
    variables = {"MIG_STRATEGY": "mixed", "PASS_DEVICE_SPECS": "true", "GFD_ONESHOT": "true"}
    variables |= {"NVIDIA_VISIBLE_DEVICES": "0", "KUBELET_SOCKET": "", "HOME": "/"}
    imported = files.import_peer(
        b"{version: v1, flags: {migStrategy: none, gdsEnabled: true}}",
        source="FILE",
        peer=NVIDIA,
        environment=variables,
    )
    assert msgspec.to_builtins(imported.rules.gpus) == {
        "migStrategy": "mixed",
        "given": {"deviceSpecs": True, "gds": True},
    }


def test_a_variable_that_cannot_be_honoured_is_refused_in_one_line() -> None:
    variables = {
        "CONFIG_FILE": "/config/config.yaml",
        "DEVICE_DISCOVERY_STRATEGY": "tegra",
        "CONTAINER_DRIVER_ROOT": "/driver-root",
        "MIG_STRATEGY": "mixed",
    }
    with pytest.raises(settings.BadSettings) as refused:
        files.import_peer(b"{}", source="FILE", peer=NVIDIA, environment=variables)
    assert refused.value.problems == [
        (
            "DEVICE_DISCOVERY_STRATEGY: 'tegra' is not supported; muster finds GPUs through NVML "
            "only; it finds neither Tegra nor VFIO devices"
        ),
        "CONFIG_FILE: '/config/config.yaml' is not supported; pass this file with --config",
    ]


@pytest.mark.parametrize("setting", nvidia_settings.EVERY, ids=lambda s: s.ours or s.key or s.flags)
def test_every_variable_of_nvidia_is_honoured_reported_or_refused(
    setting: nvidia_settings.Setting,
) -> None:
    for name in setting.variables:
        variables, refused = nvidia.of_process({name: "x"})
        is_read = not name.startswith("GFD_") and name != "NVIDIA_VISIBLE_DEVICES"
        assert len(variables) + len(refused) == int(is_read)


def test_other_plugins_read_no_variables_of_nvidia() -> None:
    variables = {"MIG_STRATEGY": "wrong", "DEVICE_DISCOVERY_STRATEGY": "tegra"}
    text = b"- {devicematch: ^fuse$, nummaxdevices: 2}"
    imported = files.import_peer(text, source="F", peer=SMARTER, environment=variables)
    assert len(imported.rules.resources) == 1
