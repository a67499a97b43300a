"""Pure: the label schemes by which others name accelerators.

SkyPilot reads one scheme for a whole cluster, the first of these (in this order) whose first value
is valid (sky/provision/kubernetes/utils.py, _GPULabelFormatterSelector); those behind Nebius are
read by us alone.
"""

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from muster_labeler import model
from muster_labeler.naming import accelerators
from muster_labeler.naming.accelerators import Name, Reason

SKYPILOT: Final = "skypilot.co/accelerator"
MUSTER: Final = "muster.dev/accelerator"
COUNT: Final = "muster.dev/accelerator-count"
MEMORY: Final = "muster.dev/accelerator-memory-mib"
GFD_PRODUCT: Final = "nvidia.com/gpu.product"

AUTOSCALER_KEYS: Final = frozenset(
    {
        "accelerator",
        "aliyun.accelerator/nvidia_name",
        "baidu/nvidia_name",
        "bke.bizflycloud.vn/gpu-node",
        "cherryservers.com/gpu",
        "civo.com/gpu-node",
        "cloud.brightbox.com/gpu-node",
        "cloud.digitalocean.com/gpu-node",
        "cloud.google.com/gke-accelerator",
        "cloud.tencent.com/tke-accelerator",
        "cluster-api/accelerator",
        "hcloud/gpu-node",
        "k8s.amazonaws.com/accelerator",
        "k8s.scw.cloud/gpu",
        "kubernetes.azure.com/accelerator",
        "magnum.openstack.org/gpu",
        "node.kubernetes.ovhcloud.com/gpu",
    }
)
"""Keys by which the Cluster Autoscaler treats a node without GPUs as unready: never written here
(each provider's GPULabel, kubernetes/autoscaler 55c37cd)."""

_GKE: Final = {"h100-80gb": "h100", "h200-141gb": "h200", "h100-mega-80gb": "h100-mega"}
_GKE_STRIPPED: Final = ("nvidia-tesla-", "nvidia-")
_AMBIGUOUS: Final = frozenset({"rtx6000"})
"""Nebius means an RTX PRO 6000, everybody else an RTX 6000."""
_MIB: Final = re.compile(r"[0-9]{1,9}")
_MIB_PER_GIB: Final = 1024
OWNED: Final = frozenset({SKYPILOT, MUSTER, GFD_PRODUCT, COUNT, MEMORY})
"""Labels whose owners matter: those that we may write."""


class Fault(enum.StrEnum):
    """Why a label value is unusable; one may disable its scheme for a whole cluster."""

    EMPTY = "empty"
    NOT_LOWER_CASE = "not lower case"
    NOT_UPPER_CASE = "not upper case"
    NOT_A_VALUE = "not a label value"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A label scheme; `read` returns the accelerator name that a value stands for."""

    id: str
    key: str
    read: Callable[[str, int | None], Name]
    memory_key: str = ""
    memory_unit_mib: int = 1
    case: Callable[[str], str] | None = None
    is_skypilots: bool = False
    may_be_empty: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """The accelerator name that one label of a node stands for."""

    scheme: Scheme
    value: str
    name: Name
    fault: Fault | None = None


def read(labels: Mapping[str, str]) -> list[Reading]:
    """Return the accelerator names in each scheme's labels of a node, in SkyPilot's order."""
    readings = []
    for scheme in SCHEMES:
        value = labels.get(scheme.key)
        if value is None or (value == "" and scheme.may_be_empty):
            continue
        fault = _fault(scheme, value)
        name = Name(None, Reason.NO_NAME) if fault else scheme.read(value, _memory(scheme, labels))
        if name.value is not None and not accelerators.is_name(name.value):
            name = Name(None, Reason.NOT_A_NAME)
        readings.append(Reading(scheme, value, name, fault))
    return readings


def _fault(scheme: Scheme, value: str) -> Fault | None:
    if not value:
        return Fault.EMPTY
    if not accelerators.is_name(value.lower()):
        return Fault.NOT_A_VALUE
    if scheme.case is not None and scheme.case(value) != value:
        return Fault.NOT_LOWER_CASE if scheme.case is str.lower else Fault.NOT_UPPER_CASE
    return None


def _memory(scheme: Scheme, labels: Mapping[str, str]) -> int | None:
    match = _MIB.fullmatch(labels.get(scheme.memory_key, ""))
    return int(match[0]) * scheme.memory_unit_mib or None if match else None


def _vendor_name(value: str, memory_mib: int | None) -> Name:
    """Return a vendor's own name, with the memory where the name alone is ambiguous."""
    name = accelerators.name(value, memory_mib)
    is_known = name.reason in {Reason.EXACT, Reason.MEMORY_UNKNOWN}
    return name if is_known else Name(value.lower(), Reason.EXACT)


def _lower_case(value: str, _: int | None) -> Name:
    return Name(value.lower(), Reason.EXACT)


def _gke(value: str, _: int | None) -> Name:
    text = value.lower()
    for prefix in _GKE_STRIPPED:
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            return Name(_GKE.get(text, text), Reason.EXACT)
    return Name(None, Reason.NO_MODEL)


def _nebius(value: str, _: int | None) -> Name:
    text = value.lower()
    return Name(text, Reason.MEMORY_UNKNOWN if text in _AMBIGUOUS else Reason.EXACT)


SCHEMES: Final = (
    Scheme("skypilot", SKYPILOT, _lower_case, case=str.lower, is_skypilots=True),
    Scheme("gke", "cloud.google.com/gke-accelerator", _gke, is_skypilots=True, may_be_empty=True),
    Scheme(
        "karpenter",
        "karpenter.k8s.aws/instance-gpu-name",
        _vendor_name,
        memory_key="karpenter.k8s.aws/instance-gpu-memory",
        case=str.lower,
        is_skypilots=True,
    ),
    Scheme("gfd", GFD_PRODUCT, accelerators.name, "nvidia.com/gpu.memory", is_skypilots=True),
    Scheme(
        "coreweave",
        "gpu.nvidia.com/class",
        accelerators.name,
        memory_key="gpu.nvidia.com/vram",
        memory_unit_mib=_MIB_PER_GIB,
        is_skypilots=True,
        may_be_empty=True,
    ),
    Scheme("nebius", "nebius.com/gpu-name", _nebius, case=str.upper, is_skypilots=True),
    Scheme("muster", MUSTER, _lower_case, case=str.lower),
    Scheme(
        "eks-auto",
        "eks.amazonaws.com/instance-gpu-name",
        _vendor_name,
        memory_key="eks.amazonaws.com/instance-gpu-memory",
    ),
    Scheme("eks", "k8s.amazonaws.com/accelerator", _gke),
    Scheme("karpenter-azure", "karpenter.azure.com/sku-gpu-name", _vendor_name),
    Scheme("digitalocean", "doks.digitalocean.com/gpu-model", _vendor_name),
    Scheme("amd", "amd.com/gpu.product-name", accelerators.name),
    Scheme("amd-beta", "beta.amd.com/gpu.product-name", accelerators.name),
    Scheme("intel", "gpu.intel.com/product", accelerators.name),
)

KEYS: Final = (
    frozenset(scheme.key for scheme in SCHEMES)
    | frozenset(scheme.memory_key for scheme in SCHEMES if scheme.memory_key)
    | AUTOSCALER_KEYS
    | {COUNT, MEMORY, model.VGPU_LABEL}
)
"""All labels of a node that matter here."""
