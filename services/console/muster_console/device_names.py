"""Pure: short names of devices.

The id of a GPU is 40 characters long, which is too long for a list. A GPU is therefore shown by its
index on the node, and the ids of GPUs and MIG devices in texts are cut after their first group. The
page has the whole id in a tooltip, in the address of the device's page, and in the JSON of events.
"""

import re
from collections.abc import Mapping
from typing import Final

from muster import vocabulary

_UUID: Final = re.compile(
    r"\b((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE
)


def shortened(text: str) -> str:
    """Return a text in which the ids of GPUs and MIG devices are cut after their first group."""
    return _UUID.sub("\\1\N{HORIZONTAL ELLIPSIS}", text)


def label(device: vocabulary.Device, gpu: vocabulary.Gpu | None) -> str:
    """Return a device's short name: its GPU's index and MIG profile, or else its shortened id."""
    if gpu is None or gpu.index is None:
        return shortened(device.id)
    mig = next((each for each in gpu.mig if each.uuid == device.physical), None)
    name = f"GPU {gpu.index}"
    return f"{name} MIG {mig.profile}" if mig else name


def by_uuid(node: vocabulary.GpuNode | None) -> Mapping[str, vocabulary.Gpu]:
    """Return the GPUs of an inventory by their UUIDs, and by the UUIDs of their MIG devices."""
    gpus: dict[str, vocabulary.Gpu] = {}
    for gpu in node.gpus if node else ():
        gpus[gpu.uuid] = gpu
        gpus |= {mig.uuid: gpu for mig in gpu.mig}
    return gpus


def described(gpu: vocabulary.Gpu | None) -> str:
    """Return the product and the PCI address of a GPU; empty if the GPU is unknown."""
    return ", ".join(filter(None, (gpu.product, gpu.pci_bus_id))) if gpu else ""
