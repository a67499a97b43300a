"""Pure: derives the node labels of NVIDIA's GPU feature discovery, for GPUs and MIG profiles.

Keys and values are those of NVIDIA/k8s-device-plugin 1b826ac, internal/lm, so that selectors that
use them keep working. Two differences are intended. An unknown value is left out without affecting
other labels. On a node with several models, NVIDIA's choice is random, while muster prefers whole
GPUs to partitioned ones, then the most numerous model, then the first by name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from muster import vocabulary

DOMAIN: Final = "nvidia.com"

_VALUE_MAX: Final = 63
_ENDS: Final = "-_."
"""Characters allowed in a label value, but not at its ends (apimachinery IsValidLabelValue)."""
_NOT_KEPT = re.compile(r"[^A-Za-z0-9\-_. ]")
PROFILE: Final = "([0-9]{1,2}c[.])?[0-9]{1,2}g[.][0-9]{1,5}gb([.-][a-z]{1,8}){0,3}"
"""A MIG profile in a key: at most 42 characters, so that no name in a key exceeds 63."""
_PROFILE = re.compile(PROFILE)
_DRIVER = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_PAIR = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})")
_CLIQUE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,61}[A-Za-z0-9]")

_MODES: Final[Mapping[str, str]] = {"0x0300": "graphics", "0x0302": "compute"}
"""The mode by PCI base class and subclass: VGA controllers, and 3D controllers of data centres."""

_FAMILIES: Final = (
    ((1, 0), "tesla"),
    ((2, 0), "fermi"),
    ((3, 0), "kepler"),
    ((5, 0), "maxwell"),
    ((6, 0), "pascal"),
    ((7, 0), "volta"),
    ((7, 5), "turing"),
    ((8, 0), "ampere"),
    ((8, 9), "ada-lovelace"),
    ((9, 0), "hopper"),
    ((10, 0), "blackwell"),
    ((12, 0), "blackwell"),
    ((13, 0), "rubin"),
)
"""Each architecture's lowest compute capability in each major version (internal/lm/resource.go)."""


@dataclass(frozen=True, slots=True)
class _Share:
    """How many replicas each device of a resource has, and whether the resource is renamed."""

    replicas: int
    is_renamed: bool = False


_UNSHARED: Final = _Share(1)
_IN_PARTS: Final = _Share(0)
"""A GPU in MIG mode is not allocated as a whole; only its parts are."""


def labels(node: vocabulary.GpuNode) -> dict[str, str]:
    """Return the labels of a node, sorted by key; empty if there is no GPU.

    The Kubernetes API accepts all of them. NVIDIA's `gfd.timestamp`, the time when GFD started, is
    left out.
    """
    if not node.gpus:
        return {}
    gpus = sorted(node.gpus, key=lambda gpu: gpu.uuid)
    shares = _shares(node.resources)
    named = _of_node(node.machine, gpus) | _of_versions(node)
    named |= _of_gpus(gpus, shares, is_single=node.mig_strategy == "single")
    if node.mig_strategy in {"single", "mixed"}:
        named["mig.strategy"] = node.mig_strategy
    if node.mig_strategy == "mixed":
        named |= _of_profiles(gpus, shares)
    return {f"{DOMAIN}/{key}": value for key, value in sorted(named.items())}


def sanitised(text: str) -> str:
    """Return a name as NVIDIA writes it: `-` replaces spaces, unusual characters are removed."""
    return "-".join(_NOT_KEPT.sub("", text).split())


def _of_node(machine: str | None, gpus: Sequence[vocabulary.Gpu]) -> dict[str, str]:
    modes = {_MODES.get((gpu.pci_class or "")[:6].lower(), "unknown") for gpu in gpus}
    labels = {
        "gpu.machine": _value(sanitised((machine or "").strip())) or "unknown",
        "gpu.mode": modes.pop() if len(modes) == 1 else "unknown",
        "mig.capable": _flag(any(gpu.mig_enabled is not None or gpu.mig for gpu in gpus)),
        "mps.capable": "false",
    }
    virtual = {gpu.vgpu for gpu in gpus}
    if True in virtual or virtual == {False}:
        labels["vgpu.present"] = _flag(True in virtual)
    cliques = {gpu.clique for gpu in gpus if gpu.clique}
    if len(cliques) == 1 and _CLIQUE.fullmatch(clique := cliques.pop()):
        # a shortened name could be the name of another clique
        labels["gpu.clique"] = clique
    return labels


def _of_versions(node: vocabulary.GpuNode) -> dict[str, str]:
    """Return the versions under NVIDIA's current keys, and under its older keys."""
    labels = {}
    driver = _DRIVER.fullmatch(node.driver_version or "")
    if driver is not None:
        major, minor, revision = driver.group(1), driver.group(2), driver.group(3) or ""
        labels["cuda.driver-version.full"] = driver.group()
        labels["cuda.driver-version.major"] = labels["cuda.driver.major"] = major
        labels["cuda.driver-version.minor"] = labels["cuda.driver.minor"] = minor
        labels["cuda.driver-version.revision"] = labels["cuda.driver.rev"] = revision
    cuda = _PAIR.fullmatch(node.cuda_version or "")
    if cuda is not None:
        labels["cuda.runtime-version.full"] = cuda.group()
        labels["cuda.runtime-version.major"] = labels["cuda.runtime.major"] = cuda.group(1)
        labels["cuda.runtime-version.minor"] = labels["cuda.runtime.minor"] = cuda.group(2)
    return labels


def _of_gpus(
    gpus: Sequence[vocabulary.Gpu],
    shares: Mapping[str, _Share],
    *,
    is_single: bool,
) -> dict[str, str]:
    """Return the labels for `gpu`: of whole GPUs, or of the MIG devices that replace them."""
    whole = {gpu.product for gpu in gpus if not _is_mig(gpu)}
    model = _model((gpu.product for gpu in gpus), first=whole)
    alike = [gpu for gpu in gpus if gpu.product == model]
    labels = _of_architecture(alike)
    if is_single and any(_is_mig(gpu) for gpu in gpus):
        return labels | _of_single(gpus, shares)
    share = shares.get("", _UNSHARED) if model in whole else _IN_PARTS
    labels |= _of_resource("gpu", (model,), count=len(alike), share=share)
    memory_mib = next((gpu.memory_mib for gpu in alike if gpu.memory_mib), None)
    if memory_mib is not None:
        labels["gpu.memory"] = str(memory_mib)
    return labels


def _of_single(gpus: Sequence[vocabulary.Gpu], shares: Mapping[str, _Share]) -> dict[str, str]:
    """Return the labels `gpu.*` for MIG devices that the plugin advertises as `gpu`.

    Unless all GPUs are divided into MIG devices of one profile, the product is MIG-INVALID and
    the count 0, as in NVIDIA's GPU feature discovery.
    """
    profiles = _profiles(gpus)
    if len(profiles) == 1 and all(gpu.mig for gpu in gpus):
        ((profile, devices),) = profiles.items()
        return _of_profile("gpu", profile, devices, shares.get(profile, _UNSHARED))
    model = _model(gpu.product for gpu in gpus if _is_mig(gpu))
    invalid = _of_resource("gpu", (model, "MIG", "INVALID"), count=0, share=_Share(0))
    return invalid | {"gpu.memory": "0", "gpu.sharing-strategy": ""}


def _of_profiles(gpus: Iterable[vocabulary.Gpu], shares: Mapping[str, _Share]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for profile, devices in _profiles(gpus).items():
        if _PROFILE.fullmatch(profile):
            labels |= _of_profile(
                f"mig-{profile}", profile, devices, shares.get(profile, _UNSHARED)
            )
    return labels


def _of_profile(
    key: str, profile: str, devices: Sequence[tuple[str, vocabulary.MigDevice]], share: _Share
) -> dict[str, str]:
    """Return the labels of MIG devices of one profile, from their GPUs' products."""
    model = _model(product for product, _ in devices)
    mig = next(mig for product, mig in devices if product == model)
    measured = {
        "memory": mig.memory_mib,
        "multiprocessors": mig.multiprocessors,
        "slices.gi": mig.gi_slices,
        "slices.ci": mig.ci_slices,
        "engines.copy": mig.copy_engines,
        "engines.decoder": mig.decoders,
        "engines.encoder": mig.encoders,
        "engines.jpeg": mig.jpeg_engines,
        "engines.ofa": mig.ofa_engines,
    }
    labels = _of_resource(key, (model, "MIG", profile), count=len(devices), share=share)
    return labels | {f"{key}.{name}": str(n) for name, n in measured.items() if n is not None}


def _of_resource(
    key: str, product: tuple[str, ...], *, count: int, share: _Share
) -> dict[str, str]:
    is_shared = share.replicas > 1
    marked = (*product, "SHARED") if is_shared and not share.is_renamed else product
    labels = {
        f"{key}.count": str(count),
        f"{key}.replicas": str(share.replicas),
        f"{key}.sharing-strategy": "time-slicing" if is_shared else "none",
    }
    value = _product(*marked)
    return labels | {f"{key}.product": value} if value else labels


def _of_architecture(gpus: Iterable[vocabulary.Gpu]) -> dict[str, str]:
    matches = (_PAIR.fullmatch(gpu.compute_capability or "") for gpu in gpus)
    capability = next((match for match in matches if match is not None), None)
    if capability is None or int(capability.group(1)) == 0:
        return {}
    major, minor = int(capability.group(1)), int(capability.group(2))
    since = (row for row in _FAMILIES if (major, 0) <= row[0] <= (major, minor))
    family = max(since, default=((major, 0), "undefined"))
    return {
        "gpu.family": family[1],
        "gpu.compute.major": str(major),
        "gpu.compute.minor": str(minor),
    }


def _product(model: str, *more: str) -> str:
    """Return the value of a product label, empty for a GPU without a name.

    The words after the model show that this is not a whole GPU, so in a long value the model is
    shortened.
    """
    name = sanitised(model).strip(_ENDS)
    if not name:
        return ""
    end = "".join(f"-{sanitised(part)}" for part in more)
    return _value(name[: max(_VALUE_MAX - len(end), 1)].rstrip(_ENDS) + end)


def _value(text: str) -> str:
    return text.strip(_ENDS)[:_VALUE_MAX].rstrip(_ENDS)


def _model(products: Iterable[str], *, first: Iterable[str] = ()) -> str:
    """Return one product: preferably in `first`, then the most frequent, then the first by name."""
    counts = Counter(products)
    preferred = set(first)
    return min(counts, key=lambda product: (product not in preferred, -counts[product], product))


def _profiles(
    gpus: Iterable[vocabulary.Gpu],
) -> dict[str, list[tuple[str, vocabulary.MigDevice]]]:
    """Return the MIG devices by profile, each with the product of its GPU."""
    profiles: dict[str, list[tuple[str, vocabulary.MigDevice]]] = {}
    for gpu in gpus:
        for mig in sorted(gpu.mig, key=lambda mig: mig.uuid):
            profiles.setdefault(_dotted(mig.profile), []).append((gpu.product, mig))
    return profiles


def _shares(resources: Iterable[vocabulary.GpuResource]) -> dict[str, _Share]:
    """Return how the devices of each profile are shared; the resource with most replicas counts."""
    shares: dict[str, _Share] = {}
    for resource in resources:
        profile = _dotted(resource.profile)
        share = _Share(max(resource.replicas, 1), is_renamed=resource.name != resource.was)
        shares[profile] = max(shares.get(profile, share), share, key=_order)
    return shares


def _order(share: _Share) -> tuple[int, bool]:
    return share.replicas, share.is_renamed


def _dotted(profile: str) -> str:
    """Return a profile as written in a resource name: `1g.5gb+me` becomes `1g.5gb.me`."""
    return profile.replace("+", ".")


def _is_mig(gpu: vocabulary.Gpu) -> bool:
    return bool(gpu.mig_enabled or gpu.mig)


def _flag(flag: bool) -> str:  # noqa: FBT001 -- it is the value itself
    return "true" if flag else "false"
