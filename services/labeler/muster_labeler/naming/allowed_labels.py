"""Pure: every label that muster may write; the generated admission policy refuses all others.

`scripts/manifests.py` writes these labels and the forms of their values into
`k8s/base/admission.yaml`, so that the API refuses anything else, even if the labeler is
compromised. NVIDIA's operators act on some labels of the same domain, such as
`nvidia.com/gpu.deploy.driver` and `nvidia.com/mig.config`; these must never be here. Of the labels
below, the GPU Operator reads `mig.capable` and `gpu.product` (controllers/state_manager.go,
hasMIGCapableGPU); docs/security.md explains the consequences.

The forms are regular expressions that Python and CEL (RE2) understand alike, without backslashes.
"""

from collections.abc import Mapping
from typing import Final

from muster_labeler.naming import accelerators, feature_discovery

_FLAG: Final = "true|false"
_NUMBER: Final = "[0-9]{1,16}"
_PART: Final = "[0-9]{1,9}"
_NAME: Final = "[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?"
_VALUE: Final = "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_SHARING: Final = "(none|time-slicing)?"

MEASURES: Final = (
    *("count", "replicas", "memory", "multiprocessors", "slices.gi", "slices.ci"),
    *("engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg", "engines.ofa"),
)
"""The names of the numbers in labels about GPUs, and about the MIG devices of a profile."""

_OF_RESOURCE: Final = {
    **dict.fromkeys(MEASURES, _NUMBER),
    "product": _VALUE,
    "sharing-strategy": _SHARING,
}
_OF_NVIDIA: Final = {
    **{f"gpu.{name}": form for name, form in _OF_RESOURCE.items()},
    "gpu.machine": _VALUE,
    "gpu.mode": "graphics|compute|unknown",
    "gpu.clique": "[A-Za-z0-9][A-Za-z0-9_.-]{0,61}[A-Za-z0-9]",
    "gpu.family": "[a-z-]{1,20}",
    "gpu.compute.major": _PART,
    "gpu.compute.minor": _PART,
    "mig.capable": _FLAG,
    "mig.strategy": "single|mixed",
    "mps.capable": "false",
    "vgpu.present": _FLAG,
    "cuda.driver-version.full": f"{_PART}[.]{_PART}([.]{_PART})?",
    "cuda.driver-version.major": _PART,
    "cuda.driver-version.minor": _PART,
    "cuda.driver-version.revision": f"({_PART})?",
    "cuda.driver.major": _PART,
    "cuda.driver.minor": _PART,
    "cuda.driver.rev": f"({_PART})?",
    "cuda.runtime-version.full": f"{_PART}[.]{_PART}",
    "cuda.runtime-version.major": _PART,
    "cuda.runtime-version.minor": _PART,
    "cuda.runtime.major": _PART,
    "cuda.runtime.minor": _PART,
}

FORMS: Final[Mapping[str, str]] = {
    accelerators.SKYPILOT: _NAME,
    accelerators.MUSTER: _NAME,
    accelerators.COUNT: _NUMBER,
    accelerators.MEMORY: _NUMBER,
    **{f"{feature_discovery.DOMAIN}/{key}": form for key, form in sorted(_OF_NVIDIA.items())},
}
"""The form of each label's value, by key; for the labels of MIG profiles see below."""


def _alternatives(keys: Mapping[str, str]) -> str:
    return "|".join(key.replace(".", "[.]") for key in keys)


_PROFILE_PREFIX: Final = f"{feature_discovery.DOMAIN.replace('.', '[.]')}/mig-"
PROFILE_KEY: Final = (
    f"{_PROFILE_PREFIX}{feature_discovery.PROFILE}[.]({_alternatives(_OF_RESOURCE)})"
)
"""The pattern of the keys of one MIG profile's labels."""
PROFILE_LABEL: Final = (
    f"{_PROFILE_PREFIX}{feature_discovery.PROFILE}[.]"
    f"(({_alternatives(dict.fromkeys(MEASURES, ''))})={_NUMBER}"
    f"|product={_VALUE}|sharing-strategy={_SHARING})"
)
"""The pattern of the labels of one MIG profile, as `<key>=<value>`."""
