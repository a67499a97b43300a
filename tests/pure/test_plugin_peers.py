"""The peers' published configurations, from their files to the responses to the kubelet.

smarter-device-manager 1.20: manifests smarter-device-manager-configmap, and the one for fuse alone.
generic-device-plugin 0.1: manifests/generic-device-plugin.yaml, and its README's old flags. Both an
import into a muster file and direct use give what the peers document: names, counts, and device
nodes with their paths and permissions.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster_plugin.config import files, settings
from muster_plugin.discovery import resource_plan, scan_result
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import allocation, protobuf

CHARS: Final = (
    *("fuse", "gpiomem", "gpiochip0", "gpiochip1", "hci0", "i2c-1", "rtc0", "vchiq", "vcsm"),
    *("vcsm-cma", "video0", "video1", "video10", "ttyUSB0", "ttyACM0", "ttyTHS1", "ttyS0"),
    *("rfcomm0", "kvm", "net/tun", "snd/controlC0", "snd/pcmC0D0c", "snd/pcmC0D0p", "snd/timer"),
    *("snd/controlC1", "snd/pcmC1D0c"),
)
SEEN: Final = scan_result.ScanResult(
    nodes=(
        *(
            scan_result.Node(path=f"/dev/{name}", kind=scan_result.Kind.CHAR, major=1, minor=at)
            for at, name in enumerate(CHARS)
        ),
        *(
            scan_result.Node(path=f"/dev/{name}", kind=scan_result.Kind.DIRECTORY)
            for name in ("net", "snd")
        ),
    )
)
AT: Final = datetime(2026, 11, 1, tzinfo=UTC)

Given = list[tuple[str, str, str]]
"""What one container is given: path on the host, path in the container, permissions."""
Used = Callable[[str, settings.Format], settings.Settings]

SMARTER: Final = """
- {devicematch: ^snd$, nummaxdevices: 20}
- {devicematch: ^gpiomem$, nummaxdevices: 40}
- {devicematch: "^gpiochip[0-9]*$", nummaxdevices: 20}
- {devicematch: "^hci[0-9]*$", nummaxdevices: 1}
- {devicematch: "^i2c-[0-9]*$", nummaxdevices: 1}
- {devicematch: ^rtc0$, nummaxdevices: 20}
- {devicematch: "^video[0-9]*$", nummaxdevices: 20}
- {devicematch: ^vchiq$, nummaxdevices: 20}
- {devicematch: ^vcsm.*$, nummaxdevices: 20}
- {devicematch: "^ttyUSB[0-9]*$", nummaxdevices: 1}
- {devicematch: "^ttyACM[0-9]*$", nummaxdevices: 1}
- {devicematch: "^ttyTHS[0-9]*$", nummaxdevices: 1}
- {devicematch: "^ttyS[0-9]*$", nummaxdevices: 1}
- {devicematch: nvidia-gpu, nummaxdevices: 10}
"""
GENERIC: Final = """
devices:
  - name: serial
    groups:
      - paths: [{path: /dev/ttyUSB*}]
      - paths: [{path: /dev/ttyACM*}]
      - paths: [{path: /dev/tty.usb*}]
      - paths: [{path: /dev/cu.*}]
      - paths: [{path: /dev/cuaU*}]
      - paths: [{path: /dev/rfcomm*}]
  - name: video
    groups: [{paths: [{path: /dev/video0}]}]
  - name: fuse
    groups: [{count: 10, paths: [{path: /dev/fuse}]}]
  - name: audio
    groups: [{count: 10, paths: [{path: /dev/snd}]}]
  - name: capture
    groups:
      - paths: [{path: /dev/snd/controlC0}, {path: /dev/snd/pcmC0D0c}]
      - paths:
          - {path: /dev/snd/controlC1, mountPath: /dev/snd/controlC0}
          - {path: /dev/snd/pcmC1D0c, mountPath: /dev/snd/pcmC0D0c}
      - paths:
          - {path: /dev/snd/controlC2, mountPath: /dev/snd/controlC0}
          - {path: /dev/snd/pcmC2D0c, mountPath: /dev/snd/pcmC0D0c}
"""
FLAGS: Final = """
apiVersion: apps/v1
kind: DaemonSet
spec:
  template:
    spec:
      containers:
        - name: generic-device-plugin
          args:
            - --domain=devic.es
            - --device
            - serial,/dev/ttyUSB*,/dev/ttyACM*,/dev/tty.usb*,/dev/cu.*,/dev/cuaU*,/dev/rfcomm*
            - --device
            - video,/dev/video0
"""


def each(*names: str, count: int = 1) -> dict[str, tuple[int, list[Given]]]:
    """Return what smarter allocates: a resource for each match, with `count` ids of one node."""
    return {
        f"smarter-devices/{name.replace('/', '_')}": (
            count,
            [[(f"/dev/{name}", f"/dev/{name}", "rw")]],
        )
        for name in names
    }


def plain(*names: str) -> list[Given]:
    return [[(f"/dev/{name}", f"/dev/{name}", "mrw")] for name in names]


CASES: Final[Mapping[str, tuple[str, str, dict[str, tuple[int, list[Given]]]]]] = {
    "smarter's conf.yaml": (
        "smarter",
        SMARTER,
        each("snd", "gpiochip0", "gpiochip1", "rtc0", "vchiq", "vcsm", "vcsm-cma", count=20)
        | each("video0", "video1", "video10", count=20)
        | each("gpiomem", count=40)
        | each("hci0", "i2c-1", "ttyUSB0", "ttyACM0", "ttyTHS1", "ttyS0"),
    ),
    "smarter's for fuse": (
        "smarter",
        "[{devicematch: ^fuse$, nummaxdevices: 20}]",
        each("fuse", count=20),
    ),
    "smarter's below a directory": (
        "smarter",
        "[{devicematch: ^net/tun$, nummaxdevices: 2}]",
        each("net/tun", count=2),
    ),
    "generic's manifest": (
        "generic",
        GENERIC,
        {
            "squat.ai/serial": (3, plain("rfcomm0", "ttyACM0", "ttyUSB0")),
            "squat.ai/video": (1, plain("video0")),
            "squat.ai/fuse": (10, plain("fuse")),
            "squat.ai/audio": (10, plain("snd")),
            "squat.ai/capture": (
                2,
                [
                    [
                        (f"/dev/snd/controlC{card}", "/dev/snd/controlC0", "mrw"),
                        (f"/dev/snd/pcmC{card}D0c", "/dev/snd/pcmC0D0c", "mrw"),
                    ]
                    for card in (0, 1)
                ],
            ),
        },
    ),
    "generic's flags before 0.1": (
        "generic",
        FLAGS,
        {
            "devic.es/serial": (3, plain("rfcomm0", "ttyACM0", "ttyUSB0")),
            "devic.es/video": (1, plain("video0")),
        },
    ),
}


def imported(text: str, peer: settings.Format) -> settings.Settings:
    """Import a configuration, and read back its printed form."""
    made = files.import_peer(text.encode(), source="FILE", peer=peer).rules
    printed = msgspec.yaml.encode(made)
    return files.read(printed, source="-", written_for=settings.Format.MUSTER)


def direct(text: str, peer: settings.Format) -> settings.Settings:
    return files.read(text.encode(), source="FILE", written_for=peer)


def answered(settings: settings.Settings) -> dict[str, tuple[int, list[Given]]]:
    """Return the number of ids of each resource, and the different allocations that they give."""
    plan = resource_plan.plan(settings.at("node-a").resources, SEEN)
    assert plan.problems == ()
    devices = inventory.Inventory(node="node-a", plugin="p")
    devices.observe(plan, settings.resources, now=0.0, at=AT)
    allocated = {}
    for resource in devices.resources:
        advertised = protobuf.device_list(devices.devices(resource))
        assert {device.health for device in advertised.devices} == {"Healthy"}
        requests = [
            dp.ContainerAllocateRequest(devices_ids=[device.ID]) for device in advertised.devices
        ]
        asked = protobuf.requested(dp.AllocateRequest(container_requests=requests))
        answers = protobuf.allocated(allocation.Allocator(devices, resource).allocate(asked))
        given = [
            tuple(
                (item.host_path, item.container_path, item.permissions) for item in answer.devices
            )
            for answer in answers.container_responses
        ]
        allocated[resource] = len(advertised.devices), [list(item) for item in sorted({*given})]
    return allocated


@pytest.mark.parametrize("used", [imported, direct])
@pytest.mark.parametrize(("peer", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_a_peers_published_configuration_gives_pods_what_the_peer_says(
    used: Used, peer: str, text: str, expected: dict[str, tuple[int, list[Given]]]
) -> None:
    assert answered(used(text, settings.Format(peer))) == expected
