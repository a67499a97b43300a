"""Pure: derives accelerator names from product strings and from other vendors' labels.

Whole words are compared, never parts of them: `RTX A4000` is not an A40, and an A100 with 80 GB is
an `a100-80gb`. Names are SkyPilot's (sky/utils/gpu_names.py), so that labels match requests.

SkyPilot reads one label scheme for a whole cluster: the first in `SCHEMES` whose first value is
valid (sky/provision/kubernetes/utils.py, _GPULabelFormatterSelector). Only muster reads the schemes
after Nebius.
"""

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from muster_labeler import model

_NAME = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?")
"""A label value (apimachinery validation.IsValidLabelValue), in lower case, not empty."""

_ERROR_TEXTS: Final = ("failed", "error", "no devices")
_PLACEHOLDERS: Final = frozenset({"[n/a]", "n/a", "err!", "[err!]", "[unknown]", "[not supported]"})
"""The texts that nvidia-smi prints for an unknown value."""
_MIG = re.compile(r"\d+g\.\d+gb")
_VGPU = re.compile(r"\d+[cqab]")
_MEMORY = re.compile(r"(\d+)gb?")
_MEMORY_WORD = re.compile(r"\d+gb")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILLERS: Final = _set(
    "nvidia tesla quadro geforce grid amd instinct radeon intel datacenter data center gpu graphics"
)
_WORKSTATION: Final = _set("a6000 a5500 a5000 a4500 a4000")
_WORKSTATION_LIKE = re.compile(r"a\d{4}")
_AMD: Final = _set("mi355x mi350x mi325x mi300x mi300a mi250x mi250 mi210 mi100")
_CANONICAL: Final = _AMD | _set(
    "gb300 gb200 b300 b200 b100 gh200 h200 h20 h800 h100 a100 a800 a100x a10g a10m a10 a16 a2 a30x "
    "a30 a40 l40s l40g l40 l20 l4 a6000 a5500 a5000 a4500 a4000 v100 v100s p100 p40 p4000 p4 t4g "
    "t4 k80 m60 gb10"
)
_ALSO_QUADRO: Final = _AMD | {"p4000"}
_MIB_PER_GB: Final = 1024
_H100_NVL_MIB_MIN: Final = 90_112
_LARGE: Final = {"a100": (61_440, "a100-80gb"), "v100": (24_576, "v100-32gb")}
_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})


class Reason(enum.StrEnum):
    """How certain a name is, or why there is none."""

    EXACT = "exact"
    ALIAS = "alias"
    MEMORY_UNKNOWN = "memory-unknown"
    FALLBACK = "fallback"
    MIXED = "mixed"
    MIG = "mig"
    VGPU = "vgpu"
    NO_NAME = "no-name"
    NOT_A_NAME = "not-a-name"
    NO_MODEL = "no-model"


@dataclass(frozen=True, slots=True)
class Name:
    """A label value or None, with the reason; `is_shared` if the product is a shared GPU."""

    value: str | None
    reason: Reason
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """A product: the words of its model, whether it is a Quadro, and its memory.

    `memory_mib` is the measured size, or else that in the product string; None if both are missing.
    """

    core: tuple[str, ...]
    is_quadro: bool
    memory_mib: int | None


def is_name(value: str) -> bool:
    """Return whether `value` can be the value of an accelerator label."""
    return _NAME.fullmatch(value) is not None


def name(
    product: str,
    memory_mib: int | None = None,
    *,
    is_mig: bool = False,
    is_vgpu: bool = False,
    aliases: Mapping[str, str] = _NO_ALIASES,
) -> Name:
    """Return the accelerator name of a product string from NVML, nvidia-smi, GFD or DRA.

    `memory_mib` is measured and takes precedence over the string. `aliases` are reviewed by people
    and take precedence over guesses, but never name products that must not have a name (partitions,
    errors).
    """
    text = product.strip().lower()
    words = _words(text)
    is_shared = "shared" in words
    core = tuple(word for word in words if word not in _FILLERS and word != "shared")
    refusal = _refusal(text, words, core, is_mig=is_mig, is_vgpu=is_vgpu)
    if refusal is not None:
        return Name(None, refusal, is_shared)
    value, reason = _alias(words, aliases), Reason.ALIAS
    if value is None:
        memory = memory_mib if memory_mib and memory_mib > 0 else _memory_in(words)
        value, reason = _model(_Words(core=core, is_quadro="quadro" in words, memory_mib=memory))
    if value is not None and not is_name(value):
        return Name(None, Reason.NOT_A_NAME, is_shared)
    return Name(value, reason, is_shared)


def of_node(names: Iterable[Name]) -> Name:
    """Return the name that all GPUs of a node share, with the least certain reason.

    Without a shared name, the value is None: MIXED if names differ, NO_NAME without GPUs.
    """
    distinct = list(dict.fromkeys(names))
    if len({name.value for name in distinct}) > 1:
        return Name(None, Reason.MIXED)
    if not distinct:
        return Name(None, Reason.NO_NAME)
    return max(distinct, key=lambda name: tuple(Reason).index(name.reason))


def _refusal(
    text: str, words: Sequence[str], core: Sequence[str], *, is_mig: bool, is_vgpu: bool
) -> Reason | None:
    """Return why the product must not get a name, even by an alias; None if it may."""
    if not text:
        return Reason.NO_NAME
    if text in _PLACEHOLDERS or any(word in text for word in _ERROR_TEXTS):
        return Reason.NOT_A_NAME
    if is_mig or any(word == "mig" or _MIG.fullmatch(word) for word in words):
        return Reason.MIG
    if is_vgpu or text.startswith("grid") or any(_VGPU.fullmatch(word) for word in words):
        return Reason.VGPU
    return None if core else Reason.NO_MODEL


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9.]+", text) if word]


def _alias(words: Sequence[str], aliases: Mapping[str, str]) -> str | None:
    """Return the alias of a product, or None; only words count, not the separators between them."""
    return next((aliases[product] for product in aliases if _words(product.lower()) == words), None)


def _model(words: _Words) -> tuple[str | None, Reason]:
    first = words.core[0]
    if first == "rtx":
        return _rtx(words)
    if first == "h100":
        is_nvl = "nvl" in words.core or (words.memory_mib or 0) >= _H100_NVL_MIB_MIN
        return ("h100-nvl" if is_nvl else "h100"), Reason.EXACT
    if first in _LARGE:
        least_mib, large = _LARGE[first]
        if words.memory_mib is None:
            return first, Reason.MEMORY_UNKNOWN
        return (large if words.memory_mib >= least_mib else first), Reason.EXACT
    if first in _CANONICAL and (not words.is_quadro or first in _ALSO_QUADRO):
        return first, Reason.EXACT
    return _fallback(words)


def _rtx(words: _Words) -> tuple[str | None, Reason]:
    rest = words.core[1:]
    if not _joined(rest):
        return None, Reason.NO_MODEL
    first = rest[0]
    plain = "rtx" + _joined(rest)
    if first == "pro":
        return (f"rtxpro{rest[1]}", Reason.EXACT) if len(rest) > 1 else _fallback(words)
    if _WORKSTATION_LIKE.fullmatch(first):
        is_named = first in _WORKSTATION and "laptop" not in rest
        return (first, Reason.EXACT) if is_named else (plain, Reason.FALLBACK)
    if "ada" in rest:
        return f"rtx{first}{'-sff' if 'sff' in rest else ''}-ada", Reason.EXACT
    if words.is_quadro:
        return f"quadro-rtx{first}", Reason.FALLBACK
    return plain, Reason.EXACT


def _fallback(words: _Words) -> tuple[str | None, Reason]:
    text = ("quadro-" if words.is_quadro else "") + _joined(words.core)
    cut = re.sub(r"[^a-z0-9_.-]", "-", text)[:63].strip("-_.")
    return (cut, Reason.FALLBACK) if cut else (None, Reason.NO_MODEL)


def _joined(words: Iterable[str]) -> str:
    return "-".join(word for word in words if not _MEMORY_WORD.fullmatch(word))


def _memory_in(words: Iterable[str]) -> int | None:
    memory = next((match for word in words if (match := _MEMORY.fullmatch(word))), None)
    return int(memory.group(1)[:9]) * _MIB_PER_GB if memory else None


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
"""Keys by which the Cluster Autoscaler treats a node without GPUs as unready.

They are each provider's GPULabel (kubernetes/autoscaler 55c37cd). Muster never writes them.
"""

_GKE: Final = {"h100-80gb": "h100", "h200-141gb": "h200", "h100-mega-80gb": "h100-mega"}
_GKE_STRIPPED: Final = ("nvidia-tesla-", "nvidia-")
_AMBIGUOUS: Final = frozenset({"rtx6000"})
"""Ambiguous names: `rtx6000` means an RTX PRO 6000 at Nebius, and an RTX 6000 elsewhere."""
_MIB: Final = re.compile(r"[0-9]{1,9}")
_MIB_PER_GIB: Final = 1024
OWNED: Final = frozenset({SKYPILOT, MUSTER, GFD_PRODUCT, COUNT, MEMORY})
"""Labels whose owners matter, because muster may write them."""


class Fault(enum.StrEnum):
    """Why a label value is unusable; such a value may disable its scheme for a whole cluster."""

    EMPTY = "empty"
    NOT_LOWER_CASE = "not lower case"
    NOT_UPPER_CASE = "not upper case"
    NOT_A_VALUE = "not a label value"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A label scheme; `read` returns the accelerator name that a value denotes."""

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
    """The accelerator name denoted by one label of a node."""

    scheme: Scheme
    value: str
    name: Name
    fault: Fault | None = None


def read_labels(labels: Mapping[str, str]) -> list[Reading]:
    """Return a reading of each scheme's label that a node has, in the order of `SCHEMES`."""
    readings = []
    for scheme in SCHEMES:
        value = labels.get(scheme.key)
        if value is None or (value == "" and scheme.may_be_empty):
            continue
        fault = _fault(scheme, value)
        name = Name(None, Reason.NO_NAME) if fault else scheme.read(value, _memory(scheme, labels))
        if name.value is not None and not is_name(name.value):
            name = Name(None, Reason.NOT_A_NAME)
        readings.append(Reading(scheme, value, name, fault))
    return readings


def _fault(scheme: Scheme, value: str) -> Fault | None:
    if not value:
        return Fault.EMPTY
    if not is_name(value.lower()):
        return Fault.NOT_A_VALUE
    if scheme.case is not None and scheme.case(value) != value:
        return Fault.NOT_LOWER_CASE if scheme.case is str.lower else Fault.NOT_UPPER_CASE
    return None


def _memory(scheme: Scheme, labels: Mapping[str, str]) -> int | None:
    match = _MIB.fullmatch(labels.get(scheme.memory_key, ""))
    return int(match[0]) * scheme.memory_unit_mib or None if match else None


def _vendor_name(value: str, memory_mib: int | None) -> Name:
    """Return the name of a known product in a vendor's label; otherwise the label's own value."""
    vendors = name(value, memory_mib)
    is_known = vendors.reason in {Reason.EXACT, Reason.MEMORY_UNKNOWN}
    return vendors if is_known else Name(value.lower(), Reason.EXACT)


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
    Scheme("gfd", GFD_PRODUCT, name, "nvidia.com/gpu.memory", is_skypilots=True),
    Scheme(
        "coreweave",
        "gpu.nvidia.com/class",
        name,
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
    Scheme("amd", "amd.com/gpu.product-name", name),
    Scheme("amd-beta", "beta.amd.com/gpu.product-name", name),
    Scheme("intel", "gpu.intel.com/product", name),
)

KEYS: Final = (
    frozenset(scheme.key for scheme in SCHEMES)
    | frozenset(scheme.memory_key for scheme in SCHEMES if scheme.memory_key)
    | AUTOSCALER_KEYS
    | {COUNT, MEMORY, model.VGPU_LABEL}
)
"""The keys of all node labels that matter for accelerator names."""
