"""Adapter for buildah: builds images of third-party device plugins, which muster watches in tests.

They are built when a test needs them, not with the cluster. generic-device-plugin is not pinned
here; its program is taken from the PATH if it exists there.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from scripts.cluster import images, tools

IMAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nvidia-device-plugin": "nvcr.io/nvidia/k8s-device-plugin:v0.19.3",
        "intel-gpu-plugin": "docker.io/intel/intel-gpu-plugin:0.36.0",
        "sample-device-plugin": "registry.k8s.io/e2e-test-images/sample-device-plugin:1.37.2",
    }
)
"""The image that is built from each module of TOOLS."""
GENERIC: Final = "generic-device-plugin"
GENERIC_IMAGE: Final = "docker.io/squat/generic-device-plugin:latest"


def build(say: Callable[[str], None]) -> list[Path]:
    """Build the images that are not in the cache; return the archives of all images."""
    archives = []
    for module, image in IMAGES.items():
        folder = tools.built(module, say)
        (program,) = folder.iterdir()
        archives.append(_packed(module, program, image, say, has_libc=module in tools.CGO))
    if generic := shutil.which(GENERIC):
        # it is unknown how the program was linked
        archives.append(_packed(GENERIC, Path(generic), GENERIC_IMAGE, say, has_libc=True))
    return archives


def _packed(
    name: str, program: Path, image: str, say: Callable[[str], None], *, has_libc: bool
) -> Path:
    return images.kept(
        name,
        images.digest(program),
        lambda file: images.one_program(file, program, image, has_libc=has_libc),
        say,
    )
